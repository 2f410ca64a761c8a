"""The status page as text: everything that is known of the targets, in the catalogue's words.

Pure. Whatever comes from a server goes through `esc` on its way into the page.
"""

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, NamedTuple
from urllib.parse import quote

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Finding, Severity, Verdict
from exporter.analysis.engine import EngineReading
from exporter.analysis.fixes import FixAdvice
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.verdicts import HEALTHY
from exporter.analysis.words import number
from exporter.publish.metrics.table import METRICS
from exporter.publish.page.fragments import (
    WORDS,
    badge,
    clock_time,
    confirm,
    copied,
    counted,
    esc,
    label,
    not_help,
    short,
    span,
    title,
)
from exporter.publish.page.timeline import Timeline, Track
from exporter.publish.status import engine_names

__all__ = ["IN_FULL", "TAIL", "TargetView", "View", "body", "headline", "shown_engines", "shown_targets"]

# Of several engines those that are not well are shown in full, at most so many; the others are a row of the
# overview and a link.
IN_FULL: Final = 8
# Of several targets so many are shown in full, and so many are listed, the worst first.
TARGETS_IN_FULL: Final = 3
TARGETS_LISTED: Final = 1000
# The newest points stand in the page itself: whoever reloads it often enough needs no history.
TAIL: Final = 16
# The first fixes are shown in full; the others are behind a line that can be opened.
_OPEN_FIXES: Final = 3
_HELP: Final = {row.signal: row.help for row in METRICS if row.signal}
_COLUMNS: Final = (
    ("kv_usage_ratio", "KV"),
    ("requests_running", "Running"),
    ("requests_waiting", "Waiting"),
    ("preemptions_per_second", "Preemptions/s"),
    ("generation_tokens_per_second", "Tokens/s"),
)
# The charts again, for whoever has no JavaScript: signal and name.
_CHARTED: Final = (
    ("kv_usage_ratio", "KV cache usage"),
    ("preemptions_per_second", "Preemptions per second"),
    ("preemptions_inferred_per_second", "Inferred, not counted by vLLM yet"),
    ("requests_running", "Running"),
    ("requests_waiting", "Waiting"),
    ("generation_tokens_per_second", "Tokens per second"),
)

_UNKNOWN: Final = "<span class='unknown'>unknown</span>"
_NO_HARM: Final = "None."  # an impact or a risk of which nothing more is to be said

_Card = tuple[Severity, str]
_Counted = Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class TargetView:
    """A target as the page sees it: its URL without secrets, the last reading, its last ten minutes.

    Where there are several it has a name and labels too.
    """

    url: str
    reading: TargetReading | None
    timeline: Timeline
    name: str = ""
    labels: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class View:
    """All that one rendering of the page shows.

    Attributes:
        now: by the clock of the readings.
        wall: the same moment in unix seconds.
        own: what the exporter tells of itself, by name.
    """

    now: float
    wall: float
    targets: Sequence[TargetView]
    own: Mapping[str, str]


def body(view: View, chosen: str | None = None, chosen_target: str | None = None) -> str:
    """What stands in the page's ``<main>``.

    Args:
        view: what to show.
        chosen: the name of the one engine to show in full.
        chosen_target: the name of the one target to show in full, where there are several.
    """
    parts: list[str] = []
    shown = shown_targets(view, chosen_target)
    if len(view.targets) != 1 or view.targets[0].name:
        parts += _all_targets(view, shown)
    for index in shown:
        parts += _target(view, index, view.targets[index], chosen)
    parts += _own(view.own)
    return "\n".join(parts)


def shown_targets(view: View, chosen: str | None) -> Sequence[int]:
    """Which targets are shown in full, by their place: the one that is chosen, else the worst ones."""
    for index, target in enumerate(view.targets):
        if chosen is not None and target.name == chosen:
            return (index,)
    return _ranked_targets(view)[:TARGETS_IN_FULL]


def shown_engines(target: TargetView, chosen: str | None) -> Sequence[str]:
    """Which engines of a target are shown in full, by name: the one that is chosen, else those not well.

    Where all are well it is the first one.
    """
    engines = _ranked(target)
    if chosen is not None and chosen in engines:
        return (chosen,)
    ill = [name for name, one in engines.items() if one.missing or one.judgement.verdict != HEALTHY]
    return ill[:IN_FULL] or list(engines)[:1]


