"""The verdict of a target of which no engine can be read. Pure."""

from dataclasses import dataclass
from functools import cache
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity

__all__ = ["REACHABLE", "TargetJudgement", "TargetState", "judge_target"]

REACHABLE: Final = "reachable"
"""The verdict of a target with an engine that can be read; the rest is in its engines' verdicts."""
_ENGINE_MISSING: Final = "engine_missing"


@dataclass(frozen=True, slots=True)
class TargetJudgement:
    """The judgement of a target.

    Attributes:
        verdict: ``healthy`` where an engine can be read.
        severity: of the verdict or the finding.
        findings: ``engine_missing`` or nothing.
        fixes: ids of the fixes of the verdict or the finding.
    """

    verdict: str
    severity: Severity
    findings: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetState:
    """The facts that a target is judged by. Times are in seconds.

    Attributes:
        answered: whether the server answered the last poll, even if its response is no metrics text.
        since_good: since the last valid body, None before the first.
        since_start: since the first poll.
        grace: how long the first good poll may take; there is no second grace.
        patience: how long the last reading stays valid while polls fail.
        engines: engines in the last good body.
        missing: engines that it lacks and earlier ones had.
    """

    answered: bool
    since_good: float | None
    since_start: float
    grace: float
    patience: float
    engines: int
    missing: int


def judge_target(state: TargetState, current: str | None) -> TargetJudgement:
    """Judge after a poll; `current` is the verdict before it."""
    if state.answered:
        if state.engines == 0:
            return _judgement("metrics_missing")
        if state.missing:
            finding = catalogue.load().findings[_ENGINE_MISSING]
            return TargetJudgement(REACHABLE, finding.severity, (finding.name,), finding.fixes)
        return _judgement(REACHABLE)
    if state.since_good is None:
        return _judgement("starting" if state.since_start < state.grace else "unreachable")
    return _judgement("unreachable" if state.since_good > state.patience else current or REACHABLE)


@cache
def _judgement(name: str) -> TargetJudgement:
    verdict = catalogue.load().verdicts[name]
    return TargetJudgement(name, verdict.severity, (), verdict.fixes)
