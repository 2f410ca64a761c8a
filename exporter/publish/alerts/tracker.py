"""Which alerts are active after a poll, and what is to be told of them. Pure: times are parameters."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.engine import EngineReading
from exporter.analysis.pipeline import TargetReading
from exporter.config import AlertmanagerConfig
from exporter.publish.alerts.table import (
    FIXES_SHOWN,
    NUMBERS,
    PAGE_SHARE,
    RUNBOOK_BASE,
    WORST_ENGINE,
    Alert,
    alerts,
    dashboard_url,
    description,
    fix_line,
    runbook_url,
    subject,
)

__all__ = ["LIFETIMES", "SOURCE", "ActiveAlerts", "Key", "Notice"]

# The value of the label `source`, by which Alertmanager tells these alerts from the rules' ones.
SOURCE: Final = "sidecar"
# An alert that is not told again ends after so many resend intervals. Prometheus does the same: two
# pushes may get lost, and an exporter that starts anew has found its verdict again before.
LIFETIMES: Final = 4
# More engines than these are not named in the text of a model's alert.
_NAMED: Final = 3
# Labels that say where it is, in the order of the text.
_PLACE: Final = ("cluster", "namespace", "pod")

# All labels, sorted: two alerts with the same ones are the same alert.
Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """The state of one alert, to be told to Alertmanager. Times are unix seconds.

    Attributes:
        key: its labels.
        annotations: summary, description, runbook_url and perhaps dashboard_url.
        starts_at: when it was raised; the same in every notice of it.
        ends_at: when it ended, or when it will have ended unless it is told again.
        resolved: whether it ended.
        useless_at: when telling this makes no difference any more.
    """

    key: Key
    annotations: Mapping[str, str]
    starts_at: float
    ends_at: float
    resolved: bool
    useless_at: float


@dataclass(frozen=True, slots=True)
class _Found:
    """An alert that holds after a poll, with what its text is made of.

    Attributes:
        labels: those of its scope.
        engines: whose numbers and fixes are shown.
        counted: how many engines it is about, in words.
    """

    alert: Alert
    labels: Mapping[str, str]
    engines: Sequence[EngineReading] = ()
    counted: str = ""


@dataclass(slots=True)
class _State:
    """What is remembered of an alert while it holds.

    Attributes:
        since: by the readings' clock.
        starts_at: in unix seconds; None until it is raised.
        told_at: by the readings' clock.
    """

    found: _Found
    since: float
    starts_at: float | None = None
    told_at: float = float("-inf")


@dataclass(slots=True)
class _Table:
    """The alerts by scope and name of their verdict or finding."""

    rows: dict[tuple[str, str], list[Alert]] = field(default_factory=dict)

    def of(self, scope: str, name: str, severity: Severity | None = None) -> Iterator[Alert]:
        """The alert of a verdict or finding; a severity of critical may bring another one."""
        for alert in self.rows.get((scope, name), ()):
            if not alert.critical_only or severity is Severity.CRITICAL:
                yield alert
                return


class ActiveAlerts:
    """Remembers which alerts hold, since when, and what was told of them."""

    def __init__(self, config: AlertmanagerConfig) -> None:
        """Begin with no alert."""
        self._config = config
        self._lifetime = LIFETIMES * config.resend_interval
        self._base = config.runbook_base or RUNBOOK_BASE
        place = "/".join(filter(None, (config.external_labels.get(name) for name in _PLACE)))
        self._where = f" ({place})" if place else ""
        self._table = _Table()
        for alert in alerts("engine" if config.page_by == "engine" else "model"):
            self._table.rows.setdefault((alert.scope, alert.entry.name), []).append(alert)
        self._states: dict[Key, _State] = {}

    def observe(self, reading: TargetReading, wall: float) -> list[Notice]:
        """What is to be told after a poll: alerts that were just raised, are due again, or ended.

        Args:
            reading: what the poll brought.
            wall: the time of the reading in unix seconds.
        """
        t, notices = reading.t, []
        holding = {self._key(found): found for found in _all(reading, self._table)}
        for key, found in holding.items():
            state = self._states.setdefault(key, _State(found, t))
            state.found = found
            if state.starts_at is None and t - state.since >= self._config.hold:
                state.starts_at = wall
            if state.starts_at is not None and t - state.told_at >= self._config.resend_interval:
                state.told_at = t
                notices.append(self._notice(key, state, wall, resolved=False))
        for key in self._states.keys() - holding.keys():
            state = self._states.pop(key)
            if state.starts_at is not None:
                notices.append(self._notice(key, state, wall, resolved=True))
        return notices

    def end(self, wall: float) -> list[Notice]:
        """What is to be told when the target is watched no more: whatever was raised has ended."""
        states, self._states = self._states, {}
        return [
            self._notice(key, state, wall, resolved=True)
            for key, state in states.items()
            if state.starts_at is not None
        ]

    def _key(self, found: _Found) -> Key:
        own = {
            "alertname": found.alert.name,
            "severity": found.alert.severity.value,
            "source": SOURCE,
            **found.labels,
        }
        labels = {**self._config.external_labels, **own}
        return tuple(sorted((name, value) for name, value in labels.items() if value))

    def _notice(self, key: Key, state: _State, wall: float, *, resolved: bool) -> Notice:
        starts_at = wall if state.starts_at is None else min(state.starts_at, wall)
        ends_at = wall if resolved else wall + self._lifetime
        annotations = {
            "summary": state.found.alert.summary,
            "description": self._description(state.found),
            "runbook_url": runbook_url(state.found.alert, self._base),
        }
        if self._config.dashboard_base is not None:
            link = dashboard_url(state.found.alert, dict(key), self._config.dashboard_base)
            annotations["dashboard_url"] = link
        return Notice(key, annotations, starts_at, ends_at, resolved, wall + self._lifetime)

    def _description(self, found: _Found) -> str:
        labels = found.labels
        who = subject(
            found.alert.scope,
            model=labels.get("model_name", ""),
            engine=labels.get("engine", ""),
            where=self._where,
        )
        return description(found.alert.entry, who, tuple(_numbers(found)), _fixes(found))


def _all(reading: TargetReading, table: _Table) -> Iterator[_Found]:
    """Every alert that holds after a poll."""
    yield from _of_engines(reading, table)
    yield from _of_models(reading, table)
    yield from _of_target(reading, table)


def _of_engines(reading: TargetReading, table: _Table) -> Iterator[_Found]:
    for engine in reading.engines.values():
        if engine.missing:
            continue  # the target lacks an engine: that has an alert of its own
        labels = {"model_name": engine.key.model, "engine": engine.key.name}
        judgement = engine.judgement
        for alert in table.of("engine", judgement.verdict, judgement.severity):
            yield _Found(alert, labels, (engine,))
        for name in engine.findings:
            if name in catalogue.load().findings:
                yield from (_Found(alert, labels, (engine,)) for alert in table.of("engine", name))


def _of_models(reading: TargetReading, table: _Table) -> Iterator[_Found]:
    """Models that enough of their engines are in a critical verdict of, and findings about models."""
    engines = reading.engines.values()
    total = Counter(engine.key.model for engine in engines)
    critical: dict[tuple[str, str], list[EngineReading]] = {}
    for engine in engines:
        if engine.judgement.severity is Severity.CRITICAL:
            critical.setdefault((engine.key.model, engine.judgement.verdict), []).append(engine)
    for (model, verdict), within in critical.items():
        if len(within) >= PAGE_SHARE * total[model]:
            for alert in table.of("model", verdict, Severity.CRITICAL):
                named = " ".join(engine.key.name for engine in within[:_NAMED])
                share = f"{len(within)} of {total[model]} engines ({named})"
                yield _Found(alert, {"model_name": model}, within, share)
    for model, of_model in reading.models.items():
        for name in of_model.findings:
            for alert in table.of("model", name):
                yield _Found(alert, {"model_name": model})


def _of_target(reading: TargetReading, table: _Table) -> Iterator[_Found]:
    """What concerns no engine; a verdict that an engine has too is told of the engine alone."""
    judgement = reading.judgement
    if all(engine.judgement.verdict != judgement.verdict for engine in reading.engines.values()):
        for alert in table.of("target", judgement.verdict, judgement.severity):
            yield _Found(alert, {})
    # The findings of a target are about engines that are gone. Its readings know them, also while polls fail.
    missing = sum(engine.missing for engine in reading.engines.values())
    for finding in catalogue.load().findings.values() if missing else ():
        yield from (
            _Found(alert, {}, counted=f"{missing} gone") for alert in table.of("target", finding.name)
        )


def _numbers(found: _Found) -> Iterator[str]:
    """What is counted, then the highest numbers of its engines."""
    if found.counted:
        yield found.counted
    worst = WORST_ENGINE if found.counted else ""
    known = [engine.signals.known() for engine in found.engines]
    for number in NUMBERS:
        values = [signals[number.name] for signals in known if number.name in signals]
        if values:
            yield worst + number.phrase(max(values))
            worst = ""


def _fixes(found: _Found) -> Iterable[str]:
    """The best fixes; where no engine can be read any more, the candidates in the catalogue's order."""
    table = catalogue.load().fixes
    ranked = [fix for engine in found.engines for fix in enumerate(engine.advice.fixes)]
    told: dict[str, str | None] = {}
    for _, advice in sorted(ranked, key=lambda one: one[0]):
        told.setdefault(advice.fix, advice.flag)
    if not any(engine.advice.fixes or engine.advice.rejected for engine in found.engines):
        told = {name: _bare(table[name].flag) for name in found.alert.entry.fixes}
    for rank, (name, flag) in enumerate(list(told.items())[:FIXES_SHOWN], start=1):
        yield fix_line(rank, table[name].title, flag)


def _bare(flag: str | None) -> str | None:
    """A flag without its value, which nobody has computed."""
    return flag and flag.split()[0]
