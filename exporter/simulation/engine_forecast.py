"""The forecast of an engine: which changes are simulated, how long, and within which bound of work. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from exporter.config import WhatIfConfig, as_number
from exporter.simulation.candidates import ASSUMED_POOLS, NOW, Candidate
from exporter.simulation.figures import figures_of
from exporter.simulation.from_status import Present
from exporter.simulation.run import Result
from exporter.simulation.search import RUNS, search
from exporter.simulation.whatif import Forecast, Job, forecast, horizon, ratios, work

if TYPE_CHECKING:
    from exporter.simulation.settings import Engine

__all__ = ["BUDGET", "bounded", "simulate_engine"]

Mapper = Callable[[Callable[[Job], Result], Iterable[Job]], Iterable[Result]]
BUDGET: Final = 250_000
"""Steps and arrivals of one forecast that are simulated one by one; each takes about 13 us of a core."""
# About how many changes are simulated with all seeds and step times.
_CHANGES: Final = 12
_WAITING_PER_SEAT: Final = 4
_MOST_RATE: Final = 10_000.0  # requests/s
_MOST_POOL: Final = 16.0
_MOST_REPLICAS: Final = 16


def simulate_engine(
    present: Present,
    thresholds: WhatIfConfig,
    combinations: Sequence[Candidate],
    span: tuple[float, float] | None,
    progress: Callable[[int, int], None] | None,
    mapper: Mapper,
) -> Forecast:
    """Search the values, then simulate the chosen changes with all seeds and step times."""
    load, now = present.load, Candidate(NOW, present.engine)
    times = tuple(present.step_times) or (present.engine.step_time,)
    engine = replace(present.engine, step_time=times[0])
    warm_up, measured = span or horizon(load, engine)
    runs = RUNS + (_CHANGES + len(combinations)) * (thresholds.seeds + len(times) - 1)
    effort = BUDGET / runs
    screen = _Screening(Job(engine, load, 1, 1, warm_up, measured, effort), mapper)
    pools, replicas = _sizes(present.fixes)
    changes = [now, *search(load, engine, pools, screen, replicas), *combinations]
    return forecast(
        load,
        changes,
        step_times=times,
        span=(warm_up, measured),
        observed=present.observed,
        thresholds=thresholds,
        effort=effort,
        mapper=mapper,
        progress=progress,
    )


def _sizes(fixes: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], int]:
    """Return how many times as many tokens each fix gives the pool, and the replicas that are advised."""
    pools, replicas = dict(ASSUMED_POOLS), 1
    for one in fixes:
        ratio = as_number((one.get("inputs") or {}).get("kv_capacity_ratio"))
        if ratio is not None and ratio > 1:
            pools[one["fix"]] = min(ratio, _MOST_POOL)
        if one["fix"] == "add_replicas":
            replicas = int(min(max(1, as_number(one.get("value")) or 1), _MOST_REPLICAS))
    return pools, replicas


def bounded(present: Present) -> Present:
    """Return the engine with a load that a simulation can hold, whatever the server's gauges say."""
    load, most = present.load, _WAITING_PER_SEAT * present.engine.max_num_seqs
    assumed = list(present.assumed)
    if load.clients is not None and load.clients > most:
        assumed.append(f"{most} requests at a time instead of {load.clients}: a longer queue changes nothing")
        load = replace(load, clients=most)
    if load.rate is not None and load.rate > _MOST_RATE:
        assumed.append(f"{_MOST_RATE:.0f} requests/s instead of {load.rate:.3g}")
        load = replace(load, rate=_MOST_RATE)
    if not load.trace and load.prefix_tokens > load.lengths()[0].mean:
        load = replace(load, prefix_tokens=round(load.lengths()[0].mean))
    return replace(present, load=load, assumed=tuple(assumed))


class _Screening:
    """Scores changes by one run each, with the requests of the present; no change runs twice."""

    def __init__(self, template: Job, mapper: Mapper) -> None:
        self._template = template
        self._mapper = mapper
        self._results: dict[tuple[Engine, int], Result] = {}

    def __call__(self, changes: Sequence[Candidate]) -> list[float]:
        """Return throughput divided by latency of each change, relative to the present."""
        present = self._template.engine, 1
        keys = [present, *((change.engine, change.replicas) for change in changes)]
        new = [key for key in dict.fromkeys(keys) if key not in self._results]
        jobs = [replace(self._template, engine=engine, replicas=servers) for engine, servers in new]
        self._results |= zip(new, self._mapper(work, jobs), strict=True)
        return [self._score(self._results[key], self._results[present], key[1]) for key in keys[1:]]

    def _score(self, run: Result, now: Result, servers: int) -> float:
        throughput, latency = ratios(figures_of([run], [now], servers, 1))
        return 0.0 if run.stuck or not latency else throughput / latency
