"""What would each change do to this load? Every candidate simulated, measured against the present.

Pure: the caller decides on how many cores the runs are done (``mapper``) and how progress is shown.
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
    """Do one run: one of the equal servers, measured from the warm-up on (times in seconds)."""
    end = nanoseconds(job.warm_up + job.duration)
    arrivals = job.load.arrivals(job.seed, end, job.replicas)
    return simulate(job.engine, arrivals, warm_up=nanoseconds(job.warm_up), end=end)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a candidate: mean over the seeds, the extremes, and the mean's ratio to now.

    A ratio to a present of zero is None.
    """

    mean: float
    least: float
    most: float
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What a candidate would do.

    Attributes:
        candidate: The change.
        figures: By the names in `FIGURES`; what could not be measured (nothing finished) is missing.
        score: Throughput ratio over the geometric mean of the e2e p50 and p95 ratios; 1 = as now.
        verdict: "now" for the present, else "suffices", "helps", "does not help" or "makes it worse".
        stuck: Why an engine stopped for good in one of the runs, or None.
    """

    candidate: Candidate
    figures: Mapping[str, Figure]
    score: float
    verdict: str
    stuck: str | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well the simulation of the present matches what was observed.

    Attributes:
        observed, simulated: Preemptions per minute; observed is None when unknown.
        trusted: Whether they match; None when there is nothing to compare.
        sentence: The same for a person.
    """

    observed: float | None
    simulated: Figure
    trusted: bool | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer: whether to trust it, the present, and the changes ranked by throughput and latency."""

    calibration: Calibration
    present: Row
    rows: tuple[Row, ...]
    seeds: int
    warm_up: float
    duration: float


def _per_minute(result: Result, replicas: int) -> float | None:
    return result.preemptions * replicas * 60 / result.seconds if result.seconds else None


def _per_request(result: Result, replicas: int) -> float | None:  # noqa: ARG001 -- one form for all figures
    return result.preemptions / result.finished if result.finished else None


def _recomputed(result: Result, replicas: int) -> float | None:  # noqa: ARG001
    return result.recomputed_tokens / result.scheduled_tokens if result.scheduled_tokens else None


FIGURES: Final[Mapping[str, Callable[[Result, int], float | None]]] = {
    "preemptions_per_minute": _per_minute,
    "preemptions_per_request": _per_request,
    "recomputed_ratio": _recomputed,
    "kv_peak_ratio": lambda result, _: result.kv_peak_ratio,
    "queue_seconds": lambda result, _: result.queue_mean,
    "waiting": lambda result, replicas: result.waiting_mean * replicas,
    "output_tokens_per_second": lambda result, replicas: result.output_tokens_per_second * replicas,
    "e2e_p50_seconds": lambda result, _: result.e2e_p50,
    "e2e_p95_seconds": lambda result, _: result.e2e_p95,
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


def forecast(  # noqa: PLR0913 -- each has a default that is right for most
    load: Load,
    changes: Sequence[Candidate],
    *,
    seeds: int = 3,
    span: tuple[float, float] | None = None,
    observed: float | None = None,
    limits: WhatIfConfig | None = None,
    mapper: Callable[[Callable[[Job], Result], Iterable[Job]], Iterable[Result]] = map,
    progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Simulate the present and every change, and compare.

    Args:
        load: What is asked of the server.
        changes: The first is the present; see `exporter.simulation.candidates.candidates`.
        seeds: How many times each is run; the same seeds, so the same requests, for all.
        span: Seconds to warm up and to measure; see `horizon` for the default.
        observed: Preemptions per minute of the real server, if known.
        limits: Where the words of a verdict begin.
        mapper: ``map``, or that of a process pool, for `work`.
        progress: Told after each run how many of all are done.

    Returns:
        The forecast; its rows are ranked, best first, without the present.
    """
    warm_up, duration = span or horizon(load, changes[0].engine)
    keys = list(dict.fromkeys((change.engine, change.replicas) for change in changes))
    jobs = [
        Job(engine, load, replicas, seed, warm_up, duration)
        for engine, replicas in keys
        for seed in range(1, seeds + 1)
    ]
    results = _collected(mapper(work, jobs), len(jobs), progress)
    runs = {key: results[i * seeds : (i + 1) * seeds] for i, key in enumerate(keys)}
    return _compare(
        [(change, runs[change.engine, change.replicas]) for change in changes],
        span=(warm_up, duration),
        observed=observed,
        limits=limits or WhatIfConfig(),
    )


