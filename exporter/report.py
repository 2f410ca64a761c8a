"""Readings in the form in which they leave the program: the objects of ``replay`` and of the API."""

from collections.abc import Mapping
from typing import Any

from exporter.pipeline import EngineReading, TargetReading

__all__ = ["engine_names", "poll_object", "status_object"]

# Digits after the point: enough for a token's microseconds, and no noise of floating point.
_DIGITS = 6


def poll_object(t: float, reading: TargetReading) -> dict[str, Any]:
    """One poll as ``replay --format json`` prints it.

    Args:
        t: seconds from the first poll.
        reading: what was known after it.
    """
    engines = engine_names(reading)
    return {
        "t": round(t, 3),
        "target": {"up": reading.up, "verdict": None, "severity": "none", "findings": []},
        "engines": {name: _engine(engine) for name, engine in engines.items()},
        "models": {},
    }


def status_object(url: str, reading: TargetReading | None, now: float) -> dict[str, Any]:
    """A target's state for the API.

    Args:
        url: of the target, without anything secret.
        reading: the last one, None before the first poll has ended.
        now: by the clock of the reading.
    """
    if reading is None:
        return {"url": url, "up": None, "error": None, "engines": {}}
    return {
        "url": url,
        "up": reading.up,
        "error": reading.error,
        "poll_age_seconds": round(now - reading.t, 3),
        "success_age_seconds": None if reading.good_at is None else round(now - reading.good_at, 3),
        "engines": {
            name: {
                **_engine(engine),
                "age_seconds": round(now - engine.seen_at, 3),
                "missing": engine.missing,
                "restarts": engine.restarts,
                "untrusted": dict(engine.untrusted),
                "duplicates": sorted(engine.duplicates),
                "kv_capacity_is_estimate": engine.signals.kv_capacity_is_estimate,
            }
            for name, engine in engine_names(reading).items()
        },
    }


def engine_names(reading: TargetReading) -> Mapping[str, EngineReading]:
    """The engines by name: ``0``, ``REPLICA/0``, and with the model in front where two share a name."""
    named: dict[str, EngineReading] = {}
    for key, engine in reading.engines.items():
        name = key.name
        named[f"{key.model}/{name}" if name in named else name] = engine
    return named


def _engine(engine: EngineReading) -> dict[str, Any]:
    return {
        "model": engine.key.model,
        "verdict": None,
        "severity": "none",
        "findings": [],
        "fixes": [],
        "signals": {name: round(value, _DIGITS) for name, value in engine.signals.known().items()},
    }
