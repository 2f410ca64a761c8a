"""Rules as values, and their two file formats: that of Prometheus and that of its operator."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import yaml

from exporter.analysis.catalogue import TOPICS, Timing
from exporter.rules.options import Options

__all__ = ["Group", "Rule", "adapted", "alert_names", "by_topic", "rule_file"]

_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_RESOURCE: Final = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {}
spec:
  groups:"""


@dataclass(frozen=True, slots=True)
class Rule:
    """A recording rule or an alert."""

    name: str  # of the series or of the alert
    expr: str  # PromQL, of one or more lines
    comment: str = ""  # for the reader of the file
    timing: Timing | None = None  # of an alert; None makes it a recording rule
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together, in order."""

    name: str
    rules: tuple[Rule, ...]


def by_topic(prefix: str, rules: Iterable[tuple[str, Rule]]) -> Iterator[Group]:
    """Yield groups of the rules of each topic, in the order of triage."""
    found = list(rules)
    for topic in TOPICS:
        of_topic = tuple(rule for its_topic, rule in found if its_topic == topic)
        if of_topic:
            yield Group(f"{prefix}-{topic}", of_topic)


def adapted(groups: Iterable[Group], options: Options) -> Iterator[Group]:
    """Yield the groups without disabled alerts and with the added labels."""
    for group in groups:
        rules = tuple(
            replace(rule, labels=dict(options.labels) | rule.labels) if rule.timing else rule
            for rule in group.rules
            if rule.timing is None or rule.name not in options.disabled
        )
        if rules:
            yield replace(group, rules=rules)


def alert_names(groups: Iterable[Group]) -> tuple[str, ...]:
    """Return the name of every alert, in the order of the rules."""
    return tuple(dict.fromkeys(rule.name for group in groups for rule in group.rules if rule.timing))


def rule_file(groups: Iterable[Group], head: str, resource: str = "") -> str:
    """Write a file for Prometheus, Mimir, Thanos and vmalert, or a named resource of the operator."""
    lines, indent = (_RESOURCE.format(resource).splitlines(), "    ") if resource else (["groups:"], "  ")
    for group in groups:
        lines += [f"{indent}- name: {group.name}", f"{indent}  interval: 15s", f"{indent}  rules:"]
        for rule in group.rules:
            lines += _rule(rule, indent + "    ")
    return "\n".join([*_comment(head, ""), *lines]) + "\n"


def _rule(rule: Rule, indent: str) -> Iterator[str]:
    yield from _comment(rule.comment, indent)
    yield f"{indent}- {'record' if rule.timing is None else 'alert'}: {rule.name}"
    yield from _scalar("expr", rule.expr, indent + "  ")
    if rule.timing is not None:
        yield from _timing(rule.timing, indent + "  ")
    for key, values in (("labels", rule.labels), ("annotations", rule.annotations)):
        if values:
            yield f"{indent}  {key}:"
            for name, value in values.items():
                yield from _scalar(name, value, indent + "    ")


def _timing(timing: Timing, indent: str) -> Iterator[str]:
    if not timing.wait:
        yield from _comment(f"no for: {timing.why}", indent)
    else:
        yield f"{indent}for: {timing.wait}  # {timing.why}"
    if timing.keep:
        yield f"{indent}keep_firing_for: {timing.keep}  # {timing.why_keep}"


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in text.splitlines():
        yield f"{indent}# {line}".rstrip()


def _scalar(key: str, value: str, indent: str) -> Iterator[str]:
    if "\n" in value:
        yield f"{indent}{key}: |-"
        yield from (f"{indent}  {line}".rstrip() for line in value.splitlines())
    else:
        yield f"{indent}{key}: {_one_line(value)}"


def _one_line(value: str) -> str:
    """Write a value on one line: plain where YAML reads it as that text, else in quotes."""
    plain = _PLAIN.fullmatch(value) or value[:1].isalpha()
    if plain and "#" not in value and ": " not in value and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