def headline(view: View) -> str:
    """The worst that is said, for the tab and for whoever only listens."""
    known = [(_worst(target), target.reading) for target in view.targets if target.reading is not None]
    if not known:
        return f"{WORDS[Severity.NONE]}: Nothing is known yet"
    worst, reading = max(known, key=lambda one: one[0].weight)
    whose = f", {worst.of}" if worst.of and worst.name != HEALTHY else ""
    old = "Old: " if view.now - reading.t > reading.max_age else ""
    return f"{old}{WORDS[worst.severity]}: {title(worst.name)}{whose}"


# What is said, and in which order.


class _Said(NamedTuple):
    """A verdict or finding of a target, a model or an engine; and of which of them, in words."""

    severity: Severity
    name: str
    of: str

    @property
    def weight(self) -> tuple[int, bool]:
        """How far in front it stands: among equals what is healthy comes last."""
        return self.severity.rank, self.name != HEALTHY


def _worst(target: TargetView) -> _Said:
    """What stands on the first card of a target; no name where nothing is known of it."""
    return max(_said(target), key=lambda said: said.weight, default=_Said(Severity.NONE, "", ""))


def _said(target: TargetView) -> Iterator[_Said]:
    """All that is said of a target, in the order of its cards.

    Where it has engines its own health is none of them.
    """
    reading = target.reading
    if reading is None:
        return
    own, of_several = reading.judgement, f" of {target.name}" if target.name else ""
    if own.verdict != HEALTHY or not reading.engines:
        yield _Said(own.severity, own.verdict, target.name)
    for name in own.findings:
        yield _Said(own.severity, name, target.name)
    for model, of_model in reading.models.items():
        for name in of_model.findings:
            yield _Said(of_model.severity, name, f"model {model}{of_several}")
    for name, engine in _ranked(target).items():
        judgement = engine.judgement
        whose = f"{engine.key.model} engine {name}{of_several}"
        yield _Said(judgement.severity, judgement.verdict, whose)


def _ranked(target: TargetView) -> Mapping[str, EngineReading]:
    """The engines by name, the worst first, and equals as people count."""

    def rank(named: tuple[str, EngineReading]) -> tuple[int, bool, _Counted]:
        name, engine = named
        judgement = engine.judgement
        return -judgement.severity.rank, judgement.verdict == HEALTHY, _counting(name)

    engines = {} if target.reading is None else engine_names(target.reading)
    return engines if len(engines) <= 1 else dict(sorted(engines.items(), key=rank))


def _ranked_targets(view: View) -> Sequence[int]:
    """The places of the targets, the worst first, and equals as people count."""

    def rank(index: int) -> tuple[int, bool, _Counted]:
        severity, ill = _worst(view.targets[index]).weight
        return -severity, not ill, _counting(view.targets[index].name)

    return sorted(range(len(view.targets)), key=rank)


def _counting(name: str) -> _Counted:
    """Sorts names as people count: engine 2 before engine 10."""
    words = re.split(r"([0-9]+)", name)
    words[1::2] = [digits.lstrip("0") for digits in words[1::2]]
    return [(len(word) if place % 2 else 0, word) for place, word in enumerate(words)]


# Targets.


def _all_targets(view: View, shown: Sequence[int]) -> Iterator[str]:
    """A row for every target, the worst first; those that are not shown below are links."""
    yield '<section class="targets" id="targets" aria-label="Targets">'
    if not view.targets:
        yield "<p class='bar'>No target is known yet.</p></section>"
        return
    yield '<div class="scroll" role="region" tabindex="0" aria-label="All targets">'
    yield f"<table class='overview'><caption>{counted(len(view.targets), 'target')}</caption><thead><tr>"
    yield "<th scope='col'>Target</th><th scope='col'>Labels</th><th scope='col'>State</th>"
    yield "<th scope='col'>Worst verdict</th><th scope='col' class='n'>Engines</th></tr></thead><tbody>"
    order = _ranked_targets(view)
    for index in order[:TARGETS_LISTED]:
        target = view.targets[index]
        worst = _worst(target)
        link = f"#t{index}" if index in shown else f"?target={esc(_quoted(target.name))}"
        labels = ", ".join(f"{esc(name)}={esc(value)}" for name, value in target.labels)
        reading = target.reading
        state = "not asked yet" if reading is None else "up" if reading.up else f"down ({esc(reading.error)})"
        judged = f"{badge(worst.severity)} {title(worst.name)}" if worst.name else ""
        yield (
            f'<tr><th scope="row"><a href="{link}"><bdi>{esc(target.name)}</bdi></a></th><td>{labels}</td>'
            f"<td>{state}</td><td>{judged}</td>"
            f'<td class="n">{_UNKNOWN if reading is None else len(reading.engines)}</td></tr>'
        )
    yield "</tbody></table></div>"
    if len(order) > TARGETS_LISTED:
        yield f"<p class='small'>{len(order) - TARGETS_LISTED} more are not listed.</p>"
    yield "</section>"


