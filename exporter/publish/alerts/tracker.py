"""Tracks which alerts are active and when to send them. Pure: times are parameters."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, TypeAlias
from urllib.parse import quote_plus

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.engine import EngineReading
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.relief import limit_words
from exporter.config import AlertmanagerConfig
from exporter.config.facts import DAY
from exporter.config.options import duration
from exporter.publish.alerts import table
from exporter.publish.alerts.table import Alert

__all__ = ["LIFETIMES", "SOURCE", "ActiveAlerts", "Key", "Notice"]

# The value of the label `source`, which distinguishes these alerts from those of the rules.
SOURCE: Final = "sidecar"
# An alert that is not sent again ends after this many resend intervals, as with Prometheus: two pushes may
# get lost, and an exporter that restarts has the same verdict again before.
LIFETIMES: Final = 4
# The most engines that the text of a model's alert names.
_NAMED: Final = 3
# Labels of the place, in the order of the text.
_PLACE: Final = ("cluster", "namespace", "pod")
# Failed polls for less than this do not begin the hold time again.
_LAPSE_SECONDS: Final = 10.0
_KEEP: Final = duration(0, DAY)

# All labels, sorted: alerts with the same labels are the same alert.
Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """The state of one alert to send to Alertmanager. Times are unix seconds."""

    key: Key  # its labels
    annotations: Mapping[str, str]  # summary, description, runbook_url and perhaps dashboard_url
    starts_at: float  # when it was raised; the same in all its notices
    ends_at: float  # when it ended, or will end unless it is sent again
    resolved: bool  # whether it has ended
    useless_at: float  # when sending it no longer has an effect


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An alert whose condition applies after a poll, with the data of its text."""

    alert: Alert
    labels: Mapping[str, str]  # those of its scope
    engines: Sequence[EngineReading] = ()  # the ones whose numbers and fixes are shown
    counted: str = ""  # the number of engines, in words


@dataclass(slots=True)
class _State:
    """The state of an alert while its condition applies, and while it is kept after that."""

    candidate: _Candidate
    since: float  # by the readings' clock, as are the next two
    applied_at: float  # when its condition last applied
    sent_at: float = -math.inf
    starts_at: float = math.inf  # in unix seconds; infinite until it is raised

    @property
    def raised(self) -> bool:
        return self.starts_at < math.inf


# The alerts, by scope and name of their verdict or finding.
_Table: TypeAlias = Mapping[tuple[str, str], Sequence[Alert]]


class ActiveAlerts:
    """Tracks which alerts apply, since when, and when they were sent."""

    def __init__(self, config: AlertmanagerConfig, before: "ActiveAlerts | None" = None) -> None:
        """Start without alerts, or with those of a predecessor, which are sent again soon."""
        self._config = config
        self._lifetime = LIFETIMES * config.resend_interval
        place = "/".join(filter(None, (config.external_labels.get(name) for name in _PLACE)))
        self._where = f" ({place})" if place else ""
        self._table: defaultdict[tuple[str, str], list[Alert]] = defaultdict(list)
        for alert in table.alerts(config.page_by):
            self._table[alert.scope, alert.entry.name].append(alert)
        self._states: dict[Key, _State] = before._states if before else {}  # noqa: SLF001 (its own kind)
        for state in self._states.values():
            state.sent_at = -math.inf

    def observe(self, reading: TargetReading, wall: float) -> list[Notice]:
        """Return the notices to send after a poll: of alerts just raised, due again, or ended.

        Args:
            reading: of the poll.
            wall: the time of the reading in unix seconds.
        """
        t, notices = reading.t, []
        candidates = chain(*(find(reading, self._table) for find in (_of_engines, _of_models, _of_target)))
        active = {self._key(candidate): candidate for candidate in candidates}
        for key, candidate in active.items():
            state = self._states.setdefault(key, _State(candidate, t, t))
            state.candidate, state.applied_at = candidate, t
            if not state.raised and t - state.since >= self._config.hold:
                state.starts_at = wall
        over = [
            key for key, state in self._states.items() if t - state.applied_at >= self._kept(state, reading)
        ]
        ended = {key: self._states.pop(key) for key in over if key not in active}
        for key, state in self._states.items():
            if state.raised and t - state.sent_at >= self._config.resend_interval:
                state.sent_at = t
                notices.append(self._notice(key, state, wall, resolved=False))
        return notices + self._resolved(ended, wall)

    def _kept(self, state: _State, reading: TargetReading) -> float:
        """Return how long an alert stays after its condition: as long as by the rules, if it was raised."""
        if not state.raised:
            return 0.0 if reading.up else _LAPSE_SECONDS
        timing = state.candidate.alert.entry.timing
        return min(self._config.keep, _KEEP.read(timing.keep) if timing and timing.keep else 0.0)

    def end(self, wall: float) -> list[Notice]:
        """Return the notices to send when the target is removed: all raised alerts have ended."""
        states, self._states = self._states, {}
        return self._resolved(states, wall)

    def _resolved(self, states: Mapping[Key, _State], wall: float) -> list[Notice]:
        return [self._notice(key, one, wall, resolved=True) for key, one in states.items() if one.raised]

    def _key(self, candidate: _Candidate) -> Key:
        alert = candidate.alert
        own = {"alertname": alert.name, "severity": alert.severity.value, "source": SOURCE}
        labels = {**self._config.external_labels, **own, **candidate.labels}
        return tuple(sorted((name, value) for name, value in labels.items() if value))

    def _notice(self, key: Key, state: _State, wall: float, *, resolved: bool) -> Notice:
        alert, base = state.candidate.alert, self._config.dashboard_base
        annotations = {
            "summary": alert.entry.summary,
            "description": self._description(state.candidate),
            "runbook_url": table.runbook_url(alert.name, self._config.runbook_base),
        }
        if base is not None:
            labels = dict(key)
            variables = {name: quote_plus(labels.get(name, "")) for name in table.IDENTITY[alert.scope]}
            annotations["dashboard_url"] = table.dashboard_url(alert.scope, base, variables)
        expires_at = wall + self._lifetime
        ends_at = wall if resolved else expires_at
        return Notice(key, annotations, min(state.starts_at, wall), ends_at, resolved, expires_at)

    def _description(self, candidate: _Candidate) -> str:
        model, engine = (candidate.labels.get(name, "") for name in ("model_name", "engine"))
        who = table.subject(candidate.alert.scope, model=model, engine=engine, where=self._where)
        limits = [each.gateway_limit for each in candidate.engines if each.gateway_limit is not None]
        numbers, fixes = tuple(_numbers(candidate)), _fixes(candidate)
        limit = limit_words(min(limits, default=None))
        return table.description(candidate.alert.entry, who, numbers, fixes, limit)


