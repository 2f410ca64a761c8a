"""The requests of a scenario: the same ones for the server as it is and for each changed server."""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from exporter.simulation.arrivals import Arrivals, Trace
from exporter.simulation.rng import Rng
from exporter.simulation.timing import NANOSECONDS, nanoseconds
from exporter.simulation.workload import Lengths, Request, random_requests

__all__ = ["Clients", "Phase", "Traffic"]


@dataclass(frozen=True, slots=True)
class Phase:
    """Some time in which the load follows one line.

    Attributes:
        seconds: How long.
        rate: Requests per second at the start and at the end (open load).
        clients: Requests in flight (closed load).
        burst: Requests that arrive within the first second, besides the rate.
        prompts, outputs: Lengths in tokens.
    """

    seconds: float
    rate: tuple[float, float] = (0.0, 0.0)
    clients: int = 0
    burst: int = 0
    prompts: Lengths = field(default_factory=lambda: Lengths.between(100, 500))
    outputs: Lengths = field(default_factory=lambda: Lengths.between(50, 400))


@dataclass(frozen=True, slots=True)
class Traffic:
    """What clients send over a scenario.

    Attributes:
        phases: One after the other.
        closed: Whether each client waits for its answer (``clients`` counts), or requests come at a rate.
        patience: Seconds after which a client gives up; with a closed load it sends again.
        prefixes, prefix_tokens: Shared texts in front of the prompts.
        single: Requests sent once, with their own arrival.
        seed: Of all draws.
    """

    phases: tuple[Phase, ...]
    closed: bool = False
    patience: float | None = None
    prefixes: int = 0
    prefix_tokens: int = 0
    single: tuple[Request, ...] = ()
    seed: int = 1

    def arrivals(self, since: float = 0.0) -> Arrivals:
        """Return what arrives from some second on; an open load sends the same requests whatever it is."""
        if self.closed:
            return Clients(self, since)
        return Trace(r for r in self._requests() if (r.arrival or 0) >= nanoseconds(since))

    def bounds(self) -> list[tuple[float, Phase]]:
        """Return each phase with the second at which it begins."""
        found, at = [], 0.0
        for phase in self.phases:
            found.append((at, phase))
            at += phase.seconds
        return found

    def lengths(self, phase: int, dice: Rng) -> Iterator[Request]:
        """Yield requests with the lengths of a phase."""
        now = self.phases[phase]
        return random_requests(
            now.prompts, now.outputs, dice, prefixes=self.prefixes, prefix_tokens=self.prefix_tokens
        )

    @property
    def abort_after(self) -> int | None:
        """Nanoseconds until a client gives up."""
        return None if self.patience is None else nanoseconds(self.patience)

    def _requests(self) -> list[Request]:
        drawn = random.Random(self.seed)
        found: list[Request] = list(self.single)
        for number, (begin, phase) in enumerate(self.bounds()):
            lengths = self.lengths(number, Rng(self.seed * 31 + number))
            times = [begin + drawn.random() for _ in range(phase.burst)]
            most, at = max(phase.rate), begin
            while most and (at := at + drawn.expovariate(most)) < begin + phase.seconds:
                rate = phase.rate[0] + (phase.rate[1] - phase.rate[0]) * (at - begin) / phase.seconds
                if drawn.random() * most < rate:
                    times.append(at)
            found += [
                replace(next(lengths), arrival=nanoseconds(t), abort_after=self.abort_after) for t in times
            ]
        found.sort(key=lambda r: r.arrival or 0)
        return [replace(r, id=number) for number, r in enumerate(found)]


class Clients:
    """A closed load whose number of clients changes with the phases; single requests come on top."""

    def __init__(self, traffic: Traffic, since: float = 0.0, pause: float = 0.05) -> None:
        self._traffic = traffic
        self._pause = nanoseconds(pause)
        self._due: list[int] = []
        self._singles = [r for r in traffic.single if (r.arrival or 0) >= nanoseconds(since)]
        self._changes = [
            (nanoseconds(max(begin, since)), number, phase.clients)
            for number, (begin, phase) in enumerate(traffic.bounds())
            if begin + phase.seconds > since
        ]
        self._wanted = self._clients = 0
        self._dice = Rng(traffic.seed)
        self._requests = [
            traffic.lengths(number, Rng(traffic.seed * 31 + number)) for number in range(len(traffic.phases))
        ]
        self._phase = 0
        self._number = 0

    def next_at(self) -> int | None:
        """Return when the next client sends, or the number of clients changes."""
        while self._changes and self._changes_by(self._due[0] if self._due else None):
            at, self._phase, self._wanted = self._changes.pop(0)
            while self._clients < self._wanted:
                # They come within two seconds, not in one moment.
                heapq.heappush(self._due, at + self._dice.below(2 * NANOSECONDS))
                self._clients += 1
        moments = self._due[:1] + [r.arrival or 0 for r in self._singles[:1]]
        return min(moments, default=None)

    def take(self) -> Request:
        """Return the next request, with the lengths of the phase in which it is sent."""
        at = self.next_at()
        self._number += 1
        if self._singles and self._singles[0].arrival == at:
            return replace(self._singles.pop(0), id=self._number, arrival=None)
        heapq.heappop(self._due)
        request = next(self._requests[self._phase])
        return replace(request, id=self._number, abort_after=self._traffic.abort_after)

    def left(self, now: int) -> None:
        """Free a client: it sends again after a pause, or goes where there are too many."""
        if self._changes and self._changes_by(now) and self._changes[0][2] < self._wanted:
            _, self._phase, self._wanted = self._changes.pop(0)
        if self._clients > self._wanted:
            self._clients -= 1
        else:
            heapq.heappush(self._due, now + self._pause)

    def _changes_by(self, at: int | None) -> bool:
        """Whether the next change comes before a moment; fewer clients never come before their time."""
        begin, _, clients = self._changes[0]
        return clients >= self._wanted if at is None else begin <= at

    def lose_all(self, now: int) -> None:
        """Let every client that waits for an answer send again: the server that knew them is gone."""
        for _ in range(self._clients - len(self._due)):
            heapq.heappush(self._due, now + self._dice.below(2 * NANOSECONDS))