def _target(view: View, index: int, target: TargetView, chosen: str | None) -> Iterator[str]:
    reading = target.reading
    yield f'<section class="target" id="t{index}" aria-label="Target {esc(target.url)}">'
    yield f'<p class="bar">{_state(view, target)}</p>'
    if reading is not None:
        engines, shown = _ranked(target), shown_engines(target, chosen)
        if len(engines) > 1:
            yield from _overview(target, engines, shown)
        cards = [*_target_cards(view, target, reading), *_models(target, reading)]
        for name in shown:
            severity = engines[name].judgement.severity
            cards.append((severity, "\n".join(_engine(view, index, target, name, engines[name]))))
        yield from (text for _, text in sorted(cards, key=lambda card: -card[0].rank))  # the worst first
    yield "</section>"


def _state(view: View, target: TargetView) -> str:
    reading = target.reading
    watches = f"Watches <code>{esc(target.url)}</code>: "
    if reading is None:
        return f"{watches}<strong>not asked yet</strong>"
    age = view.now - reading.t
    state = "up" if reading.up else f"down ({esc(reading.error)})"
    told = [f"{watches}<strong>{state}</strong>", f"asked {span(age)} ago"]
    if not reading.up:
        told.append(
            "no good answer yet"
            if reading.good_at is None
            else f"last good answer {span(view.now - reading.good_at)} ago"
        )
    told.append(f"{counted(len(reading.engines), 'engine')}, {counted(reading.restarts, 'restart')} seen")
    if age > reading.max_age:
        told.append(f"<b class='aged'>old: nothing new since {clock_time(view.wall - age)}</b>")
    return " <span class='sep'>·</span> ".join(told)


def _target_cards(view: View, target: TargetView, reading: TargetReading) -> Iterator[_Card]:
    table, judgement = catalogue.load(), reading.judgement
    who = f"Target <bdi>{esc(target.name)}</bdi>" if target.name else "Target"
    if judgement.verdict != HEALTHY or not reading.engines:
        entry = table.verdicts[judgement.verdict]
        poll = f"<p>The last poll ended with <code>{esc(reading.error)}</code>.</p>" if reading.error else ""
        yield _card(target, entry, judgement.severity, who, judgement.fixes, more=poll)
    for name in judgement.findings:
        missing = [
            f"{esc(name)} (gone for {span(view.now - engine.seen_at)})"
            for name, engine in _ranked(target).items()
            if engine.missing
        ]
        more = f"<p>Missing: {', '.join(missing[:IN_FULL])}.</p>" if missing else ""
        yield _card(target, table.findings[name], judgement.severity, who, judgement.fixes, more=more)


def _models(target: TargetView, reading: TargetReading) -> Iterator[_Card]:
    table = catalogue.load()
    for model, of_model in reading.models.items():
        for name in of_model.findings:
            who = f"Model <bdi>{esc(model)}</bdi>{_of_several(target)}"
            yield _card(target, table.findings[name], of_model.severity, who, of_model.fixes)


def _card(
    target: TargetView,
    entry: Verdict | Finding,
    severity: Severity,
    who: str,
    fixes: Iterable[str],
    *,
    more: str = "",
) -> _Card:
    """A verdict or finding that is no engine's: words, and what to do."""
    table = catalogue.load()
    todo = "".join(
        f"<li><b>{esc(table.fixes[n].title)}.</b> {esc(table.fixes[n].action)}</li>" for n in fixes
    )
    here = _id(target, "card", who, entry.name)
    parts = (
        _card_start(here, severity.value),
        f'<h2 id="{here}-h">{badge(severity)} <span>{title(entry.name)}</span> <small>{who}</small></h2>',
        f'<p class="lead">{esc(entry.summary)}</p>{_impact(entry)}{more}</div>',
        f"<p>{esc(entry.meaning)}</p>",
        f"<h3>What to do</h3><ol>{todo}</ol>" if todo else "",
        f"<h3>What will not help</h3>{not_help(entry.not_help.items())}" if entry.not_help else "",
        *confirm(entry.confirm),
        "</article>",
    )
    return severity, "\n".join(part for part in parts if part)