def _collected(
    results: Iterable[Result], total: int, progress: Callable[[int, int], None] | None
) -> list[Result]:
    collected = []
    for done, result in enumerate(results, 1):
        collected.append(result)
        if progress is not None:
            progress(done, total)
    return collected


def _compare(
    runs: Sequence[tuple[Candidate, Sequence[Result]]],
    *,
    span: tuple[float, float],
    observed: float | None,
    limits: WhatIfConfig,
) -> Forecast:
    (now, now_results), *others = runs
    figures = _figures(now_results, now.replicas)
    stuck = next((r.stuck for r in now_results if r.stuck), None)
    present = Row(now, figures, 1.0, PRESENT, stuck)
    rows = [_judged(change, results, present, limits) for change, results in others]
    rows.sort(key=lambda row: (row.stuck is not None, -row.score))
    return Forecast(
        _calibration(observed, now_results, present, limits), present, tuple(rows), len(now_results), *span
    )


def _figures(
    results: Sequence[Result], replicas: int, now: Mapping[str, Figure] | None = None
) -> dict[str, Figure]:
    figures = {}
    for name, read in FIGURES.items():
        values = [value for result in results if (value := read(result, replicas)) is not None]
        if not values:
            continue
        mean = sum(values) / len(values)
        base = now.get(name) if now is not None else None
        ratio = mean / base.mean if base is not None and base.mean else None
        figures[name] = Figure(mean, min(values), max(values), ratio)
    return figures


def _judged(change: Candidate, results: Sequence[Result], present: Row, limits: WhatIfConfig) -> Row:
    figures = _figures(results, change.replicas, present.figures)
    stuck = next((r.stuck for r in results if r.stuck), None)
    throughput, latency = _ratios(figures)
    row = Row(change, figures, throughput / latency if latency else 0.0, NO_HELP, stuck)
    return Row(change, figures, row.score, _word(row, present, limits), stuck)


def _ratios(figures: Mapping[str, Figure]) -> tuple[float, float]:
    """Return throughput and latency as ratios to now; 1 where one of them is unknown."""

    def ratio(name: str) -> float:
        figure = figures.get(name)
        return 1.0 if figure is None or figure.ratio is None else figure.ratio

    p50, p95 = ratio("e2e_p50_seconds"), ratio("e2e_p95_seconds")
    return ratio("output_tokens_per_second"), float((p50 * p95) ** 0.5)


def _word(row: Row, present: Row, limits: WhatIfConfig) -> str:
    """Choose the word. Work that gets done decides; the count of preemptions alone never does."""
    throughput, latency = _ratios(row.figures)
    noise = max(limits.noise, spread(present.figures.get("output_tokens_per_second")))
    if row.stuck or throughput < 1 - noise:
        return WORSE
    if latency > 1 + limits.slower and throughput <= 1 + noise:
        return WORSE
    if _cured(row.figures, present.figures, limits):
        return SUFFICES
    if throughput > 1 + noise or latency < 1 - noise:
        return HELPS
    return NO_HELP


def _cured(figures: Mapping[str, Figure], now: Mapping[str, Figure], limits: WhatIfConfig) -> bool:
    """Whether the present's trouble, preemptions first, else a queue, is over."""
    for name, limit in (("preemptions_per_request", limits.preempted), ("waiting", limits.queued)):
        before, after = now.get(name), figures.get(name)
        if before is not None and before.mean > limit:
            return after is not None and after.mean <= limit
    return False


def spread(figure: Figure | None) -> float:
    """Return half the distance between the extremes, relative to the mean."""
    return 0.0 if figure is None or not figure.mean else (figure.most - figure.least) / 2 / figure.mean


def _calibration(
    observed: float | None, results: Sequence[Result], present: Row, limits: WhatIfConfig
) -> Calibration:
    simulated = present.figures.get("preemptions_per_minute") or Figure(0.0, 0.0, 0.0)
    said = f"{simulated.mean:.2f} (from {simulated.least:.2f} to {simulated.most:.2f})"
    if observed is None:
        sentence = (
            f"the simulation of the present preempts {said} times a minute; what the server does is not known"
        )
        return Calibration(None, simulated, None, sentence)
    finished = sum(r.finished for r in results) / max(1e-9, sum(r.seconds for r in results)) * 60
    slack = max(limits.match * observed, limits.match_per_request * finished)
    trusted = simulated.least - slack <= observed <= simulated.most + slack
    verdict = "they match" if trusted else "they do not match: do not trust this forecast"
    sentence = f"preemptions per minute: observed {observed:.2f}, simulated {said}: {verdict}"
    return Calibration(observed, simulated, trusted, sentence)
