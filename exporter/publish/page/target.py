"""A target's state and its cards, ready for the templates."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Finding, Severity, Verdict
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.relief import limit_words, relief
from exporter.analysis.target_verdict import REACHABLE
from exporter.analysis.words import WORDS
from exporter.publish.page.engine import engine_card, impact
from exporter.publish.page.text import span
from exporter.publish.page.view import (
    ENGINES_IN_FULL,
    TargetView,
    View,
    rank_engines,
    rank_targets,
    shown_engines,
    worst,
)

__all__ = ["target_section", "target_table"]

TARGETS_LISTED: Final = 1000
_COLUMNS: Final = (
    "kv_usage_ratio",
    "requests_running",
    "requests_waiting",
    "preemptions_per_second",
    "generation_tokens_per_second",
)


def target_table(view: View, shown: Sequence[int]) -> Mapping[str, Any]:
    """Make a row per target, the worst first; targets that are not shown in full link to their own page."""
    order = rank_targets(view)
    rows = [
        {
            "target": view.targets[index],
            "link": f"#t{index}" if index in shown else f"?target={_quoted(view.targets[index].name)}",
            "worst": worst(view.targets[index]),
        }
        for index in order[:TARGETS_LISTED]
    ]
    return {"rows": rows, "count": len(order), "unlisted": max(0, len(order) - TARGETS_LISTED)}


def target_section(view: View, index: int, chosen: str | None) -> Mapping[str, Any]:
    """Prepare a target that is shown in full, by its place in the view; `chosen` is the name of an engine."""
    target = view.targets[index]
    reading = target.reading
    section: dict[str, Any] = {"index": index, "target": target, "reading": reading}
    section |= {"cards": [], "overview": None}
    if reading is None:
        return section
    engines = rank_engines(target)
    shown = {name: engines[name] for name in shown_engines(target, chosen)}
    ids = {name: card_id(target, engine.key.model, engine.key.name) for name, engine in shown.items()}
    if len(engines) > 1:
        section["overview"] = _engine_table(target, ids)
    cards = [*_target_cards(view, target, reading), *_model_cards(target, reading)]
    cards += (engine_card(view, index, name, engine) | {"id": ids[name]} for name, engine in shown.items())
    section["cards"] = sorted(cards, key=lambda card: -card["severity"].rank)
    age = view.now - reading.t
    return section | {
        "age": age,
        "good_age": None if reading.good_at is None else view.now - reading.good_at,
        "old_since": view.wall - age if age > reading.max_age else None,
    }


def _engine_table(target: TargetView, cards: Mapping[str, str]) -> Mapping[str, Any]:
    """Make a row per engine, the worst first; those without a card (an id by name) link to their own page."""
    of_target = f"target={_quoted(target.name)}&" if target.name else ""
    rows = [
        {
            "name": name,
            "link": f"#{cards[name]}" if name in cards else f"?{of_target}engine={_quoted(name)}",
            "judgement": engine.judgement,
            "values": [(signal, getattr(engine.signals, signal)) for signal in _COLUMNS],
        }
        for name, engine in rank_engines(target).items()
    ]
    return {"columns": [WORDS[name].short for name in _COLUMNS], "rows": rows}


def _quoted(name: str) -> str:
    """Quote a name for a query."""
    return quote(name, safe="", errors="replace")


def _target_cards(view: View, target: TargetView, reading: TargetReading) -> Iterator[dict[str, Any]]:
    table, judgement = catalogue.load(), reading.judgement
    if judgement.verdict != REACHABLE or not reading.engines:
        entry = table.verdicts[judgement.verdict]
        yield _card(target, entry, judgement.severity, ("Target", target.name), judgement.fixes) | {
            "error": reading.error
        }
    for name in judgement.findings:
        missing = [
            f"{name} (gone for {span(view.now - engine.seen_at)})"
            for name, engine in rank_engines(target).items()
            if engine.missing
        ]
        subject = ("Target", target.name)
        yield _card(target, table.findings[name], judgement.severity, subject, judgement.fixes) | {
            "missing": ", ".join(missing[:ENGINES_IN_FULL])
        }


def _model_cards(target: TargetView, reading: TargetReading) -> Iterator[dict[str, Any]]:
    for model, of_model in reading.models.items():
        for name in of_model.findings:
            entry = catalogue.load().findings[name]
            yield _card(target, entry, of_model.severity, ("Model", model), of_model.fixes) | {
                "of_target": target.name
            }


def _card(
    target: TargetView,
    entry: Verdict | Finding,
    severity: Severity,
    subject: tuple[str, str],
    fixes: Iterable[str],
) -> dict[str, Any]:
    """Prepare the card of a verdict or finding of a target or model: words, and what to do."""
    table = catalogue.load()
    return {
        "id": card_id(target, "card", *subject, entry.name),
        "template": "card.html",
        "severity": severity,
        "entry": entry,
        "impact": impact(entry),
        "now": relief(entry.name, severity, limit_words(None)) if isinstance(entry, Verdict) else (),
        "kind": subject[0],
        "subject": subject[1],
        "of_target": "",
        "error": None,
        "missing": "",
        "fixes": [table.fixes[name] for name in fixes],
        "rejected": [(table.fixes[name], reason) for name, reason in entry.not_help.items()],
    }


def card_id(target: TargetView, *names: str) -> str:
    """Make an id for anchors that stays the same, whatever characters are in the names."""
    whole = "\0".join((target.url, *names))
    return f"e{zlib.crc32(whole.encode('utf-8', 'replace')):08x}"
