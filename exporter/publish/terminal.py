"""Formats verdicts for a terminal, with evidence and fixes, in the catalogue's words."""

from collections.abc import Callable, Iterator
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.conditions import Evidence
from exporter.analysis.engine import EngineReading
from exporter.analysis.fixes import FixAdvice
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.relief import NOW, limit_words, loss, paid, relief
from exporter.analysis.target_verdict import REACHABLE
from exporter.analysis.words import WORDS, label, number
from exporter.publish.alerts.table import NUMBERS
from exporter.publish.inert import inert
from exporter.publish.status import effects, engine_names, inputs_of, ranking, verdicts

__all__ = ["Paint", "coloured", "headline", "plain", "report"]

Paint = Callable[[str, Severity], str]

_COLOURS: Final = {"info": "36", "warning": "33", "critical": "1;31", "none": "32"}
# The first fixes are explained, the others only listed.
_IN_FULL: Final = 3
_SHOWN: Final = (WORDS["kv_usage_ratio"], *NUMBERS)


def plain(text: str, _severity: Severity) -> str:
    """Return the text without colour."""
    return text


def coloured(text: str, severity: Severity) -> str:
    """Return the text in the severity's colour."""
    return f"\x1b[{_COLOURS[severity.value]}m{text}\x1b[0m"


def report(reading: TargetReading, paint: Paint = plain) -> Iterator[str]:
    """Yield the report of a target, line by line."""
    table = catalogue.load()
    judgement = reading.judgement
    if judgement.verdict != REACHABLE or not reading.engines:
        entry = table.verdicts[judgement.verdict]
        yield f"Target: {paint(_title(judgement.verdict), judgement.severity)}"
        yield f"  {entry.summary}"
        if reading.error:
            yield f"  last poll: {reading.error}"
        yield from _now(relief(judgement.verdict, judgement.severity, limit_words(None)))
        yield from _todo(tuple(table.fixes[name].action for name in judgement.fixes))
    for finding in judgement.findings:
        yield f"Target: {paint(_title(finding), judgement.severity)}"
        yield f"  {table.findings[finding].summary}"
    for name, engine in engine_names(reading).items():
        yield ""
        yield from _engine(name, engine, paint, reading.t)
    for model, of_model in reading.models.items():
        for finding in of_model.findings:
            yield ""
            yield f"Model {inert(model)}: {paint(_title(finding), of_model.severity)}"
            yield f"  {table.findings[finding].summary}"
            yield from _todo(tuple(table.fixes[fix].action for fix in of_model.fixes))


def headline(reading: TargetReading) -> str:
    """Return the worst verdict in one line."""
    severity, verdict = max(verdicts(reading))
    return f"{_title(verdict)} ({severity.value})"


def _engine(name: str, engine: EngineReading, paint: Paint, now: float) -> Iterator[str]:
    table = catalogue.load()
    judgement = engine.judgement
    title = paint(f"{_title(judgement.verdict)} ({judgement.severity.value})", judgement.severity)
    yield f"{inert(engine.key.model)} engine {inert(name)}: {title}"
    yield f"  {table.verdicts[judgement.verdict].summary}"
    yield from (f"  {sentence}" for sentence in engine.measured)
    known = engine.signals.known()
    yield "  " + ", ".join(signal.phrase(known[signal.name]) for signal in _SHOWN if signal.name in known)
    yield from _now(relief(judgement.verdict, judgement.severity, limit_words(engine.gateway_limit)))
    if judgement.evidence:
        yield "Why"
        for evidence in judgement.evidence:
            yield f"  {_evidence(evidence)}"
    for finding in engine.findings:
        yield f"  also {_title(finding)}: {table.entry(finding).summary}"
    if engine.advice.fixes:
        yield engine.advice.heading
        if sentence := ranking(engine, now):
            yield f"  {inert(sentence)}"
        for rank, advice in enumerate(engine.advice.fixes, start=1):
            yield from _advice(rank, advice, engine.signals.requests_running)
    if engine.advice.rejected:
        yield "What will not help"
        for each in engine.advice.rejected:
            yield f"  {table.fixes[each.fix].title}: {each.reason}"


def _now(deeds: tuple[str, ...]) -> Iterator[str]:
    if deeds:
        yield NOW
        yield from (f"  * {deed}" for deed in deeds)


def _advice(rank: int, advice: FixAdvice, running: float | None) -> Iterator[str]:
    fix = catalogue.load().fixes[advice.fix]
    flag = f"   {advice.flag}" if advice.flag else ""
    tags = "".join(f"  ({tag})" for tag in effects(advice))
    short = f"  ({paid(fix)})" if rank > _IN_FULL else ""
    yield f"  {rank}. {fix.title}{flag}{tags}{short}"
    if rank > _IN_FULL:
        return
    yield f"     {fix.action}"
    yield f"     Cost: {loss(fix, running)}."
    if advice.inputs:
        yield f"     Computed from {inputs_of(advice)}"
    for text in (advice.note, advice.missing and f"No number: {advice.missing}."):
        if text:
            yield f"     {text}"
    if fix.risk != "None.":
        yield f"     Risk: {fix.risk}"


def _todo(actions: tuple[str, ...]) -> Iterator[str]:
    if actions:
        yield "What to do"
        for rank, action in enumerate(actions, start=1):
            yield f"  {rank}. {action}"


def _evidence(evidence: Evidence) -> str:
    if evidence.note:
        return f"{label(evidence.signal)} {evidence.note}"
    known = f"{label(evidence.signal)}: {number(evidence.signal, evidence.value)}"
    return f"{known} ({evidence.limits})" if evidence.limits else known


def _title(name: str) -> str:
    return name.replace("_", " ")
