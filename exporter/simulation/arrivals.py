"""The arrival of requests: all at once, one per free client, at random, or from a trace."""

import heapq
from collections.abc import Iterable
from typing import Protocol

from exporter.simulation.rng import Rng
from exporter.simulation.timing import NANOSECONDS
from exporter.simulation.workload import Request

__all__ = ["Arrivals", "Burst", "ClosedLoop", "Poisson", "Trace"]


class Arrivals(Protocol):
    """A source of requests."""

    def next_at(self) -> int | None:
        """Return when the next request arrives (nanoseconds), or None while no request is due."""

    def take(self) -> Request:
        """Take the next request."""

    def left(self, now: int) -> None:
        """Note that a request left the engine, finished or aborted."""


class Trace:
    """Requests with arrival times, in order of arrival; None counts as 0."""

    def __init__(self, requests: Iterable[Request], end: int | None = None) -> None:
        self._source = iter(requests)
        self._end = end
        self._next = next(self._source, None)

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
        """Ignore a request that left."""


class Burst(Trace):
    """All requests at the start, in order, whatever their times."""

    def _arrival(self, request: Request) -> int:  # noqa: ARG002 -- all arrive at once
        return 0


class Poisson(Trace):
    """Random arrivals: independent exponential gaps, ``rate`` requests per second on average."""

    def __init__(self, requests: Iterable[Request], rate: float, rng: Rng, end: int | None = None) -> None:
        if rate <= 0:
            raise ValueError(f"expected a rate above 0 requests per second, got {rate}")
        self._rng = rng
        self._gap = round(NANOSECONDS / rate)
        super().__init__(requests, end)
        self._at = rng.exponential(self._gap)

    def _arrival(self, request: Request) -> int:  # noqa: ARG002 -- drawn at random
        return self._at

    def take(self) -> Request:
        """Take the next request and draw the gap to the one after it."""
        self._at += self._rng.exponential(self._gap)
        return super().take()


class ClosedLoop(Trace):
    """A closed loop: each client sends its next request ``pause`` nanoseconds after its last one ended."""

    def __init__(
        self, requests: Iterable[Request], clients: int, end: int | None = None, pause: int = 0
    ) -> None:
        if clients < 1:
            raise ValueError(f"expected at least 1 client, got {clients}")
        super().__init__(requests, end)
        self._pause = pause
        self._due = [0] * clients

    def _arrival(self, request: Request) -> int:  # noqa: ARG002 -- when the next client sends
        return self._due[0]

    def next_at(self) -> int | None:
        """Return when the next client sends, or None while all clients wait for responses."""
        return super().next_at() if self._due else None

    def take(self) -> Request:
        """Take the next request, for the client that is due."""
        request = super().take()
        heapq.heappop(self._due)
        return request

    def left(self, now: int) -> None:
        """Free the client of a request that left."""
        heapq.heappush(self._due, now + self._pause)
