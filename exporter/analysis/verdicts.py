"""One verdict per engine at a time: which comes first, when it may change, what speaks for it.

Pure. The order of precedence and the severities are the catalogue's; when a verdict holds is said in
`conditions`. Severity may rise at any poll; it falls, or the verdict changes at equal severity, at
most once per hold time. Verdicts of the life cycle and of the data are entered at once.
"""

from dataclasses import dataclass
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.conditions import CONDITIONS, Evidence, preemption_rare
from exporter.analysis.situation import Situation

__all__ = ["AT_ONCE", "HEALTHY", "Judge", "Judgement"]

HEALTHY: Final = "healthy"
UNREACHABLE: Final = "unreachable"
MISSING: Final = "metrics_missing"
LIGHT: Final = "preemption_light"
# Facts, not judgements: entered whatever was said a moment ago.
AT_ONCE: Final = frozenset({"unreachable", "starting", "sleeping", "metrics_missing", "data_untrusted"})
# Left at once too: an engine that answers is not unreachable.
_LEFT_AT_ONCE: Final = frozenset({"unreachable", "starting"})


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is said of an engine.

    Attributes:
        verdict: its name.
        severity: the catalogue's, or critical where the verdict is so bad here.
        evidence: the numbers that spoke for it when it was last found to hold.
        since: when the verdict was entered.
    """

    verdict: str
    severity: Severity
    evidence: tuple[Evidence, ...]
    since: float


class Judge:
    """Judges one engine, poll by poll."""

    __slots__ = ("_changed", "_now", "_order")

    def __init__(self) -> None:
        self._now: Judgement | None = None
        self._changed = float("-inf")
        self._order = tuple(name for name in catalogue.load().verdicts if name in CONDITIONS)

    @property
    def verdict(self) -> str | None:
        """The verdict at present, None before the first."""
        return self._now.verdict if self._now else None

    def judge(self, situation: Situation) -> Judgement:
        """The verdict after a good poll."""
        name, evidence = self._first(situation)
        critical = self._now is not None and self._now.severity is Severity.CRITICAL
        severity = _severity(name, situation, critical=critical and name == self.verdict)
        return self._move(situation.t, name, severity, evidence, situation.limits.hold)

    def lost(self, t: float) -> Judgement:
        """The verdict of an engine whose server does not answer any more."""
        return self._move(t, UNREACHABLE, catalogue.load().verdicts[UNREACHABLE].severity, (), 0.0)

    def gone(self, t: float) -> Judgement:
        """The verdict of an engine that a good body lacks."""
        return self._move(t, MISSING, catalogue.load().verdicts[MISSING].severity, (), 0.0)

    def _first(self, situation: Situation) -> tuple[str, tuple[Evidence, ...]]:
        held = self.verdict
        for name in self._order:
            evidence = CONDITIONS[name](situation, name == held)
            if evidence is not None:
                return name, evidence
            if name == "queue_not_kv":
                # Fewer preemptions than are worth a verdict of their own come after the queue.
                evidence = preemption_rare(situation, held == LIGHT)
                if evidence is not None:
                    return LIGHT, evidence
        return HEALTHY, ()

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


def _severity(name: str, situation: Situation, *, critical: bool) -> Severity:
    """The catalogue's severity; a deferred queue that hardly drains is critical, with a margin."""
    if name == "deferred_wait" and situation.span >= situation.limits.long_window / 2:
        waiting = situation.waiting_mean or 0.0
        drained = situation.long_finished / situation.span
        if waiting > drained * situation.limits.drain_critical / (2 if critical else 1):
            return Severity.CRITICAL
    return catalogue.load().verdicts[name].severity
