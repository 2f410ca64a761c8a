"""The catalogue: every word about a verdict, from ``catalogue.yaml``.

:func:`load` returns it. A test checks the form of the file and that no entry contradicts another.
"""

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import yaml

try:  # libyaml reads the catalogue in a third of the time, and leaves less behind
    from yaml import CSafeLoader as _SafeLoader
except ImportError:
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

__all__ = [
    "COSTS", "TOPICS", "Catalogue", "Check", "Cost", "Finding", "Fix", "Relief", "Scope", "Severity",
    "Timing",
    "Verdict", "Watching", "load",
]  # fmt: skip

TOPICS: Final = ("availability", "progress", "preemption", "queue", "capacity", "information")
"""The groups of alerts, in the order of triage."""
Scope = Literal["engine", "model", "target"]
Cost = Literal["none", "flag", "numerics", "gpus"]
"""What a fix takes, the cheapest first: nothing, a restart, a restart and other answers, more GPUs."""
COSTS: Final[tuple[Cost, ...]] = get_args(Cost)
UNKNOWN_VALUE: Final = "VALUE"


@functools.total_ordering
class Severity(enum.Enum):
    """How much a verdict matters: none < info < warning < critical; the value is the word itself."""

    NONE = "none"
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0 for none up to 3 for critical."""
        return _RANKS[self.value]

    def __lt__(self, other: object) -> bool:
        return self.rank < other.rank if isinstance(other, Severity) else NotImplemented


_RANKS: Final = {severity.value: rank for rank, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class Check:
    """One way to verify a verdict by hand."""

    text: str
    promql: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a condition must last before its alert fires, and how long the alert stays after it."""

    why: str  # the reason for `wait`
    wait: str = ""  # ``for`` of the rule; empty means at once
    keep: str = ""  # ``keep_firing_for`` of the rule; empty means not at all
    why_keep: str = ""  # the reason for `keep`


@dataclass(frozen=True, slots=True)
class _Entry:
    """The fields that verdicts and findings share."""

    name: str
    severity: Severity
    alert: str | None  # the rule that names one engine (or target, or model), and its page in docs/runbooks
    summary: str
    meaning: str
    impact: str
    confirm: tuple[Check, ...]
    fixes: tuple[str, ...]  # candidates, cheapest first
    not_help: Mapping[str, str]  # fix -> why it is no cure here
    topic: str = TOPICS[-1]
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Verdict(_Entry):
    """The state of an engine; exactly one applies at a time."""

    model_alert: str | None = None  # the rule that pages for the whole model
    critical_when: str | None = None  # what raises the severity to critical
    of_target: bool = False  # also the verdict of a target of which no engine can be read
    now: tuple[str, ...] = ()  # names of what helps at once, best first


@dataclass(frozen=True, slots=True)
class Finding(_Entry):
    """A fact beside the verdict."""

    scope: Scope = "engine"
    instead_of: str | None = None  # the verdict of the same engines, whose alert this one replaces


@dataclass(frozen=True, slots=True)
class Watching(_Entry):
    """An exporter that is gone; only Prometheus can report it, so each has an alert."""

    @property
    def rule(self) -> str:
        """The name of its alert."""
        return self.alert or self.name


@dataclass(frozen=True, slots=True)
class Relief:
    """Something that helps at once, without a restart."""

    name: str
    action: str  # ``{limit}`` stands for a number of requests in words
    effect: str


@dataclass(frozen=True, slots=True)
class Fix:
    """Something an operator can change."""

    name: str
    title: str
    cost: Cost
    flag: str | None
    action: str
    effect: str
    conditions: tuple[str, ...]
    risk: str
    since: str | None = None
    flag_if_active: str | None = None  # the flag in its place where max_num_active_seqs is set
    may_harm: bool = False  # can make things worse: without a forecast it is advised last
    needs_short_kv: bool = False  # never advised unless KV blocks are, or just were, short

    @property
    def restarts(self) -> bool:
        """Whether this server restarts for it; more GPUs by a flag need that, more replicas do not."""
        return self.cost in {"flag", "numerics"} or (self.cost == "gpus" and self.flag is not None)

    @property
    def flag_name(self) -> str:
        """The flag without its number; two where it depends on the server. Empty without a flag."""
        return " or, if set, ".join(form.split()[0] for form in (self.flag, self.flag_if_active) if form)

    def flag_with(self, value: str | float | None, form: str | None = None) -> str | None:
        """Return the flag to paste with its number, or with ``VALUE`` where the number is unknown.

        `form` takes the place of the flag.
        """
        form = form or self.flag
        return form and form.replace("{value}", UNKNOWN_VALUE if value is None else str(value))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Verdicts (in order of precedence), findings, fixes, relief and faults of the exporter, each by name."""

    verdicts: Mapping[str, Verdict]
    findings: Mapping[str, Finding]
    fixes: Mapping[str, Fix]
    watching: Mapping[str, Watching]
    relief: Mapping[str, Relief]

    def entry(self, name: str) -> Verdict | Finding:
        """Return the verdict or finding of that name; KeyError where there is none."""
        return self.verdicts[name] if name in self.verdicts else self.findings[name]


@functools.cache
def load() -> Catalogue:
    """Read the catalogue that ships with the package, once."""
    text = Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")
    document = yaml.load(text, Loader=_SafeLoader)
    return Catalogue(
        _table(Verdict, document["verdicts"]),
        _table(Finding, document["findings"]),
        _table(Fix, document["fixes"]),
        _table(Watching, document["watching"]),
        _table(Relief, document["relief"]),
    )


def _table(make: Callable[..., Any], rows: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Make an object of each row; keys are arguments, so an unknown or a missing one is a TypeError."""
    made = {
        name: make(
            name, **{key: _VALUES[key](value) if key in _VALUES else value for key, value in row.items()}
        )
        for name, row in rows.items()
    }
    return MappingProxyType(made)


_VALUES: Final[Mapping[str, Callable[[Any], object]]] = {
    "severity": Severity,
    "confirm": lambda checks: tuple(Check(**check) for check in checks),
    "timing": lambda timing: Timing(**timing),
    "fixes": tuple,
    "now": tuple,
    "conditions": tuple,
    "not_help": MappingProxyType,
}
