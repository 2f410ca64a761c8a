"""Simulates every candidate change under a load and compares it with the present.

Pure: the caller chooses how many cores do the runs (``mapper``) and how progress is shown.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from exporter.config import WhatIfConfig
from exporter.simulation.calibration import Calibration, Comparison, Observed, calibrate
from exporter.simulation.candidates import Candidate
from exporter.simulation.figures import FIGURES, Figure, figures_of, spread
from exporter.simulation.load import Load, fitting_seats
from exporter.simulation.run import Result, simulate
from exporter.simulation.settings import Engine
from exporter.simulation.timing import NANOSECONDS, StepTime, nanoseconds

__all__ = [
    "FIGURES",
    "HELPS",
    "NO_HELP",
    "PRESENT",
    "SUFFICES",
    "UNCERTAIN",
    "WORSE",
    "Calibration",
    "Comparison",
    "Figure",
    "Forecast",
    "Job",
    "Observed",
    "Row",
    "forecast",
    "horizon",
    "ratios",
    "spread",
    "work",
]

# The codes of the verdicts; `report` has the words.
SUFFICES: Final = "suffices"
HELPS: Final = "helps"
UNCERTAIN: Final = "uncertain"
NO_HELP: Final = "no_help"
WORSE: Final = "worse"
PRESENT: Final = "now"
# A change that leaves at most this share of the preemptions can make answers steadier.
_FEWER: Final = 2 / 3

# Requests that finish in a run.
_REQUESTS: Final = 160
# Steps simulated one by one in all runs of a forecast together, and at least in each: this bounds CPU time.
_EFFORT: Final = 200_000
_LEAST_EFFORT: Final = 2_000


@dataclass(frozen=True, slots=True)
class Job:
    """One run; it can be sent to another process."""

    engine: Engine
    load: Load
    replicas: int
    seed: int
    warm_up: float
    duration: float
    effort: float = math.inf  # see `simulate`


def work(job: Job) -> Result:
    """Simulate one of the equal servers, and measure it after the warm-up."""
    end = nanoseconds(job.warm_up + job.duration)
    arrivals = job.load.arrivals(job.seed, end, job.replicas)
    return simulate(job.engine, arrivals, warm_up=nanoseconds(job.warm_up), end=end, effort=job.effort)


@dataclass(frozen=True, slots=True)
class Row:
    """The effect of a candidate."""

    candidate: Candidate
    figures: Mapping[str, Figure]  # by the names in `FIGURES`; latencies are missing if no request finished
    score: float  # throughput ratio divided by the geometric mean of the e2e p50 and p95 ratios
    verdict: str
    stuck: str | None = None  # why the engine stopped in one of the runs


@dataclass(frozen=True, slots=True)
class Forecast:
    """The present, and the changes ranked by throughput and latency; times in seconds."""

    calibration: Calibration
    present: Row
    rows: tuple[Row, ...]
    seeds: int
    warm_up: float
    duration: float
    step_times: tuple[StepTime, ...] = ()  # those that were simulated, best first


def horizon(load: Load, engine: Engine) -> tuple[float, float]:
    """Return how long to warm up and how long to measure, in seconds of simulated time.

    Three times as long as a request stays; then four times as long, and the time in which 160 requests
    finish. At most one hour and four.
    """
    prompts, outputs = load.lengths()
    seats = min(engine.max_num_seqs, load.clients or engine.max_num_seqs, fitting_seats(load, engine))
    step = engine.step_time.of(seats, seats) / NANOSECONDS
    service = outputs.mean * step + prompts.mean * engine.step_time.per_token * seats / NANOSECONDS
    rate = seats / max(service, 1e-9)
    stay = max(service, (load.clients or 0) / rate)
    if (arriving := load.requests_per_second()) is not None:
        rate = min(rate, arriving)
    return min(3 * stay, 3600.0), min(max(4 * stay, _REQUESTS / rate), 14400.0)


def forecast(  # noqa: PLR0913 -- all but two by name
    load: Load,
    changes: Sequence[Candidate],
    *,
    step_times: Sequence[StepTime] = (),
    span: tuple[float, float] | None = None,
    observed: Observed | None = None,
    thresholds: WhatIfConfig = WhatIfConfig(),  # noqa: B008 -- frozen
    effort: float | None = None,
    mapper: Callable[[Callable[[Job], Result], Iterable[Job]], Iterable[Result]] = map,
    progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Simulate the present and every change, and compare.

    Args:
        load: The load of the server.
        changes: The first is the present; see `exporter.simulation.candidates.candidates`.
        step_times: Those that the observations allow, best first; by default that of the present. The best
            one is simulated with all seeds, each other one with the first seed.
        span: Seconds to warm up and to measure; see `horizon` for the default.
        observed: What the real server did, if known.
        thresholds: Thresholds of the verdicts, and the number of runs of each change; all changes get the
            same seeds and so the same requests.
        effort: of each run, see `simulate`; by default a share of a fixed effort.
        mapper: ``map``, or that of a process pool, for `work`.
        progress: Called after each run with the number of finished runs and of all runs.

    Returns:
        The forecast; its rows are ranked, best first.
    """
    warm_up, duration = span or horizon(load, changes[0].engine)
    step_times = tuple(step_times) or (changes[0].engine.step_time,)
    plan = [(step_times[0], seed) for seed in range(1, thresholds.seeds + 1)]
    plan += [(step_time, 1) for step_time in step_times[1:]]
    keys = list(dict.fromkeys((change.engine, change.replicas) for change in changes))
    effort = effort or max(_LEAST_EFFORT, _EFFORT // (len(keys) * len(plan)))
    jobs = [
        Job(replace(engine, step_time=step_time), load, replicas, seed, warm_up, duration, effort)
        for engine, replicas in keys
        for step_time, seed in plan
    ]
    results = []
    for result in mapper(work, jobs):
        results.append(result)
        if progress is not None:
            progress(len(results), len(jobs))
    runs = {key: results[i * len(plan) : (i + 1) * len(plan)] for i, key in enumerate(keys)}
    now = runs[changes[0].engine, changes[0].replicas]
    present = _row(changes[0], now, None, {}, thresholds)
    rows = [
        _row(change, runs[change.engine, change.replicas], now, present.figures, thresholds)
        for change in changes[1:]
    ]
    rows.sort(key=lambda row: (row.stuck is not None, -row.score))
    calibration = calibrate(observed, present.figures, thresholds)
    return Forecast(calibration, present, tuple(rows), thresholds.seeds, warm_up, duration, step_times)


def _row(
    change: Candidate,
    results: Sequence[Result],
    now: Sequence[Result] | None,
    present: Mapping[str, Figure],
    thresholds: WhatIfConfig,
) -> Row:
    """Compare the runs of a change with those of the present; None if it is the present."""
    figures = figures_of(results, now, change.replicas, thresholds.seeds)
    stuck = next((r.stuck for r in results if r.stuck), None)
    throughput, latency = ratios(figures)
    score = throughput / latency if latency else 0.0
    verdict = PRESENT
    if now is not None:
        verdict = WORSE if stuck else _verdict(figures, present, thresholds)
    return Row(change, figures, score, verdict, stuck)


def ratios(figures: Mapping[str, Figure], which: str = "ratio") -> tuple[float, float]:
    """Return throughput and latency as ratios to now, or their extremes over all runs; 1 if unknown."""

    def ratio(name: str) -> float:
        value: float | None = getattr(figures[name], which) if name in figures else None
        return 1.0 if value is None else value

    p50, p95 = ratio("e2e_p50_seconds"), ratio("e2e_p95_seconds")
    return ratio("output_tokens_per_second"), float((p50 * p95) ** 0.5)


def _verdict(figures: Mapping[str, Figure], now: Mapping[str, Figure], thresholds: WhatIfConfig) -> str:
    """Return the verdict: of all step times together, or that they disagree.

    Throughput and latency decide, never the preemptions alone. With the extremes of both, a change can do
    harm or good in some run; twice the noise counts there, because an extreme is further off than a mean.
    """
    noise = max(thresholds.noise, spread(now.get("output_tokens_per_second")))
    throughput, latency = ratios(figures)
    (fewest, fastest), (most, slowest) = ratios(figures, "ratio_least"), ratios(figures, "ratio_most")
    harm = fewest < 1 - 2 * noise or (slowest > 1 + thresholds.slower + noise and fewest <= 1 + noise)
    good = most > 1 + 2 * noise or fastest < 1 - 2 * noise
    if throughput < 1 - noise or (latency > 1 + thresholds.slower and throughput <= 1 + noise):
        return UNCERTAIN if good and most > 1 + noise else WORSE
    if throughput > 1 + noise or latency < 1 - noise:
        if harm or (fewest < 1 and slowest > 1):
            return UNCERTAIN
        return SUFFICES if _cured(figures, now, thresholds) else HELPS
    if harm or good:
        return UNCERTAIN
    if _cured(figures, now, thresholds):
        return SUFFICES
    return HELPS if _steadied(figures, now, noise, thresholds) else NO_HELP


def _steadied(
    figures: Mapping[str, Figure], now: Mapping[str, Figure], noise: float, thresholds: WhatIfConfig
) -> bool:
    """Return whether a third of the preemptions end and tokens come faster one after the other.

    That costs nothing where throughput and latency stay, and answers stall less.
    """
    before, name = now.get("preemptions_per_request"), "preemptions_per_request"
    if before is None or before.mean <= thresholds.preempted or name not in figures:
        return False
    preempted, gap = figures[name].ratio, figures.get("inter_token_seconds")
    faster = gap is not None and gap.ratio is not None and gap.ratio < 1 - noise
    return faster and preempted is not None and preempted <= _FEWER


def _cured(figures: Mapping[str, Figure], now: Mapping[str, Figure], thresholds: WhatIfConfig) -> bool:
    """Return whether preemptions and queue are over in all runs, if there was one of the two."""
    trouble = False
    for name, limit in (("preemptions_per_request", thresholds.preempted), ("waiting", thresholds.queued)):
        before, after = now.get(name), figures.get(name)
        trouble |= before is not None and before.mean > limit
        if before is None or after is None or max(after.most, before.mean * (after.ratio_most or 0)) > limit:
            return False
    return trouble
