"""The JSON documents of readings, for ``replay`` and the API."""

from collections.abc import Mapping
from typing import Any

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.conditions import Evidence
from exporter.analysis.fixes import FixAdvice
from exporter.analysis.load_profile import LoadProfile
from exporter.analysis.pipeline import EngineReading, ModelReading, TargetReading
from exporter.analysis.relief import limit_words, relief
from exporter.analysis.target_verdict import REACHABLE, TargetJudgement
from exporter.analysis.words import label, number
from exporter.publish.page.text import span
from exporter.vllm.exposition import EngineKey

__all__ = [
    "choose_engine", "effects", "engine_names", "inputs_of", "poll_object", "question",
    "ranking", "status_object", "verdicts",
]  # fmt: skip

# Digits after the point: enough for a token's microseconds, and no noise of floating point.
_DIGITS = 6
_SUFFICES = {True: "suffices alone", False: "not enough alone"}


def poll_object(t: float, reading: TargetReading) -> dict[str, Any]:
    """Return one poll as ``replay --format json`` prints it; `t` is in seconds from the first poll."""
    return {
        "t": round(t, 3),
        "target": _target(reading),
        "engines": {name: _engine(engine) for name, engine in engine_names(reading).items()},
        "models": _models(reading),
    }


def status_object(
    url: str,
    reading: TargetReading | None,
    now: float,
    loads: Mapping[EngineKey, LoadProfile] | None = None,
    among: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a target's state for the API: as `poll_object`, with evidence, texts and sources of settings.

    Args:
        url: of the target, without secrets.
        reading: the last one, None before the first poll has ended.
        now: by the clock of the reading.
        loads: load profiles of the engines, as input of a simulation.
        among: its name and the like, where there are several targets.
    """
    loads, among = loads or {}, among or {}
    if reading is None:
        return {**among, "url": url, "up": None, "error": None, "engines": {}, "models": {}}
    return {
        **among,
        "url": url,
        **_target(reading),
        "error": reading.error,
        "summary": catalogue.load().verdicts[reading.judgement.verdict].summary,
        "poll_age_seconds": round(now - reading.t, 3),
        "success_age_seconds": None if reading.good_at is None else round(now - reading.good_at, 3),
        "engines": {
            name: _status(engine, now, loads.get(engine.key))
            for name, engine in engine_names(reading).items()
        },
        "models": _models(reading),
    }


def choose_engine(target: Mapping[str, Any], name: str | None) -> tuple[str, Mapping[str, Any]]:
    """Choose an engine of a target's status object: by name, else the one that preempts most.

    Raises:
        LookupError: there is none, or none of that name.
    """
    engines: Mapping[str, Mapping[str, Any]] = target.get("engines") or {}

    def weight(one: str) -> tuple[float, float]:
        load = engines[one].get("load") or {}
        held = float(load.get("requests_running_mean") or 0) + float(load.get("requests_waiting_mean") or 0)
        return float(load.get("preemptions_per_minute") or 0), held

    chosen = name or max(engines, key=weight, default=None)
    if chosen is None:
        raise LookupError("no engine is known: the server has not answered yet")
    if chosen not in engines:
        raise LookupError(f"wanted one of the engines {', '.join(engines)}, got {chosen}")
    return chosen, engines[chosen]


def engine_names(reading: TargetReading) -> Mapping[str, EngineReading]:
    """Return the engines by name: ``0``, ``REPLICA/0``, with the model in front where two share a name."""
    named: dict[str, EngineReading] = {}
    for key, engine in reading.engines.items():
        name = key.name
        for other in (f"{key.model}/{name}", *(f"{key.model}/{name}#{n}" for n in range(2, len(named) + 2))):
            if name not in named:
                break
            name = other
        named[name] = engine
    return named


def verdicts(reading: TargetReading) -> list[tuple[Severity, str]]:
    """Return severity and verdict of each engine, and of the target where more than reachable is known."""
    own, engines = reading.judgement, reading.engines.values()
    judged = [(engine.judgement.severity, engine.judgement.verdict) for engine in engines]
    return judged if judged and own.verdict == REACHABLE else [*judged, (own.severity, own.verdict)]


def _target(reading: TargetReading) -> dict[str, Any]:
    judgement = reading.judgement
    severity = {"severity": reading.severity.value}  # the worst, also of its engines and models
    return {"up": reading.up, "verdict": judgement.verdict, **_judged(judgement), **severity}


def _models(reading: TargetReading) -> dict[str, Any]:
    return {name: _judged(model) for name, model in reading.models.items()}


def _judged(of: TargetJudgement | ModelReading) -> dict[str, Any]:
    return {"severity": of.severity.value, "findings": list(of.findings), "fixes": list(of.fixes)}


def _engine(engine: EngineReading) -> dict[str, Any]:
    return {
        "model": engine.key.model,
        "verdict": engine.judgement.verdict,
        "severity": engine.judgement.severity.value,
        "findings": list(engine.findings),
        "fixes": [_fix(advice) for advice in engine.advice.fixes],
        "advice": engine.advice.sentence,
        "signals": {name: round(value, _DIGITS) for name, value in engine.signals.known().items()},
    }


def _fix(advice: FixAdvice) -> dict[str, Any]:
    document = {
        "fix": advice.fix,
        "flag": advice.flag,
        "value": advice.value,
        "gain": None if advice.gain is None else round(advice.gain, 3),
        "suffices": advice.suffices,
        "inputs": dict(advice.inputs) or None,
        "missing": advice.missing or None,
        "note": advice.note or None,
        "forecast": None if advice.forecast is None else advice.forecast.to_dict(),
        "together": advice.together and {"fix": advice.together.fix, **advice.together.to_dict()},
    }
    return {name: value for name, value in document.items() if value is not None}


def effects(advice: FixAdvice) -> list[str]:
    """Return the forecast effect of a fix as short texts; empty without a trusted forecast."""
    found = [] if advice.suffices is None else [_SUFFICES[advice.suffices]]
    if advice.together:
        found.append(f"suffices with: {catalogue.load().fixes[advice.together.fix].title}")
    return found if advice.gain is None else [*found, f"tokens/s {advice.gain:.2f}x"]


def inputs_of(advice: FixAdvice) -> str:
    """Return the numbers that a fix was computed from, in words."""
    return ", ".join(
        f"{label(name)} {value if isinstance(value, str) else number(name, value)}"
        for name, value in advice.inputs.items()
    )


def ranking(engine: EngineReading, now: float) -> str:
    """Return what the order of the fixes rests on, and how old the forecast is; empty without any."""
    sentence, made = engine.advice.sentence, engine.forecast
    return f"{sentence[:-1]}; forecast {span(now - made.at)} old." if sentence and made else sentence


def _forecast(engine: EngineReading, now: float) -> dict[str, Any] | None:
    made = engine.forecast
    if made is None:
        return None
    shown = {"trusted": made.trusted, "sentence": made.sentence, "age_seconds": round(now - made.at, 3)}
    cost = {
        "recomputed_tokens_per_second": made.recomputed_per_second,
        "recomputed_ratio": made.recomputed_ratio,
        "recomputed_gpu_time_ratio": engine.cost.time_ratio,
        "recomputed_cost_per_hour": engine.cost.per_hour,
    }
    known = {name: round(value, 3) for name, value in cost.items() if value is not None and made.trusted}
    return shown | known


def _status(engine: EngineReading, now: float, load: LoadProfile | None) -> dict[str, Any]:
    table = catalogue.load()
    entry = table.verdicts[engine.judgement.verdict]
    shown = _engine(engine)
    for document in shown["fixes"]:
        fix = table.fixes[document["fix"]]
        document |= {"title": fix.title, "action": fix.action, "cost": fix.cost, "restart": fix.restarts}
    return {
        **shown,
        "summary": entry.summary,
        "meaning": entry.meaning,
        "measured": list(engine.measured),
        "now": list(relief(entry.name, engine.judgement.severity, limit_words(engine.gateway_limit))),
        "since_seconds": round(now - engine.judgement.since, 3),
        "evidence": [_evidence(evidence) for evidence in engine.judgement.evidence],
        "forecast": _forecast(engine, now),
        "will_not_help": [{"fix": each.fix, "reason": each.reason} for each in engine.advice.rejected],
        "limits": _limits(engine),
        "saturation": {name: round(value, _DIGITS) for name, value in engine.saturation.items()},
        "age_seconds": round(now - engine.seen_at, 3),
        "missing": engine.missing,
        "restarts": engine.restarts,
        "untrusted": dict(engine.untrusted),
        "duplicates": sorted(engine.duplicates),
        "kv_capacity_is_estimate": engine.signals.kv_capacity_is_estimate,
        "load": None if load is None else load.to_dict(),
    }


def question(engine: EngineReading, load: LoadProfile) -> dict[str, Any]:
    """Return what a simulation needs to know of an engine, as in the status document."""
    return {"load": load.to_dict(), "limits": _limits(engine), "fixes": list(map(_fix, engine.advice.fixes))}


def _limits(engine: EngineReading) -> dict[str, Any]:
    facts = engine.server_facts
    return {
        name: {"value": value, "source": facts.source.get(name, "")} for name, value in facts.facts.items()
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    value = None if evidence.value is None else round(evidence.value, _DIGITS)
    shown: dict[str, Any] = {"signal": evidence.signal, "value": value}
    if evidence.note:
        shown["note"] = evidence.note
    if evidence.threshold is not None:
        shown["threshold"] = round(evidence.threshold, _DIGITS)
    if evidence.ends is not None:
        shown["ends"] = round(evidence.ends, _DIGITS)
    return shown
