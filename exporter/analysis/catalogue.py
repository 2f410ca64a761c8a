"""The catalogue: every word about a verdict, read from ``catalogue.yaml`` and checked.

:func:`load` gives the one that ships with the package. :func:`parse` turns any document of the same
form into a :class:`Catalogue`, or raises a :class:`CatalogueError` that lists everything wrong with it.
"""

import enum
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import yaml

try:  # libyaml reads the catalogue in a third of the time, and leaves less behind
    from yaml import CSafeLoader as _SafeLoader
except ImportError:
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

__all__ = [
    "SCOPES",
    "Catalogue",
    "CatalogueError",
    "Check",
    "Finding",
    "Fix",
    "Severity",
    "Verdict",
    "Watching",
    "load",
    "parse",
    "parse_text",
]

_T = TypeVar("_T")

SCOPES: Final = ("engine", "model", "target")
UNKNOWN_VALUE: Final = "VALUE"

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_ALERT: Final = re.compile(r"Vllm([A-Z][a-z0-9]+)+")
_MODEL_ALERT: Final = re.compile(r"VllmModel([A-Z][a-z0-9]+)+")
_VERSION: Final = re.compile(r"\d+\.\d+(\.\d+)?")
_INNER_SENTENCE_END: Final = re.compile(r"[.!?] ")


class CatalogueError(ValueError):
    """A catalogue that cannot be used; ``problems`` has one line for each thing wrong, with its path."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n".join(self.problems))


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
    """One way to see with one's own eyes that a verdict is right."""

    text: str
    promql: str | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """What verdicts and findings have in common."""

    name: str
    severity: Severity
    alert: str | None  # the rule that names one engine (or target, or model)
    summary: str
    meaning: str
    impact: str
    confirm: tuple[Check, ...]
    fixes: tuple[str, ...]  # candidates, cheapest first
    not_help: Mapping[str, str]  # fix -> why it is no cure here
    runbook: str | None


@dataclass(frozen=True, slots=True)
class Verdict(_Entry):
    """What is the matter with an engine; exactly one holds at a time."""

    model_alert: str | None = None  # the rule that pages for the whole model
    critical_when: str | None = None  # what lifts the severity to critical
    of_target: bool = False  # also said of a target of which no engine can be read

    @property
    def can_page(self) -> bool:
        """Whether this verdict is, or can become, critical."""
        return self.severity is Severity.CRITICAL or self.critical_when is not None


@dataclass(frozen=True, slots=True)
class Finding(_Entry):
    """A fact that stands beside a verdict and is never one."""

    scope: str = "engine"


@dataclass(frozen=True, slots=True)
class Watching(_Entry):
    """That nobody watches any more: only Prometheus is left to tell it, so each has an alert."""

    @property
    def rule(self) -> str:
        """The name of its alert."""
        return self.alert or self.name


