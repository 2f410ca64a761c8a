"""A recording's changes of verdict, line by line, and the report at its end: times, incidents, settings."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.engine import EngineReading
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.target_verdict import REACHABLE
from exporter.analysis.words import WORDS
from exporter.commands._timeline import SIGNALS
from exporter.publish.inert import inert
from exporter.publish.status import engine_names

__all__ = ["History"]

_COUNTED: Final = ("preemptions_total", "requests_finished_total")
_PEAK: Final = WORDS["kv_usage_max_ratio"]


@dataclass
class _Incident:
    """A time with a warning or worse without a break."""

    start: float
    before: EngineReading  # the last reading that was none of it; the first one where all were
    last: EngineReading
    end: float
    severity: Severity = Severity.WARNING
    verdicts: dict[str, None] = field(default_factory=dict)  # in the order in which they came
    kv_peak: float | None = None

    def describe(self) -> str:
        """Return start, length, verdicts, and what happened meanwhile."""
        happened = []
        for name in _COUNTED:
            then, now = (getattr(each.signals, name) for each in (self.before, self.last))
            if now is not None and then is not None:
                happened.append(WORDS[name].phrase(now - then))
        if self.kv_peak is not None:
            happened.append(_PEAK.phrase(self.kv_peak))
        names = ", ".join(name.replace("_", " ") for name in self.verdicts)
        return (
            f"{self.start:9.1f}s  for {self.end - self.start:.0f} s  {names} ({self.severity.value})"
            f"  {', '.join(happened)}"
        ).rstrip()


@dataclass
class _Followed:
    """One engine through the recording."""

    last: EngineReading | None = None
    shown: tuple[str, Severity] | None = None
    kv_peak: float | None = None
    incidents: list[_Incident] = field(default_factory=list)
    open: bool = False  # whether the last incident goes on

    def note(self, t: float, engine: EngineReading) -> bool:
        """Add a reading; returns whether its verdict or severity is new."""
        judgement, usage = engine.judgement, engine.signals.kv_usage_ratio
        self.kv_peak = _highest(self.kv_peak, usage)
        before, self.last = self.last or engine, engine
        if self.open:
            self.incidents[-1].end = t
        if judgement.severity < Severity.WARNING:
            self.open = False
        else:
            if not self.open:
                self.incidents.append(_Incident(t, before, engine, t))
            self.open, incident = True, self.incidents[-1]
            incident.last = engine
            incident.severity = max(incident.severity, judgement.severity)
            incident.verdicts.setdefault(judgement.verdict)
            incident.kv_peak = _highest(incident.kv_peak, usage)
        shown, self.shown = self.shown, (judgement.verdict, judgement.severity)
        return shown != self.shown


class History:
    """Follows a recording poll by poll."""

    def __init__(self) -> None:
        self._engines: dict[str, _Followed] = {}
        self._state = ""
        self._t = 0.0
        self._polls = self._failed = 0

    def note(self, t: float, reading: TargetReading) -> Iterator[str]:
        """Add a poll; yields a line for each change, and the numbers at that moment."""
        self._t = t
        self._polls += 1
        self._failed += not reading.up
        state = "up" if reading.up else f"down ({inert(reading.error or '')})"
        own = reading.judgement
        if own.verdict != REACHABLE:
            state += f": {_verdict(own.verdict, own.severity)}"
        if state != self._state:
            self._state = state
            yield f"{t:9.1f}s  {state}"
        for name, engine in engine_names(reading).items():
            if self._engines.setdefault(name, _Followed()).note(t, engine):
                judgement = engine.judgement
                yield (
                    f"{t:9.1f}s  engine {inert(name)}: {_verdict(judgement.verdict, judgement.severity)}"
                    f"{_first_fix(engine)}"
                )
                known = engine.signals.known()
                yield " " * 12 + "  ".join(
                    WORDS[each].phrase(known[each]) for each in SIGNALS if each in known
                )

    def report(self) -> Iterator[str]:
        """Yield the closing report, which is empty without any poll."""
        if not self._polls:
            return
        yield ""
        yield f"{self._t:.0f} s, {self._polls} polls, {self._failed} failed"
        for name, followed in self._engines.items():
            assert followed.last is not None  # noqa: S101 (it has been noted)
            yield from _engine(name, followed, followed.last)


def _engine(name: str, followed: _Followed, last: EngineReading) -> Iterator[str]:
    peak = f": {_PEAK.phrase(followed.kv_peak)}" if followed.kv_peak is not None else ""
    yield f"{inert(last.key.model)} engine {inert(name)}{peak}"
    facts, source = last.server_facts.facts, last.server_facts.source
    if facts:
        told = (f"{each} {str(value).lower()} ({source.get(each, '')})" for each, value in facts.items())
        yield f"  settings: {', '.join(told)}"
    spent = {verdict: seconds for verdict, seconds in last.verdict_seconds.items() if seconds}
    for verdict, seconds in spent.items():
        yield f"  {verdict.replace('_', ' '):22} {seconds:6.0f} s  {seconds / sum(spent.values()):4.0%}"
    count = len(followed.incidents)
    yield f"  {count or 'no'} incident{'' if count == 1 else 's'} (a warning or worse)"
    yield from (f"  {incident.describe()}" for incident in followed.incidents)


def _verdict(name: str, severity: Severity) -> str:
    return f"{name.replace('_', ' ')} ({severity.value})"


def _first_fix(engine: EngineReading) -> str:
    """Return the first fix with its flag, where something is to be done."""
    if engine.judgement.severity is Severity.NONE or not engine.advice.fixes:
        return ""
    shown = engine.advice.fixes[: 2 if engine.advice.fixes[0].together else 1]
    titles = (
        catalogue.load().fixes[each.fix].title + (f" ({each.flag})" if each.flag else "") for each in shown
    )
    return f"  fix: {' together with: '.join(titles)}"


def _highest(one: float | None, other: float | None) -> float | None:
    return max((each for each in (one, other) if each is not None), default=None)
