"""The verdict of a target of which no engine can be read. Pure."""

from dataclasses import dataclass
from functools import cache
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity

__all__ = ["REACHABLE", "TargetJudgement", "judge_target"]

REACHABLE: Final = "reachable"
"""The verdict of a target with an engine that can be read; the rest is in its engines' verdicts."""
_ENGINE_MISSING: Final = "engine_missing"


@dataclass(frozen=True, slots=True)
class TargetJudgement:
    """The judgement of a target."""

    verdict: str  # `REACHABLE` where an engine can be read
    severity: Severity  # of the verdict or the finding
    findings: tuple[str, ...] = ()  # ``engine_missing`` or nothing
    fixes: tuple[str, ...] = ()  # ids of the fixes of the verdict or the finding


def judge_target(
    current: str | None,
    *,
    answered: bool,
    since_good: float | None,
    grace_left: float,
    patience: float,
    engines: int,
    missing: int,
) -> TargetJudgement:
    """Judge a target after a poll.

    Args:
        current: the verdict before it.
        answered: whether the server answered the poll, even if its response is no metrics text.
        since_good: seconds since the last valid body, None before the first.
        grace_left: seconds that the first good poll may still take; there is no second grace.
        patience: seconds for which the last reading stays valid while polls fail.
        engines: number of engines in the last good body.
        missing: number of engines that it lacks and earlier ones had.
    """
    if answered:
        if engines == 0:
            return _judgement("metrics_missing")
        if missing:
            finding = catalogue.load().findings[_ENGINE_MISSING]
            return TargetJudgement(REACHABLE, finding.severity, (finding.name,), finding.fixes)
        return _judgement(REACHABLE)
    if since_good is None:
        return _judgement("starting" if grace_left > 0 else "unreachable")
    return _judgement("unreachable" if since_good > patience else current or REACHABLE)


@cache
def _judgement(name: str) -> TargetJudgement:
    verdict = catalogue.load().verdicts[name]
    return TargetJudgement(name, verdict.severity, (), verdict.fixes)
