"""An engine's card, ready for the templates."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Finding, Severity, Verdict
from exporter.analysis.engine import EngineReading
from exporter.analysis.fixes import FixAdvice
from exporter.analysis.relief import limit_words, loss, relief
from exporter.analysis.target_verdict import REACHABLE
from exporter.analysis.words import WORDS, label, number
from exporter.publish.json_text import json_text
from exporter.publish.page.text import SEVERITY_WORDS, short, title
from exporter.publish.page.timeline import Track
from exporter.publish.page.view import TargetView, View
from exporter.publish.status import effects, inputs_of, ranking

__all__ = ["engine_card", "impact"]

# The page itself holds the newest points: a page that is refreshed often enough needs no history.
TAIL: Final = 16
_OPEN_FIXES: Final = 3  # the others are behind a line that can be opened
# The signals of the charts, as a table for browsers without JavaScript.
_CHARTED: Final = (
    "kv_usage_ratio",
    "preemptions_per_second",
    "preemptions_inferred_per_second",
    "requests_running",
    "requests_waiting",
    "generation_tokens_per_second",
)
_NO_HARM: Final = "None."  # the catalogue's word for an impact or a risk that is none


def engine_card(view: View, index: int, name: str, engine: EngineReading) -> dict[str, Any]:
    """Prepare the card, without its id, of an engine of the target at a place in the view."""
    target, judgement, table = view.targets[index], engine.judgement, catalogue.load()
    entry = table.verdicts[judgement.verdict]
    # Where the target's own card has the same verdict, the engine's card does not repeat its explanation.
    explained = target.reading is not None and target.reading.judgement.verdict == entry.name != REACHABLE
    age, track = view.now - engine.seen_at, target.timeline.tracks.get(name)
    old = engine.missing or target.reading is None or age > target.reading.max_age
    return {
        "template": "engine.html",
        "severity": judgement.severity,
        "entry": entry,
        "explained": explained,
        "impact": "" if explained else impact(entry),
        "measured": () if explained else engine.measured,
        "now": () if explained else relief(entry.name, judgement.severity, limit_words(engine.gateway_limit)),
        "name": name,
        "engine": engine,
        "of_target": target.name,
        "since": view.now - judgement.since,
        "old": {"age": age, "wall": view.wall - age} if old else None,
        "tiles": _tiles(engine),
        "evidence": judgement.evidence,
        "findings": [(finding, table.entry(finding).summary) for finding in engine.findings],
        "fixes": [_fix(advice, engine.signals.requests_running) for advice in engine.advice.fixes],
        "ranking": ranking(engine, view.now),
        "open_fixes": _OPEN_FIXES,
        "rejected": [(table.fixes[each.fix], each.reason) for each in engine.advice.rejected],
        "charts": None if track is None else _charts(target, index, engine, track),
        "events": [] if track is None else _events(view, track),
        "version": ".".join(map(str, engine.version)),
        "numbers": _numbers(engine),
    }


def impact(entry: Verdict | Finding) -> str:
    """Return the impact in words; empty where there is none."""
    return "" if entry.impact == _NO_HARM else entry.impact


def _tiles(engine: EngineReading) -> Sequence[tuple[str, str | None, str]]:
    """Return title, value (None is unknown) and context of each tile."""
    known = engine.signals.known()

    def context(word: str, signal: str) -> str:
        return f"{word} {short(signal, known[signal])}" if signal in known else ""

    seats = engine.server_facts.seats
    tiles = (
        ("kv_usage_ratio", context("peak", "kv_usage_max_ratio")),
        ("requests_running", f"of {short('seats', seats)} seats" if seats else ""),
        ("requests_waiting", ""),
        ("preemptions_per_second", context("per finished", "preemptions_per_finished_request")),
        ("generation_tokens_per_second", context("usual", "generation_tokens_per_second_recent")),
    )
    return [
        (title(WORDS[name].short), short(name, known[name]) if name in known else None, beside)
        for name, beside in tiles
    ]


def _fix(advice: FixAdvice, running: float | None) -> Mapping[str, Any]:
    fix = catalogue.load().fixes[advice.fix]
    notes = [advice.note, f"No number: {advice.missing}." if advice.missing else ""]
    details = (
        ("Effect", fix.effect),
        ("Computed from", inputs_of(advice)),
        ("Only if", " ".join(fix.conditions)),
    )
    return {
        "fix": fix,
        "tags": [*effects(advice), loss(fix, running)],
        "flag": advice.flag,
        "notes": [note for note in notes if note],
        "risk": "" if fix.risk == _NO_HARM else fix.risk,
        "details": [(name, text) for name, text in details if text],
    }


def _charts(target: TargetView, index: int, engine: EngineReading, track: Track) -> Mapping[str, Any]:
    """Return the data that page.js draws, and their extent in words for browsers without JavaScript."""
    max_age = target.reading.max_age if target.reading else 0.0
    extents = {name: track.extent(name) for name in _CHARTED}
    return {
        "target": index,
        "url": target.url,
        "gap": f"{1.5 * max_age:g}",
        "seats": engine.server_facts.seats or "",
        "tail": json_text(track.as_object(target.timeline.start or 0.0, TAIL), separators=(",", ":")),
        "rows": [
            (label(name), [short(name, round(value, 3)) for value in extent])
            for name, extent in extents.items()
            if extent is not None
        ],
    }


def _events(view: View, track: Track) -> Sequence[tuple[float, float, str]]:
    """Return changes of verdict and restarts, the newest first: unix seconds, age, words."""
    events = [
        (change.t, f"{title(change.verdict)} ({SEVERITY_WORDS[Severity(change.severity)].lower()})")
        for change in track.changes
    ]
    events += [(t, "The engine restarted") for t in track.restarts]
    return [(view.wall - view.now + t, view.now - t, text) for t, text in sorted(events, reverse=True)]


def _numbers(engine: EngineReading) -> Sequence[tuple[str, str, str]]:
    """Return label, value and explanation of every known number."""
    rows = [
        (label(name), number(name, value), WORDS[name].help if name in WORDS else "")
        for name, value in engine.signals.known().items()
    ]
    return rows + [(f"Saturation, {name}", f"{value:.2f}", "") for name, value in engine.saturation.items()]