@dataclass(frozen=True, slots=True)
class Fix:
    """Something an operator can change."""

    name: str
    title: str
    flag: str | None
    action: str
    effect: str
    conditions: tuple[str, ...]
    risk: str
    since: str | None = None
    until: str | None = None
    needs_short_kv: bool = False  # never advised unless KV blocks are, or just were, short

    def flag_with(self, value: str | float | None) -> str | None:
        """The flag to paste, with its number; ``VALUE`` stands where the number is not known."""
        if self.flag is None:
            return None
        return self.flag.replace("{value}", UNKNOWN_VALUE if value is None else str(value))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Verdicts (in order of precedence), findings, fixes and faults of the watching, each by name."""

    verdicts: Mapping[str, Verdict]
    findings: Mapping[str, Finding]
    fixes: Mapping[str, Fix]
    watching: Mapping[str, Watching] = field(default_factory=dict)

    def entry(self, name: str) -> Verdict | Finding:
        """The verdict or finding of that name; KeyError where there is none."""
        return self.verdicts[name] if name in self.verdicts else self.findings[name]


@functools.cache
def load() -> Catalogue:
    """The catalogue that ships with the package, read once."""
    return parse_text(Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8"))


def parse_text(text: str) -> Catalogue:
    """Read a catalogue from YAML.

    Raises:
        CatalogueError: when it is not YAML, a key stands twice, or `parse` finds anything wrong.
    """
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506  # it is a SafeLoader
    except yaml.YAMLError as error:
        raise CatalogueError([f"document: {' '.join(str(error).split())}"]) from error
    return parse(document)


def parse(document: object) -> Catalogue:
    """Check a document and turn it into a catalogue.

    Raises:
        CatalogueError: with every problem of the document, each with its path.
    """
    problems: list[str] = []
    top = _Reader(document, "", problems)
    # The fixes come first because the others are checked against them.
    fixes = top.table("fixes", _fix)
    verdicts = top.table("verdicts", functools.partial(_verdict, known=fixes))
    findings = top.table("findings", functools.partial(_finding, known=fixes))
    watching = top.table("watching", functools.partial(_watching, known=fixes)) if top.has("watching") else {}
    top.finish()
    catalogue = Catalogue(verdicts, findings, fixes, watching)
    problems += _cross_problems(catalogue)
    if problems:
        raise CatalogueError(problems)
    return catalogue


def _verdict(reader: "_Reader", name: str, known: Mapping[str, Fix]) -> Verdict:
    severity = reader.severity()
    verdict = Verdict(
        **_common(reader, name, severity, known),
        model_alert=reader.pattern("model_alert", _MODEL_ALERT, required=False),
        critical_when=reader.sentences("critical_when", one=True, required=False) or None,
        of_target=reader.boolean("of_target"),
    )
    if severity is not None:
        _check_page(reader, verdict)
    return verdict


def _finding(reader: "_Reader", name: str, known: Mapping[str, Fix]) -> Finding:
    common = _common(reader, name, reader.severity(), known)
    return Finding(**common, scope=reader.one_of("scope", SCOPES) or SCOPES[0])


def _watching(reader: "_Reader", name: str, known: Mapping[str, Fix]) -> Watching:
    return Watching(**_common(reader, name, reader.severity(), known))


def _common(
    reader: "_Reader", name: str, severity: Severity | None, known: Mapping[str, Fix]
) -> dict[str, Any]:
    alert = reader.pattern("alert", _ALERT)
    runbook = reader.pattern("runbook", _ALERT)
    if severity is not None:
        _check_alert(reader, severity, alert, runbook)
    fixes, not_help = _advice(reader, known)
    return {
        "name": name,
        "severity": severity or Severity.NONE,  # a stand-in: the problem is noted, so nobody sees it
        "alert": alert,
        "summary": reader.sentences("summary", one=True),
        "meaning": reader.sentences("meaning"),
        "impact": reader.sentences("impact"),
        "confirm": reader.checks("confirm"),
        "fixes": fixes,
        "not_help": not_help,
        "runbook": runbook,
    }


def _check_page(reader: "_Reader", verdict: Verdict) -> None:
    if verdict.critical_when is not None and verdict.severity is Severity.CRITICAL:
        reader.problem("critical_when", "it is critical already")
    if verdict.can_page and verdict.model_alert is None:
        reader.problem("model_alert", "wanted, because the verdict can be critical")
    if not verdict.can_page and verdict.model_alert is not None:
        reader.problem("model_alert", "only for a verdict that can be critical")


def _check_alert(reader: "_Reader", severity: Severity, alert: str | None, runbook: str | None) -> None:
    if alert is None and severity >= Severity.WARNING and reader.has("alert"):
        reader.problem("alert", f"wanted, because the severity is {severity.value}")
    if alert is not None and severity is Severity.NONE:
        reader.problem("alert", "must be null, because the severity is none")
    if alert is not None and runbook is None and reader.has("runbook"):
        reader.problem("runbook", f"wanted, because there is an alert {alert}")


def _advice(reader: "_Reader", known: Mapping[str, Fix]) -> tuple[tuple[str, ...], Mapping[str, str]]:
    fixes = reader.words("fixes")
    not_help = reader.reasons("not_help")
    for index, fix in enumerate(fixes):
        if fix not in known:
            reader.problem(f"fixes[{index}]", f"unknown fix {fix!r}")
        if fix in fixes[:index]:
            reader.problem(f"fixes[{index}]", f"{fix!r} stands twice")
    for fix in not_help:
        if fix not in known:
            reader.problem(f"not_help.{fix}", "unknown fix")
        if fix in fixes:
            reader.problem(f"not_help.{fix}", "advised in fixes as well")
    return fixes, not_help


def _fix(reader: "_Reader", name: str) -> Fix:
    fix = Fix(
        name=name,
        title=reader.text("title"),
        flag=reader.flag("flag"),
        action=reader.sentences("action"),
        effect=reader.sentences("effect"),
        conditions=reader.list_of_sentences("conditions"),
        risk=reader.sentences("risk"),
        since=reader.pattern("since", _VERSION, required=False),
        until=reader.pattern("until", _VERSION, required=False),
        needs_short_kv=reader.boolean("needs_short_kv"),
    )
    if fix.title.endswith("."):
        reader.problem("title", "a title has no full stop")
    if fix.since and fix.until and _version(fix.since) > _version(fix.until):
        reader.problem("until", f"before since ({fix.since})")
    return fix


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _cross_problems(catalogue: Catalogue) -> Iterable[str]:
    """What no entry shows by itself: names and alerts that stand twice, fixes that nobody advises."""
    for name in catalogue.verdicts.keys() & catalogue.findings.keys():
        yield f"findings.{name}: is a verdict as well"
    seen: set[str] = set()
    kinds: tuple[tuple[str, Mapping[str, _Entry]], ...] = (
        ("verdicts", catalogue.verdicts),
        ("findings", catalogue.findings),
        ("watching", catalogue.watching),
    )
    for kind, entries in kinds:
        for entry in entries.values():
            model_alert = entry.model_alert if isinstance(entry, Verdict) else None
            for alert in filter(None, (entry.alert, model_alert)):
                if alert in seen:
                    yield f"{kind}.{entry.name}: alert {alert} is used before"
                seen.add(alert)
    advised = {fix for entry in _entries(catalogue) for fix in entry.fixes}
    for name in catalogue.fixes:
        if name not in advised:
            yield f"fixes.{name}: no verdict and no finding advises it"


def _entries(catalogue: Catalogue) -> Iterable[Verdict | Finding]:
    yield from catalogue.verdicts.values()
    yield from catalogue.findings.values()


class _Reader:
    """One mapping of the document; notes each problem with its path and reads on with a stand-in."""

    def __init__(self, node: object, path: str, problems: list[str]) -> None:
        self._path = path
        self._problems = problems
        self._used: set[str] = set()
        self._node: dict[object, object] = {}
        self._readable = isinstance(node, dict)
        if isinstance(node, dict):
            self._node = node
        else:
            problems.append(f"{path or 'document'}: wanted a mapping, got {_kind(node)}")

    def problem(self, key: str, text: str) -> None:
        """Note what is wrong with a key of this mapping."""
        self._problems.append(f"{self._at(key)}: {text}")

    def finish(self) -> None:
        """Note the keys that nobody asked for."""
        for key in self._node:
            if key not in self._used:
                self.problem(str(key), "unknown key")

    def table(self, key: str, read: Callable[["_Reader", str], _T]) -> Mapping[str, _T]:
        """A mapping of names to entries, in the document's order."""
        rows: dict[str, _T] = {}
        node = self._take(key)
        for name, entry in (self._mapping(key, node) if node is not None else {}).items():
            if not _NAME.fullmatch(str(name)):
                self.problem(f"{key}.{name}", "wanted a lower_case name")
            reader = _Reader(entry, self._at(f"{key}.{name}"), self._problems)
            rows[str(name)] = read(reader, str(name))
            reader.finish()
        return MappingProxyType(rows)

    def severity(self) -> Severity | None:
        """The severity, or None where it is missing or no such word (which is noted)."""
        word = self.one_of("severity", tuple(_RANKS))
        return None if word is None else Severity(word)

    def one_of(self, key: str, words: tuple[str, ...]) -> str | None:
        """One word of a fixed set; None where it is none of them (which is noted)."""
        value = self._take(key)
        if value in words:
            return str(value)
        if key in self._node:
            self.problem(key, f"wanted one of {', '.join(words)}, got {value!r}")
        return None

    def boolean(self, key: str) -> bool:
        """True or false; false where the key is missing."""
        value = self._take(key, required=False)
        if value is not None and not isinstance(value, bool):
            self.problem(key, f"wanted true or false, got {value!r}")
        return value is True

    def pattern(self, key: str, form: re.Pattern[str], *, required: bool = True) -> str | None:
        """A name of a fixed form, or null."""
        value = self._take(key, required=required)
        if value is None:
            return None
        if not isinstance(value, str) or not form.fullmatch(value):
            self.problem(key, f"wanted the form {form.pattern}, got {value!r}")
            return None
        return value

    def flag(self, key: str) -> str | None:
        """A command line flag with at most one ``{value}``, or null."""
        value = self._take(key)
        if value is None:
            return None
        text = self._text(key, value)
        if not text.startswith("--") or text.count("{value}") > 1:
            self.problem(key, f"wanted --a-flag with at most one {{value}}, got {text!r}")
        return text

    def text(self, key: str) -> str:
        """A line of text."""
        value = self._take(key)
        return self._text(key, value) if key in self._node else ""

    def sentences(self, key: str, *, one: bool = False, required: bool = True) -> str:
        """Text of whole sentences, or of a single one; empty only where it is not required."""
        value = self._take(key, required=required)
        return self._sentences(key, value, one=one) if key in self._node else ""

    def words(self, key: str) -> tuple[str, ...]:
        """A list of names."""
        return tuple(self._text(f"{key}[{index}]", word) for index, word in enumerate(self._list(key)))

    def list_of_sentences(self, key: str) -> tuple[str, ...]:
        """A list of texts of whole sentences."""
        return tuple(self._sentences(f"{key}[{index}]", text) for index, text in enumerate(self._list(key)))

    def reasons(self, key: str) -> Mapping[str, str]:
        """A mapping of names to one sentence each."""
        node = self._take(key)
        pairs = self._mapping(key, node) if key in self._node else {}
        return MappingProxyType(
            {str(name): self._sentences(f"{key}.{name}", reason, one=True) for name, reason in pairs.items()}
        )

    def checks(self, key: str) -> tuple[Check, ...]:
        """A list of ``{text, promql}``."""
        checks = []
        for index, node in enumerate(self._list(key)):
            reader = _Reader(node, self._at(f"{key}[{index}]"), self._problems)
            promql = reader.text("promql") if reader.has("promql") else None
            checks.append(Check(reader.sentences("text"), promql))
            reader.finish()
        return tuple(checks)

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return key in self._node

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _take(self, key: str, *, required: bool = True) -> object:
        self._used.add(key)
        if required and self._readable and key not in self._node:
            self.problem(key, "missing")
        return self._node.get(key)

    def _mapping(self, key: str, node: object) -> dict[object, object]:
        if isinstance(node, dict):
            return node
        self.problem(key, f"wanted a mapping, got {_kind(node)}")
        return {}

    def _list(self, key: str) -> list[object]:
        node = self._take(key)
        if isinstance(node, list):
            return node
        if key in self._node:
            self.problem(key, f"wanted a list, got {_kind(node)}")
        return []

    def _text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            self.problem(key, f"wanted text, got {_kind(value)}")
            return ""
        if not value.strip():
            self.problem(key, "is empty")
        elif "\n" in value.strip():
            self.problem(key, "wanted one line (fold it with >-)")
        return value.strip()

    def _sentences(self, key: str, value: object, *, one: bool = False) -> str:
        text = self._text(key, value)
        if text and text[-1] not in ".!?":
            self.problem(key, f"wanted a sentence's end, got ...{text[-20:]!r}")
        if one and _INNER_SENTENCE_END.search(text):
            self.problem(key, "wanted one sentence, got several")
        return text


def _kind(node: object) -> str:
    return "nothing" if node is None else type(node).__name__


class _UniqueKeyLoader(_SafeLoader):
    """A safe loader that takes a key written twice for the mistake it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)  # refuses keys that cannot be hashed
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return mapping
