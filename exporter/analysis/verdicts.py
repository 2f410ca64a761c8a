"""Gives each engine one verdict at a time and limits how often it changes.

Pure. `conditions.ORDER` has the order and the conditions, the catalogue the severities. Severity may rise
at any poll. It falls, or the verdict changes at equal severity, at most once per hold time. Verdicts about
the life cycle and the data are entered at once.
"""

from dataclasses import dataclass
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.conditions import HEALTHY, ORDER, Evidence
from exporter.analysis.situation import Situation

__all__ = ["AT_ONCE", "HEALTHY", "Judge", "Judgement"]

UNREACHABLE: Final = "unreachable"
MISSING: Final = "metrics_missing"
# Facts, not judgements: entered at once, whatever the verdict before.
AT_ONCE: Final = frozenset({"unreachable", "starting", "sleeping", "metrics_missing", "data_untrusted"})
# Left at once as well: an engine that answers is not unreachable.
_LEFT_AT_ONCE: Final = frozenset({"unreachable", "starting"})
# A verdict that failed polls interrupt for at most this long is the same one: a busy server misses some.
_RESUMED_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of one engine."""

    verdict: str  # its name
    severity: Severity  # the catalogue's, or critical where the verdict's own function says so
    evidence: tuple[Evidence, ...]  # the numbers that supported it when its condition last applied
    since: float  # time at which the verdict was entered


class Judge:
    """Judges one engine, poll by poll."""

    __slots__ = ("_changed", "_lost", "_lost_at", "_now")

    def __init__(self) -> None:
        self._now: Judgement | None = None
        self._changed = float("-inf")
        # Before the polls began to fail: the judgement and the time of its last change.
        self._lost: tuple[Judgement, float] | None = None
        self._lost_at = 0.0

    @property
    def verdict(self) -> str | None:
        """The current verdict, None before the first poll."""
        return self._now.verdict if self._now else None

    def judge(self, situation: Situation) -> Judgement:
        """Judge after a successful poll: the first verdict in the order that applies.

        A verdict from before a few failed polls goes on as if they had succeeded.
        """
        if self._lost is not None and situation.t - self._lost_at <= _RESUMED_SECONDS:
            self._now, self._changed = self._lost
        self._lost = None
        restart = situation.history.restart
        renewed = restart is not None and restart.at > self._changed  # the old verdict is of another process
        hold = 0.0 if renewed else situation.thresholds.hold
        verdict = self.verdict
        for rule in ORDER:
            current = rule.verdict == verdict
            evidence = rule.applies(situation, current)
            if evidence is not None:
                severity = catalogue.load().verdicts[rule.verdict].severity
                if rule.is_critical is not None and rule.is_critical(situation, current and self._critical):
                    severity = Severity.CRITICAL
                elif (
                    severity < Severity.WARNING and rule.is_warning is not None and rule.is_warning(situation)
                ):
                    severity = Severity.WARNING
                return self._move(situation.t, rule.verdict, severity, evidence, hold)
        return self._move(situation.t, HEALTHY, catalogue.load().verdicts[HEALTHY].severity, (), hold)

    @property
    def _critical(self) -> bool:
        return self._now is not None and self._now.severity is Severity.CRITICAL

    def lost(self, t: float) -> Judgement:
        """Judge an engine whose server no longer answers."""
        if self._lost is None and self._now is not None and self._now.verdict != UNREACHABLE:
            self._lost, self._lost_at = (self._now, self._changed), t
        return self._move(t, UNREACHABLE, catalogue.load().verdicts[UNREACHABLE].severity, (), 0.0)

    def gone(self, t: float) -> Judgement:
        """Judge an engine that is missing from a good body."""
        return self._move(t, MISSING, catalogue.load().verdicts[MISSING].severity, (), 0.0)

    def _move(
        self, t: float, name: str, severity: Severity, evidence: tuple[Evidence, ...], hold: float
    ) -> Judgement:
        now = self._now
        if now is None or (name == now.verdict and severity == now.severity):
            judgement = Judgement(name, severity, evidence, t if now is None else now.since)
        else:
            free = now.severity < severity or name in AT_ONCE or now.verdict in _LEFT_AT_ONCE
            if not free and t - self._changed < hold:
                return now
            judgement = Judgement(name, severity, evidence, now.since if name == now.verdict else t)
            self._changed = t
        self._now = judgement
        return judgement
