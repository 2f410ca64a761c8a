"""The load of a server: lengths of requests, and how fast they arrive."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from exporter.analysis import kv_formulas
from exporter.analysis.kv_formulas import Moments
from exporter.analysis.load_profile import LoadProfile
from exporter.simulation.arrivals import Arrivals, ClosedLoop, Poisson, Trace
from exporter.simulation.rng import Rng
from exporter.simulation.settings import Engine
from exporter.simulation.timing import NANOSECONDS, nanoseconds
from exporter.simulation.workload import Lengths, Request, random_requests

__all__ = ["Load", "fitting_seats", "held_tokens", "moments", "observed_loads"]

# More waiting requests change nothing in a simulation; more requests per second are no load of one engine.
_MOST_WAITING: Final = 3000
_MOST_PER_SECOND: Final = 2000.0
_LONGEST_PREFIX: Final = 1 << 20
# Below this share of the variance that random arrivals would have, the load is a closed loop.
_STEADY: Final = 0.25
# Standard deviation of a normal distribution / its median distance from the median.
_NORMAL: Final = 1.48
# A queue grows if it takes in this share of the arrivals.
_GROWS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Load:
    """A constant load, with exactly one of ``rate``, ``clients`` and ``trace``."""

    prompts: Lengths | None = None  # tokens, drawn independently of the outputs (unused with a trace)
    outputs: Lengths | None = None
    rate: float | None = None  # requests per second, at random (Poisson)
    clients: int | None = None  # requests in flight; each finished request is replaced by the next
    trace: tuple[Request, ...] = ()  # with arrival times, repeated from the start when it ends
    prefixes: int = 0  # number of shared prefixes; each prompt starts with one
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        given = [x for x in (self.rate, self.clients, self.trace or None) if x is not None]
        if len(given) != 1 or (not self.trace and (self.prompts is None or self.outputs is None)):
            raise ValueError("a load expects one of rate, clients and trace, and lengths with the first two")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate: expected requests per second above 0, got {self.rate}")
        if self.clients is not None and self.clients < 1:
            raise ValueError(f"clients: expected at least 1, got {self.clients}")

    def lengths(self) -> tuple[Lengths, Lengths]:
        """Return the distributions of prompt and output lengths."""
        if self.prompts is not None and self.outputs is not None:
            return self.prompts, self.outputs
        return (
            Lengths(tuple((r.prompt_tokens, r.prompt_tokens, 1) for r in self.trace)),
            Lengths(tuple((r.output_tokens, r.output_tokens, 1) for r in self.trace)),
        )

    def requests_per_second(self) -> float | None:
        """Return the rate of arrival, or None for a closed loop."""
        if self.trace:
            span = self._span()
            return len(self.trace) / span if span else None
        return self.rate

    def arrivals(self, seed: int, end: int, replicas: int = 1) -> Arrivals:
        """Return the arrivals at one of several equal servers, up to a time in nanoseconds.

        The clients of a closed loop are divided (rounded up), a trace is dealt out request by request.
        """
        if self.trace:
            return Trace(itertools.islice(self._repeated(), seed % replicas, None, replicas), end)
        prompts, outputs = self.lengths()
        rng = Rng(seed)
        requests = random_requests(
            prompts, outputs, rng.fork(), prefixes=self.prefixes, prefix_tokens=self.prefix_tokens
        )
        if self.clients is not None:
            return ClosedLoop(requests, -(-self.clients // replicas), end)
        return Poisson(requests, (self.rate or 0.0) / replicas, rng.fork(), end)

    def _span(self) -> float:
        """Return the seconds from the start of the trace to its repetition, one mean gap after its end."""
        last = max(r.arrival or 0 for r in self.trace) / NANOSECONDS
        return last * len(self.trace) / max(1, len(self.trace) - 1)

    def _repeated(self) -> Iterator[Request]:
        # A trace without duration is repeated each second.
        span = nanoseconds(self._span()) or NANOSECONDS
        for round_ in itertools.count():
            for i, request in enumerate(self.trace):
                arrival = (request.arrival or 0) + round_ * span
                yield replace(request, id=round_ * len(self.trace) + i, arrival=arrival)


def observed_loads(
    profile: LoadProfile, prompts: Lengths, outputs: Lengths, seats: int
) -> tuple[tuple[Load, str], ...]:
    """Return the loads that may explain what an engine showed, most likely first, each with a sentence.

    A total of running and waiting requests that hardly varies is a closed loop of that many clients (or of a
    gateway's limit). One that varies as random arrivals do is an open load. A queue that keeps growing is
    simulated as it is now: an open load beyond the capacity has no lasting state. Prefix hits become one
    shared prefix of the right length.
    """
    shared = round((profile.prefix_cache_hit_ratio or 0.0) * prompts.mean)
    common = Load(
        prompts, outputs, clients=1, prefixes=1 if shared else 0, prefix_tokens=min(shared, _LONGEST_PREFIX)
    )
    in_flight = profile.in_flight_median
    clients = max(1, min(round(in_flight), seats + _MOST_WAITING))
    closed = replace(common, clients=clients), f"{clients} clients, each with one request at a time"
    arrived = profile.arrivals_per_second * profile.window_seconds
    growth = arrived - profile.requests_finished
    rate = min(profile.arrivals_per_second, _MOST_PER_SECOND)
    if rate <= 0:
        return (closed,)
    # The variance, robust against pauses of all clients, and that of random arrivals, in a short window too.
    variance, expected = (_NORMAL * profile.in_flight_deviation) ** 2, min(in_flight, arrived / 2)
    if variance < _STEADY * expected:
        return (closed,)
    if profile.requests_waiting_mean >= 1 and growth > max(
        _GROWS * arrived, 0.5 * profile.requests_waiting_mean
    ):
        return ((closed[0], f"the queue stays at {clients} requests in all, though it grew"),)
    opened = replace(common, clients=None, rate=rate), "requests arrive at random times"
    return (opened, closed)


def held_tokens(load: Load) -> tuple[float, float]:
    """Return mean and standard deviation of the tokens per *running* request (see `kv_formulas`)."""
    prompts, outputs = load.lengths()
    return kv_formulas.context_per_request(moments(prompts), moments(outputs))


def moments(lengths: Lengths) -> Moments:
    """Return E[X], E[X^2], E[X^3] of a distribution of lengths."""
    total = sum(weight for _, _, weight in lengths.ranges)
    sums = [0.0, 0.0, 0.0]
    for least, most, weight in lengths.ranges:
        for i, up_to in enumerate(_POWER_SUMS):
            sums[i] += weight * (up_to(most) - up_to(least - 1)) / (most - least + 1)
    return sums[0] / total, sums[1] / total, sums[2] / total


# 1 + 2^p + ... + n^p for p = 1, 2, 3 (Faulhaber).
_POWER_SUMS: Final[tuple[Callable[[int], int], ...]] = (
    lambda n: n * (n + 1) // 2,
    lambda n: n * (n + 1) * (2 * n + 1) // 6,
    lambda n: (n * (n + 1) // 2) ** 2,
)


def fitting_seats(load: Load, engine: Engine) -> int:
    """Return the most requests whose held tokens fit into the pool (`kv_formulas.seats`), at least 1."""
    capacity = engine.usable_blocks * engine.block_size
    return max(1, kv_formulas.seats(capacity, *held_tokens(load), engine.block_size))
