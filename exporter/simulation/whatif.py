"""Simulates every candidate change under a load and compares it with the present.

Pure: the caller chooses how many cores do the runs (``mapper``) and how progress is shown.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from exporter.config import WhatIfConfig
from exporter.simulation.candidates import Candidate
from exporter.simulation.load import Load
from exporter.simulation.run import Result, simulate
from exporter.simulation.settings import Engine
from exporter.simulation.timing import NANOSECONDS, nanoseconds

__all__ = [
    "FIGURES",
    "HELPS",
    "NO_HELP",
    "PRESENT",
    "SUFFICES",
    "WORSE",
    "Calibration",
    "Figure",
    "Forecast",
    "Job",
    "Row",
    "forecast",
    "horizon",
    "spread",
    "work",
]

SUFFICES: Final = "suffices"
HELPS: Final = "helps"
NO_HELP: Final = "does not help"
WORSE: Final = "makes it worse"
PRESENT: Final = "now"


@dataclass(frozen=True, slots=True)
class Job:
    """One run; it can be sent to another process."""

    engine: Engine
    load: Load
    replicas: int
    seed: int
    warm_up: float
    duration: float


def work(job: Job) -> Result:
    """Simulate one of the equal servers, and measure it after the warm-up."""
    end = nanoseconds(job.warm_up + job.duration)
    arrivals = job.load.arrivals(job.seed, end, job.replicas)
    return simulate(job.engine, arrivals, warm_up=nanoseconds(job.warm_up), end=end)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a candidate: mean and extremes over the seeds."""

    mean: float
    least: float
    most: float
    ratio: float | None = None  # to the present's mean; None if that is zero


@dataclass(frozen=True, slots=True)
class Row:
    """The effect of a candidate."""

    candidate: Candidate
    figures: Mapping[str, Figure]  # by the names in `FIGURES`; latencies are missing if no request finished
    score: float  # throughput ratio divided by the geometric mean of the e2e p50 and p95 ratios
    verdict: str
    stuck: str | None = None  # why the engine stopped in one of the runs


@dataclass(frozen=True, slots=True)
class Calibration:
    """A comparison of the simulated present with observations, in preemptions per minute."""

    observed: float | None
    simulated: Figure
    trusted: bool | None  # whether they match; None if there is nothing to compare
    sentence: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """The present, and the changes ranked by throughput and latency; times in seconds."""

    calibration: Calibration
    present: Row
    rows: tuple[Row, ...]
    seeds: int
    warm_up: float
    duration: float


def _per(amount: float, unit: float) -> float | None:
    return amount / unit if unit else None


# From the result of one server and the number of servers.
FIGURES: Final[Mapping[str, Callable[[Result, int], float | None]]] = {
    "preemptions_per_minute": lambda run, replicas: _per(run.preemptions * replicas * 60, run.seconds),
    "preemptions_per_request": lambda run, _: _per(run.preemptions, run.finished),
    "recomputed_ratio": lambda run, _: _per(run.recomputed_tokens, run.scheduled_tokens),
    "kv_peak_ratio": lambda run, _: run.kv_peak_ratio,
    "queue_seconds": lambda run, _: run.queue_mean,
    "waiting": lambda run, replicas: run.waiting_mean * replicas,
    "output_tokens_per_second": lambda run, replicas: run.output_tokens_per_second * replicas,
    "e2e_p50_seconds": lambda run, _: run.e2e_p50,
    "e2e_p95_seconds": lambda run, _: run.e2e_p95,
}


def horizon(load: Load, engine: Engine) -> tuple[float, float]:
    """Return how long to warm up and how long to measure, in seconds of simulated time.

    Three times as long as a request needs on a full engine, at least a minute; then ten times as long,
    at least five minutes and, where the rate is known, the time in which 200 requests arrive. At most
    one hour and four.
    """
    _, outputs = load.lengths()
    seats = min(engine.max_num_seqs, load.clients or engine.max_num_seqs)
    service = outputs.mean * engine.step_time.of(seats, seats) / NANOSECONDS
    rate = load.requests_per_second()
    measured = max(300.0, 10 * service, 200 / rate if rate else 0.0)
    return min(max(60.0, 3 * service), 3600.0), min(measured, 14400.0)


