"""The tables of all targets and of all engines, ready for the templates."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from exporter.analysis.words import WORDS
from exporter.publish.page.text import short
from exporter.publish.page.view import TargetView, View, rank_engines, rank_targets, worst

__all__ = ["engine_table", "quoted", "shown_value", "target_table"]

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
    rows = []
    for index in order[:TARGETS_LISTED]:
        target = view.targets[index]
        rows.append(
            {
                "target": target,
                "link": f"#t{index}" if index in shown else f"?target={quoted(target.name)}",
                "worst": worst(target),
            }
        )
    return {"rows": rows, "count": len(order), "unlisted": max(0, len(order) - TARGETS_LISTED)}


def engine_table(target: TargetView, cards: Mapping[str, str]) -> Mapping[str, Any]:
    """Make a row per engine, the worst first.

    Args:
        target: whose engines.
        cards: ids of the cards of the engines that are shown in full; the others link to their own page.
    """
    of_target = f"target={quoted(target.name)}&" if target.name else ""
    rows = [
        {
            "name": name,
            "link": f"#{cards[name]}" if name in cards else f"?{of_target}engine={quoted(name)}",
            "judgement": engine.judgement,
            "values": [shown_value(signal, getattr(engine.signals, signal)) for signal in _COLUMNS],
        }
        for name, engine in rank_engines(target).items()
    ]
    return {"columns": [WORDS[name].short for name in _COLUMNS], "rows": rows}


def shown_value(signal: str, value: float | None) -> str | None:
    """Format a signal for a narrow place; None where it is unknown."""
    return None if value is None else short(signal, value)


def quoted(name: str) -> str:
    """Quote a name for a query."""
    return quote(name, safe="", errors="replace")