def _card_start(here: str, classes: str) -> str:
    """The first tags of a card, which takes the focus of whoever jumps to it."""
    return (
        f'<article id="{here}" class="card {classes}" tabindex="-1" aria-labelledby="{here}-h">'
        '<div class="head">'
    )


def _impact(entry: Verdict | Finding) -> str:
    return "" if entry.impact == _NO_HARM else f"<p>{esc(entry.impact)}</p>"


def _of_several(target: TargetView) -> str:
    """Of which target something is, where there are several."""
    return f" of <bdi>{esc(target.name)}</bdi>" if target.name else ""


def _overview(
    target: TargetView, engines: Mapping[str, EngineReading], shown: Sequence[str]
) -> Iterator[str]:
    yield '<div class="scroll" role="region" tabindex="0" aria-label="All engines">'
    yield "<table class='overview'><caption>All engines</caption><thead><tr>"
    yield "<th scope='col'>Engine</th><th scope='col'>Verdict</th>"
    yield "".join(f'<th scope="col" class="n">{words}</th>' for _, words in _COLUMNS)
    yield "</tr></thead><tbody>"
    for name, engine in engines.items():
        of_target = f"target={esc(_quoted(target.name))}&amp;" if target.name else ""
        link = (
            f"#{_engine_id(target, engine)}" if name in shown else f"?{of_target}engine={esc(_quoted(name))}"
        )
        cells = (_value(engine, signal) for signal, _ in _COLUMNS)
        yield (
            f'<tr><th scope="row"><a href="{link}"><bdi>{esc(name)}</bdi></a></th>'
            f"<td>{badge(engine.judgement.severity)} {title(engine.judgement.verdict)}</td>"
            + "".join(f'<td class="n">{cell}</td>' for cell in cells)
            + "</tr>"
        )
    yield "</tbody></table></div>"


# An engine.


def _engine(view: View, index: int, target: TargetView, name: str, engine: EngineReading) -> Iterator[str]:
    judgement = engine.judgement
    entry = catalogue.load().verdicts[judgement.verdict]
    old = _old(view, target, engine)
    here = _engine_id(target, engine)
    # Where the target's own card says it all, it is not said again.
    told = target.reading is not None and target.reading.judgement.verdict == entry.name != HEALTHY
    yield _card_start(here, f"engine {judgement.severity.value}{' old' if old else ''}")
    yield (
        f'<h2 id="{here}-h">{badge(judgement.severity)} <span>{title(judgement.verdict)}</span>'
        f" <small>for {span(view.now - judgement.since)} · <bdi>{esc(engine.key.model)}</bdi>,"
        f" engine <bdi>{esc(name)}</bdi>{_of_several(target)}</small></h2>"
    )
    yield f'<p class="lead">{esc(entry.summary)}</p>{"" if told else _impact(entry)}</div>{old}'
    yield _tiles(engine)
    left = [*(() if told else _why(engine, entry)), *_fixes(engine.advice.fixes)]
    yield f'<div class="columns{"" if left else " one"}"><div>'
    yield from left
    yield "</div><div>"
    track = target.timeline.tracks.get(name)
    if track is not None:
        yield from _charts(index, target, name, engine, track)
        yield from _changes(view, track)
    yield "</div><div>"
    if engine.advice.rejected:
        yield "<h3>What will not help</h3>"
        yield not_help((each.fix, each.reason) for each in engine.advice.rejected)
    yield "</div></div>"
    if not told:
        yield from confirm(entry.confirm)
    yield from _limits(engine)
    yield from _numbers(engine)
    yield "</article>"


def _old(view: View, target: TargetView, engine: EngineReading) -> str:
    """What to say when an engine's numbers are not of this moment; empty when they are."""
    age = view.now - engine.seen_at
    if not engine.missing and (target.reading is None or age <= target.reading.max_age):
        return ""
    return (
        f'<p class="aged"><b>Old.</b> Last seen {span(age)} ago, at {clock_time(view.wall - age)}.'
        " What it measures now is unknown.</p>"
    )