def _alert(rows: _Table, scope: str, name: str, severity: Severity | None = None) -> Iterator[Alert]:
    """Yield the alert of a verdict or finding, if it has one; a critical verdict may have another one."""
    critical, found = severity is Severity.CRITICAL, rows.get((scope, name), ())
    return islice((alert for alert in found if critical or not alert.critical_only), 1)


def _of_engines(reading: TargetReading, rows: _Table) -> Iterator[_Candidate]:
    for engine in reading.engines.values():
        if engine.missing:
            continue  # a missing engine has an alert of the target
        labels = {"model_name": engine.key.model, "engine": engine.key.name}
        judgement = engine.judgement
        for alert in _alert(rows, "engine", judgement.verdict, judgement.severity):
            yield _Candidate(alert, labels, (engine,))
        for name in engine.findings:
            if name in catalogue.load().findings:
                yield from (_Candidate(alert, labels, (engine,)) for alert in _alert(rows, "engine", name))


def _of_models(reading: TargetReading, rows: _Table) -> Iterator[_Candidate]:
    """Yield alerts of models with enough engines in a critical verdict, and of findings about models."""
    engines = reading.engines.values()
    total = Counter(engine.key.model for engine in engines)
    critical: dict[tuple[str, str], list[EngineReading]] = {}
    for engine in engines:
        if engine.judgement.severity is Severity.CRITICAL:
            critical.setdefault((engine.key.model, engine.judgement.verdict), []).append(engine)
    for (model, verdict), within in critical.items():
        if len(within) >= table.PAGE_SHARE * total[model]:
            for alert in _alert(rows, "model", verdict, Severity.CRITICAL):
                named = " ".join(engine.key.name for engine in within[:_NAMED])
                share = f"{len(within)} of {total[model]} engines ({named})"
                yield _Candidate(alert, {"model_name": model}, within, share)
    for model, of_model in reading.models.items():
        for name in of_model.findings:
            for alert in _alert(rows, "model", name):
                yield _Candidate(alert, {"model_name": model})


def _of_target(reading: TargetReading, rows: _Table) -> Iterator[_Candidate]:
    """Yield alerts without an engine; a verdict that an engine has too is an alert of that engine."""
    judgement, engines = reading.judgement, reading.engines.values()
    if all(engine.judgement.verdict != judgement.verdict for engine in engines):
        for alert in _alert(rows, "target", judgement.verdict, judgement.severity):
            yield _Candidate(alert, {})
    # The findings of a target are about engines that are gone. Its readings know them, also while polls fail.
    missing = sum(engine.missing for engine in engines)
    for finding in catalogue.load().findings.values() if missing else ():
        for alert in _alert(rows, "target", finding.name):
            yield _Candidate(alert, {}, counted=f"{missing} gone")


def _numbers(candidate: _Candidate) -> Iterator[str]:
    """Yield the count, then the highest numbers of the engines."""
    if candidate.counted:
        yield candidate.counted
    worst = table.WORST_ENGINE if candidate.counted else ""
    known = [engine.signals.known() for engine in candidate.engines]
    for number in table.NUMBERS:
        values = [signals[number.name] for signals in known if number.name in signals]
        if values:
            yield worst + number.phrase(max(values))
            worst = ""


def _fixes(candidate: _Candidate) -> Iterable[str]:
    """Yield the best fixes; if no engine can be read, the candidates in the catalogue's order."""
    fixes = catalogue.load().fixes
    ranked = [fix for engine in candidate.engines for fix in enumerate(engine.advice.fixes)]
    flags: dict[str, str | None] = {}
    gains: dict[str, str] = {}
    for _, advice in sorted(ranked, key=lambda one: one[0]):
        flags.setdefault(advice.fix, advice.flag)
        gains.setdefault(advice.fix, table.gain_words(advice))
    if not any(engine.advice.fixes or engine.advice.rejected for engine in candidate.engines):
        # Flags without a value, which is not computed.
        flags = {name: fixes[name].flag_name for name in candidate.alert.entry.fixes}
    for rank, (name, flag) in enumerate(list(flags.items())[: table.FIXES_SHOWN], start=1):
        gain = gains.get(name, "")
        yield table.fix_line(rank, fixes[name].title, flag, restarts=fixes[name].restarts, gain=gain)