def forecast(
    load: Load,
    changes: Sequence[Candidate],
    *,
    span: tuple[float, float] | None = None,
    observed: float | None = None,
    thresholds: WhatIfConfig = WhatIfConfig(),  # noqa: B008 -- frozen
    mapper: Callable[[Callable[[Job], Result], Iterable[Job]], Iterable[Result]] = map,
    progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Simulate the present and every change, and compare.

    Args:
        load: The load of the server.
        changes: The first is the present; see `exporter.simulation.candidates.candidates`.
        span: Seconds to warm up and to measure; see `horizon` for the default.
        observed: Preemptions per minute of the real server, if known.
        thresholds: Thresholds of the verdicts, and the number of runs of each change; all changes get the
            same seeds and so the same requests.
        mapper: ``map``, or that of a process pool, for `work`.
        progress: Called after each run with the number of finished runs and of all runs.

    Returns:
        The forecast; its rows are ranked, best first.
    """
    warm_up, duration = span or horizon(load, changes[0].engine)
    seeds = thresholds.seeds
    keys = list(dict.fromkeys((change.engine, change.replicas) for change in changes))
    jobs = [
        Job(engine, load, replicas, seed, warm_up, duration)
        for engine, replicas in keys
        for seed in range(1, seeds + 1)
    ]
    results = []
    for result in mapper(work, jobs):
        results.append(result)
        if progress is not None:
            progress(len(results), len(jobs))
    runs = {key: results[i * seeds : (i + 1) * seeds] for i, key in enumerate(keys)}
    now, *others = ((change, runs[change.engine, change.replicas]) for change in changes)
    present = _row(*now, None, thresholds)
    rows = sorted(
        (_row(*other, present.figures, thresholds) for other in others),
        key=lambda row: (row.stuck is not None, -row.score),
    )
    calibration = _calibration(observed, now[1], present, thresholds)
    return Forecast(calibration, present, tuple(rows), seeds, warm_up, duration)


def _row(
    change: Candidate, results: Sequence[Result], now: Mapping[str, Figure] | None, thresholds: WhatIfConfig
) -> Row:
    """Compare a change with the figures of the present; None if it is the present."""
    figures = {}
    for name, read in FIGURES.items():
        values = [value for result in results if (value := read(result, change.replicas)) is not None]
        if values:
            mean = sum(values) / len(values)
            base = now.get(name) if now else None
            figures[name] = Figure(mean, min(values), max(values), _per(mean, base.mean) if base else None)
    stuck = next((r.stuck for r in results if r.stuck), None)
    throughput, latency = _ratios(figures)
    score = throughput / latency if latency else 0.0
    verdict = PRESENT
    if now is not None:
        verdict = WORSE if stuck else _verdict(figures, now, thresholds)
    return Row(change, figures, score, verdict, stuck)


def _ratios(figures: Mapping[str, Figure]) -> tuple[float, float]:
    """Return throughput and latency as ratios to now; 1 if unknown."""

    def ratio(name: str) -> float:
        figure = figures.get(name)
        return 1.0 if figure is None or figure.ratio is None else figure.ratio

    p50, p95 = ratio("e2e_p50_seconds"), ratio("e2e_p95_seconds")
    return ratio("output_tokens_per_second"), float((p50 * p95) ** 0.5)


def _verdict(figures: Mapping[str, Figure], now: Mapping[str, Figure], thresholds: WhatIfConfig) -> str:
    """Return the verdict. Throughput and latency decide, never the preemptions alone."""
    throughput, latency = _ratios(figures)
    noise = max(thresholds.noise, spread(now.get("output_tokens_per_second")))
    if throughput < 1 - noise:
        return WORSE
    if latency > 1 + thresholds.slower and throughput <= 1 + noise:
        return WORSE
    if _cured(figures, now, thresholds):
        return SUFFICES
    if throughput > 1 + noise or latency < 1 - noise:
        return HELPS
    return NO_HELP


def _cured(figures: Mapping[str, Figure], now: Mapping[str, Figure], thresholds: WhatIfConfig) -> bool:
    """Return whether the change ends the preemptions, or the queue if there were none."""
    for name, limit in (("preemptions_per_request", thresholds.preempted), ("waiting", thresholds.queued)):
        before, after = now.get(name), figures.get(name)
        if before is not None and before.mean > limit:
            return after is not None and after.mean <= limit
    return False


def spread(figure: Figure | None) -> float:
    """Return half the range between the extremes, relative to the mean."""
    return 0.0 if figure is None or not figure.mean else (figure.most - figure.least) / 2 / figure.mean


def _calibration(
    observed: float | None, results: Sequence[Result], present: Row, thresholds: WhatIfConfig
) -> Calibration:
    simulated = present.figures.get("preemptions_per_minute") or Figure(0.0, 0.0, 0.0)
    shown = f"{simulated.mean:.2f} (from {simulated.least:.2f} to {simulated.most:.2f})"
    if observed is None:
        sentence = f"preemptions per minute: simulated {shown}, those of the server are unknown"
        return Calibration(None, simulated, None, sentence)
    finished = sum(r.finished for r in results) / max(1e-9, sum(r.seconds for r in results)) * 60
    slack = max(thresholds.match * observed, thresholds.match_per_request * finished)
    trusted = simulated.least - slack <= observed <= simulated.most + slack
    verdict = "they match" if trusted else "they do not match: do not trust this forecast"
    sentence = f"preemptions per minute: observed {observed:.2f}, simulated {shown}: {verdict}"
    return Calibration(observed, simulated, trusted, sentence)