def _tiles(engine: EngineReading) -> str:
    known = engine.signals.known()
    seats = engine.server_facts.number("max_num_seqs")
    tiles = (
        ("KV cache", "kv_usage_ratio", _beside("peak", "kv_usage_max_ratio", known)),
        ("Running", "requests_running", f"of {short('seats', seats)} seats" if seats else ""),
        ("Waiting", "requests_waiting", ""),
        (
            "Preemptions/s",
            "preemptions_per_second",
            _beside("per finished", "preemptions_per_finished_request", known),
        ),
        (
            "Tokens/s",
            "generation_tokens_per_second",
            _beside("usual", "generation_tokens_per_second_recent", known),
        ),
    )
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{name}</dt><dd>{_value(engine, signal)}</dd><dd class='beside'>{beside}</dd></div>"
            for name, signal, beside in tiles
        )
        + "</dl>"
    )


def _beside(word: str, signal: str, known: Mapping[str, float]) -> str:
    return f"{word} {short(signal, known[signal])}" if signal in known else ""


def _value(engine: EngineReading, signal: str) -> str:
    value: float | None = getattr(engine.signals, signal)
    return _UNKNOWN if value is None else short(signal, value)


def _why(engine: EngineReading, entry: Verdict) -> Iterator[str]:
    table = catalogue.load()
    yield "<h3>Why</h3>"
    if engine.judgement.evidence:
        yield "<table class='evidence'><thead class='unseen'><tr><th scope='col'>Signal</th>"
        yield "<th scope='col'>Value</th><th scope='col'>Threshold</th></tr></thead><tbody>"
        for each in engine.judgement.evidence:
            yield f'<tr><th scope="row">{label(each.signal)}</th>'
            if each.note:
                yield f"<td colspan='2'><b>{esc(each.note)}</b></td></tr>"
                continue
            limit = "" if each.threshold is None else f"threshold {number(each.signal, each.threshold)}"
            yield f'<td class="n"><b>{number(each.signal, each.value)}</b></td><td>{limit}</td></tr>'
        yield "</tbody></table>"
    yield f"<p>{esc(entry.meaning)}</p>"
    if engine.findings:
        yield "<ul class='findings'>"
        yield from (
            f"<li><b>Also: {title(name)}.</b> {esc(table.entry(name).summary)}</li>"
            for name in engine.findings
        )
        yield "</ul>"


def _fixes(fixes: Sequence[FixAdvice]) -> Iterator[str]:
    if not fixes:
        return
    yield '<h3>What to change, best first</h3><ol class="fixes">'
    yield from map(_fix, fixes[:_OPEN_FIXES])
    yield "</ol>"
    if rest := fixes[_OPEN_FIXES:]:
        yield f"<details class='rest'><summary>{len(rest)} more</summary>"
        yield f'<ol class="fixes" start="{_OPEN_FIXES + 1}">'
        yield from map(_fix, rest)
        yield "</ol></details>"


def _fix(advice: FixAdvice) -> str:
    fix = catalogue.load().fixes[advice.fix]
    enough = {True: "suffices alone", False: "not enough alone", None: ""}[advice.suffices]
    tags = [tag for tag in (enough, "" if advice.gain is None else f"gain {advice.gain:.2f}x") if tag]
    inputs = ", ".join(
        f"{label(name)} {esc(value) if isinstance(value, str) else number(name, value)}"
        for name, value in advice.inputs.items()
    )
    notes = [esc(advice.note), f"No number: {esc(advice.missing)}." if advice.missing else ""]
    more = [
        ("Effect", esc(fix.effect)),
        ("Computed from", inputs),
        ("Only if", esc(" ".join(fix.conditions))),
    ]
    return (
        f"<li><h4>{esc(fix.title)}{''.join(f' <span class=tag>{tag}</span>' for tag in tags)}</h4>"
        + (copied(advice.flag) if advice.flag else "")
        + f"<p>{esc(fix.action)}</p>"
        + "".join(f"<p class='small'>{note}</p>" for note in notes if note)
        + ("" if fix.risk == _NO_HARM else f"<p class='small'><b>Risk:</b> {esc(fix.risk)}</p>")
        + "<details><summary>Effect and conditions"
        + f"<span class='unseen'> of: {esc(fix.title)}</span></summary><dl>"
        + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in more if text)
        + "</dl></details></li>"
    )


