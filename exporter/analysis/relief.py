"""What helps at once, without a restart, and what the fixes cost. Pure."""

import math
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Fix, Severity
from exporter.analysis.forecast import REJECTED, EngineForecast
from exporter.analysis.situation import Situation

__all__ = ["NOW", "gateway_limit", "limit_words", "loss", "paid", "relief"]

NOW: Final = "Now, without a restart"
"""The head of the list."""
_LIMIT: Final = "limit_concurrency"
# A limit further below what runs on average costs more throughput than the preemptions do.
_LEAST_SHARE: Final = 0.9
_LEAST_LIMIT: Final = 2.0


def gateway_limit(s: Situation, verdict: str, forecast: EngineForecast | None) -> float | None:
    """Return the requests to allow at once at the gateway: the most that ran here without preemption.

    None where the verdict has no use for it or none ran so, where no more are in flight now, and where it is
    far from what runs on average now: above it the requests have grown, below it throughput would fall.
    A trusted forecast knows better: it has the number of seats that helps, or rejects every lower number,
    and then the limit is infinite.
    """
    if _LIMIT not in catalogue.load().verdicts[verdict].now:
        return None
    running = s.history.mean("requests_running", s.history.window_start(s.t - s.thresholds.window))
    seats = forecast.of("lower_max_num_seqs") if forecast is not None and forecast.trusted else None
    if seats is not None and seats.outcome in REJECTED:
        return math.inf
    simulated = seats.value if seats is not None and seats.helps else None
    limit = simulated or s.baseline.calm_running()
    if running is None or s.requests is None or not limit < s.requests:
        return None
    if simulated:
        return simulated
    return limit if max(_LEAST_LIMIT, _LEAST_SHARE * running) <= limit <= running + 1 else None


def limit_words(limit: float | str | None) -> str | None:
    """Put a limit, or code that prints one, into words; None is unknown. An infinite one has no words."""
    if limit == math.inf:
        return None
    return "to fewer requests than now" if limit is None else f"to about {limit} requests per engine"


def relief(verdict: str, severity: Severity, limit: str | None) -> tuple[str, ...]:
    """Return what helps at once, best first, each with what it does; `limit` is as of `limit_words`.

    Empty where nothing helps at once, and below a warning, which needs no action. Without a `limit` there is
    no limit among them: a forecast says that it costs throughput.
    """
    if severity < Severity.WARNING:
        return ()
    table = catalogue.load()
    names = (name for name in table.verdicts[verdict].now if limit is not None or name != _LIMIT)
    deeds = (table.relief[name] for name in names)
    return tuple(f"{deed.action.replace('{limit}', limit or '')} {deed.effect}" for deed in deeds)


def paid(fix: Fix) -> str:
    """Return what a fix costs in few words: ``no restart``, ``restart``, ``more GPUs, restart``."""
    words = {"none": "no restart", "flag": "", "numerics": "answers change", "gpus": "more GPUs"}[fix.cost]
    return ", ".join(filter(None, (words, "restart" if fix.restarts else "")))


def loss(fix: Fix, running: float | None) -> str:
    """Return what a fix costs, with the number of requests that its restart loses; None if unknown."""
    if not fix.restarts:
        return paid(fix)
    count = "" if running is None else f"{running:.0f} "
    lost = "1 running request is lost, " if running == 1 else f"{count}running requests are lost, "
    return (
        f"{paid(fix).removesuffix('restart')}needs a restart: {lost if running != 0 else ''}minutes to load"
    )
