"""The figures of a forecast: what is read from the runs of a change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from exporter.simulation.run import Result

__all__ = ["FIGURES", "Figure", "figures_of", "spread"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a change: mean and extremes over the seeds, with the best step time."""

    mean: float
    least: float
    most: float
    ratio: float | None = None  # to the present's mean; None if that is zero, or for the present itself
    # Extremes of the ratio over all runs, with every step time of the set; each run is compared with the
    # present under the same step time and seed.
    ratio_least: float | None = None
    ratio_most: float | None = None


def _per(amount: float, unit: float) -> float | None:
    return amount / unit if unit else None


# From the result of one server and the number of servers.
FIGURES: Final[Mapping[str, Callable[[Result, int], float | None]]] = {
    "preemptions_per_minute": lambda run, replicas: _per(run.preemptions * replicas * 60, run.seconds),
    "preemptions_per_request": lambda run, _: _per(run.preemptions, run.finished),
    "recomputed_ratio": lambda run, _: _per(run.recomputed_tokens, run.scheduled_tokens),
    "recomputed_tokens_per_second": lambda run, replicas: _per(run.recomputed_tokens * replicas, run.seconds),
    "kv_peak_ratio": lambda run, _: run.kv_peak_ratio,
    "queue_seconds": lambda run, _: run.queue_mean,
    "running": lambda run, replicas: run.running_mean * replicas,
    "waiting": lambda run, replicas: run.waiting_mean * replicas,
    "output_tokens_per_second": lambda run, replicas: run.output_tokens_per_second * replicas,
    "inter_token_seconds": lambda run, _: run.inter_token_mean,
    "time_to_first_token_p50_seconds": lambda run, _: run.ttft_p50,
    "e2e_mean_seconds": lambda run, _: run.e2e_mean,
    "e2e_p50_seconds": lambda run, _: run.e2e_p50,
    "e2e_p95_seconds": lambda run, _: run.e2e_p95,
}


def figures_of(
    results: Sequence[Result], now: Sequence[Result] | None, replicas: int, seeds: int
) -> dict[str, Figure]:
    """Return the figures of a change by name; latencies are missing if no request finished.

    Args:
        results: of the change: the first ``seeds`` with the best step time, then those with the others.
        now: those of the present, in the same order; None if the change is the present.
        replicas: servers that share the load.
        seeds: see `results`.
    """
    figures = {}
    for name, read in FIGURES.items():
        best = [value for run in results[:seeds] if (value := read(run, replicas)) is not None]
        if not best:
            continue
        mean = sum(best) / len(best)
        figure = Figure(mean, min(best), max(best))
        if now is not None:
            bases = [value for run in now[:seeds] if (value := read(run, 1)) is not None]
            pairs = [(read(run, replicas), read(base, 1)) for run, base in zip(results, now, strict=True)]
            ratios = [value / base for value, base in pairs if value is not None and base]
            figure = Figure(
                mean,
                min(best),
                max(best),
                _per(mean * len(bases), sum(bases)),
                min(ratios, default=None),
                max(ratios, default=None),
            )
        figures[name] = figure
    return figures


def spread(figure: Figure | None) -> float:
    """Return half the range between the extremes, relative to the mean."""
    return 0.0 if figure is None or not figure.mean else (figure.most - figure.least) / 2 / figure.mean