def _charts(index: int, target: TargetView, name: str, engine: EngineReading, track: Track) -> Iterator[str]:
    """The place that page.js draws in, with the same in words for whoever has no JavaScript."""
    start, max_age = target.timeline.start or 0.0, target.reading.max_age if target.reading else 0.0
    tail = json.dumps(track.as_object(start, TAIL), separators=(",", ":"))
    seats = engine.server_facts.number("max_num_seqs")
    yield "<h3>The last ten minutes</h3>"
    yield (
        f'<div class="charts" data-drawn data-target="{index}" data-url="{escape(target.url)}"'
        f' data-engine="{escape(name)}"'
        f' data-gap="{1.5 * max_age:g}" data-seats="{seats or ""}" data-tail="{escape(tail)}">'
    )
    yield "<table><thead><tr><th scope='col'>Signal</th><th scope='col' class='n'>least</th>"
    yield "<th scope='col' class='n'>greatest</th></tr></thead><tbody>"
    for signal, words in _CHARTED:
        if (extent := track.extent(signal)) is not None:
            cells = "".join(f'<td class="n">{short(signal, round(value, 3))}</td>' for value in extent)
            yield f'<tr><th scope="row">{words}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _changes(view: View, track: Track) -> Iterator[str]:
    events = [
        (change.t, f"{title(change.verdict)} ({WORDS[Severity(change.severity)].lower()})")
        for change in track.changes
    ]
    events += [(t, "A new process of the engine was seen") for t in track.restarts]
    yield f"<details><summary>Changes of verdict and restarts ({len(events)})</summary><ul>"
    for t, text in sorted(events, reverse=True):
        yield f"<li>{clock_time(view.wall - view.now + t)}, {span(view.now - t)} ago: {text}</li>"
    yield "</ul></details>"


def _limits(engine: EngineReading) -> Iterator[str]:
    limits, version = engine.server_facts, ".".join(map(str, engine.version))
    yield f"<details><summary>Known limits and where they come from ({len(limits.facts)})</summary>"
    yield f"<p>vLLM {esc(version)} or newer, by the names it prints.</p>" if version else ""
    yield "<table><thead><tr><th scope='col'>Limit</th><th scope='col' class='n'>Value</th>"
    yield "<th scope='col'>Source</th></tr></thead><tbody>"
    for name, value in limits.facts.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        word = " word" if isinstance(value, str) else ""  # of any length: it may be broken
        yield f'<tr><th scope="row"><code>{esc(name)}</code></th><td class="n{word}">{esc(shown)}</td>'
        yield f"<td>{esc(limits.source.get(name, ''))}</td></tr>"
    yield "</tbody></table></details>"
    if engine.untrusted or engine.duplicates:
        yield "<details open><summary>Numbers that are not used as they came</summary><ul>"
        yield from (
            f"<li><code>{esc(name)}</code>: {esc(why)}</li>" for name, why in engine.untrusted.items()
        )
        yield from (
            f"<li><code>{esc(n)}</code>: printed more than once</li>" for n in sorted(engine.duplicates)
        )
        yield "</ul></details>"


def _numbers(engine: EngineReading) -> Iterator[str]:
    known = engine.signals.known()
    yield f"<details><summary>All numbers ({len(known) + len(engine.saturation)})</summary>"
    yield "<table><thead><tr><th scope='col'>Signal</th><th scope='col' class='n'>Value</th>"
    yield "<th scope='col'>What it is</th></tr></thead><tbody>"
    for name, value in known.items():
        yield f'<tr><th scope="row">{label(name)}</th><td class="n">{number(name, value)}</td>'
        yield f"<td class='small'>{esc(_HELP.get(name, ''))}</td></tr>"
    for name, value in engine.saturation.items():
        yield f'<tr><th scope="row">Saturation, {esc(name)}</th><td class="n">{value:.2f}</td><td></td></tr>'
    yield "</tbody></table></details>"


# The exporter, and words.


def _own(own: Mapping[str, str]) -> Iterator[str]:
    if own:
        yield '<section class="own" id="own"><h2>What this exporter costs</h2><dl>'
        yield from (f"<div><dt>{esc(name)}</dt><dd>{esc(text)}</dd></div>" for name, text in own.items())
        yield "</dl></section>"


def _engine_id(target: TargetView, engine: EngineReading) -> str:
    return _id(target, engine.key.model, engine.key.name)


def _id(target: TargetView, *names: str) -> str:
    """An id for anchors that stays the same, whatever the names are made of."""
    whole = "\0".join((target.url, *names))
    return f"e{zlib.crc32(whole.encode('utf-8', 'replace')):08x}"


def _quoted(name: str) -> str:
    return quote(name, safe="", errors="replace")
