"""The view of the status page: its targets and engines, ranked, and its headline. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from exporter.analysis.catalogue import Severity
from exporter.analysis.engine import EngineReading
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.target_verdict import REACHABLE
from exporter.analysis.verdicts import HEALTHY
from exporter.publish.page.text import SEVERITY_WORDS, title
from exporter.publish.page.timeline import Timeline
from exporter.publish.status import engine_names

__all__ = [
    "ENGINES_IN_FULL", "TargetView", "View", "headline", "rank_engines", "rank_targets", "shown_engines",
    "shown_targets", "worst",
]  # fmt: skip

# At most this many engines that are not healthy are shown in full; the others are a row of the overview.
ENGINES_IN_FULL: Final = 8
TARGETS_IN_FULL: Final = 3


@dataclass(frozen=True, slots=True)
class TargetView:
    """A target: its URL without secrets, its last reading and ten minutes; one of several has a name too."""

    url: str
    reading: TargetReading | None
    timeline: Timeline
    name: str = ""
    labels: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class View:
    """Everything that one rendering shows. `now` is by the clock of the readings, `wall` in unix seconds."""

    now: float
    wall: float
    targets: Sequence[TargetView]
    own: Mapping[str, str]


class Statement(NamedTuple):
    """A verdict or finding, and its subject in words: a target, a model or an engine."""

    severity: Severity
    name: str
    subject: str

    @property
    def weight(self) -> tuple[int, bool]:
        """Its rank; of equals, healthy comes last."""
        return self.severity.rank, self.name != HEALTHY


def shown_targets(view: View, chosen: str | None) -> Sequence[int]:
    """Return the places of the targets that are shown in full: the chosen one, else the worst ones."""
    for index, target in enumerate(view.targets):
        if chosen is not None and target.name == chosen:
            return (index,)
    return rank_targets(view)[:TARGETS_IN_FULL]


def shown_engines(target: TargetView, chosen: str | None) -> Sequence[str]:
    """Return the engines that are shown in full: the chosen one, else those not healthy, else the first."""
    engines = rank_engines(target)
    if chosen is not None and chosen in engines:
        return (chosen,)
    ill = [name for name, one in engines.items() if one.missing or one.judgement.verdict != HEALTHY]
    return ill[:ENGINES_IN_FULL] or list(engines)[:1]


def headline(view: View) -> str:
    """Return the worst statement, for the tab's title and for screen readers."""
    known = [(worst(target), target.reading) for target in view.targets if target.reading is not None]
    if not known:
        return f"{SEVERITY_WORDS[Severity.NONE]}: No data yet"
    statement, reading = max(known, key=lambda one: one[0].weight)
    whose = f", {statement.subject}" if statement.subject and statement.name != HEALTHY else ""
    old = "Old: " if view.now - reading.t > reading.max_age else ""
    return f"{old}{SEVERITY_WORDS[statement.severity]}: {title(statement.name)}{whose}"


def worst(target: TargetView) -> Statement:
    """Return the statement of a target's first card; without a name where nothing is known."""
    return max(_statements(target), key=lambda one: one.weight, default=Statement(Severity.NONE, "", ""))


def _statements(target: TargetView) -> Iterator[Statement]:
    """Yield the statements of a target in the order of its cards.

    A healthy target that has engines makes none of its own.
    """
    reading = target.reading
    if reading is None:
        return
    own, of_target = reading.judgement, f" of {target.name}" if target.name else ""
    if own.verdict != REACHABLE or not reading.engines:
        yield Statement(own.severity, own.verdict, target.name)
    for name in own.findings:
        yield Statement(own.severity, name, target.name)
    for model, of_model in reading.models.items():
        for name in of_model.findings:
            yield Statement(of_model.severity, name, f"model {model}{of_target}")
    for name, engine in rank_engines(target).items():
        judgement = engine.judgement
        subject = f"{engine.key.model} engine {name}{of_target}"
        yield Statement(judgement.severity, judgement.verdict, subject)


def rank_engines(target: TargetView) -> Mapping[str, EngineReading]:
    """Return the engines by name, the worst first, equals in the order of their numbers."""

    def rank(named: tuple[str, EngineReading]) -> tuple[int, bool, Sequence[tuple[int, str]]]:
        name, engine = named
        judgement = engine.judgement
        return -judgement.severity.rank, judgement.verdict == HEALTHY, _natural(name)

    engines = {} if target.reading is None else engine_names(target.reading)
    return engines if len(engines) <= 1 else dict(sorted(engines.items(), key=rank))


def rank_targets(view: View) -> Sequence[int]:
    """Return the places of the targets, the worst first, equals in the order of their numbers."""

    def rank(index: int) -> tuple[int, bool, Sequence[tuple[int, str]]]:
        severity, ill = worst(view.targets[index]).weight
        return -severity, not ill, _natural(view.targets[index].name)

    return sorted(range(len(view.targets)), key=rank)


def _natural(name: str) -> Sequence[tuple[int, str]]:
    """Make a sort key that puts engine 2 before engine 10."""
    words = re.split(r"([0-9]+)", name)
    words[1::2] = [digits.lstrip("0") for digits in words[1::2]]
    return [(len(word) if place % 2 else 0, word) for place, word in enumerate(words)]
