"""When requests reach the engine: all at once, one per free client, at random, or from a trace."""

import heapq
from collections.abc import Iterable, Iterator
from typing import Protocol

from exporter.simulation.rng import Dice
from exporter.simulation.timing import NANOSECONDS
from exporter.simulation.workload import Request

__all__ = ["Arrivals", "Burst", "Closed", "Poisson", "Timed"]


class Arrivals(Protocol):
    """A source of requests; it holds at most the next ones, never the whole future."""

    def next_at(self) -> int | None:
        """Return when the next request arrives (nanoseconds), or None while none is due."""

    def take(self) -> Request:
        """Take the next request."""

    def left(self, now: int) -> None:
        """Hear that a request left the engine, finished or given up."""


class Timed:
    """Requests that arrive at times of their own (a trace, in order of arrival; None counts as 0)."""

    def __init__(self, requests: Iterable[Request], end: int | None = None) -> None:
        self._source = iter(requests)
        self._end = end
        self._next = next(self._source, None)
        self._at = 0

    def _arrival(self, request: Request) -> int:
        return request.arrival or 0

    def next_at(self) -> int | None:
        """Return the arrival time of the next request, or None at the end."""
        if self._next is None:
            return None
        at = self._arrival(self._next)
        return None if self._end is not None and at >= self._end else at

    def take(self) -> Request:
        """Take the next request."""
        if self._next is None:
            raise ValueError("no request is left")
        request, self._next = self._next, next(self._source, None)
        return request

    def left(self, now: int) -> None:
        """Nothing follows from a request that left."""


class Burst(Timed):
    """All at the start, in order, whatever times they have."""

    def _arrival(self, request: Request) -> int:  # noqa: ARG002 -- at once is at once
        return 0


class Poisson(Timed):
    """At random: independent exponential gaps, ``rate`` requests a second on average."""

    def __init__(self, requests: Iterable[Request], rate: float, dice: Dice, end: int | None = None) -> None:
        if rate <= 0:
            raise ValueError(f"wanted a rate above 0 requests a second, got {rate}")
        self._dice = dice
        self._gap = round(NANOSECONDS / rate)
        super().__init__(requests, end)
        self._at = dice.exponential(self._gap)

    def _arrival(self, request: Request) -> int:  # noqa: ARG002 -- the dice decide
        return self._at

    def take(self) -> Request:
        """Take the next request and draw the gap to the one after it."""
        self._at += self._dice.exponential(self._gap)
        return super().take()


class Closed:
    """A closed loop: so many clients, each sends its next request when its last one ended.

    ``pause`` nanoseconds pass in between (the way to the client and back, thinking).
    """

    def __init__(
        self, requests: Iterable[Request], clients: int, end: int | None = None, pause: int = 0
    ) -> None:
        if clients < 1:
            raise ValueError(f"wanted at least 1 client, got {clients}")
        self._source: Iterator[Request] = iter(requests)
        self._end = end
        self._pause = pause
        self._next = next(self._source, None)
        self._due = [0] * clients

    def next_at(self) -> int | None:
        """Return when the next client sends, or None while all wait for answers."""
        if self._next is None or not self._due:
            return None
        at = self._due[0]
        return None if self._end is not None and at >= self._end else at

    def take(self) -> Request:
        """Take the next request in order for the client whose turn it is."""
        if self._next is None:
            raise ValueError("no request is left")
        heapq.heappop(self._due)
        request, self._next = self._next, next(self._source, None)
        return request

    def left(self, now: int) -> None:
        """Free the client whose request left."""
        heapq.heappush(self._due, now + self._pause)
