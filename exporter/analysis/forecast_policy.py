"""Decides when an engine needs a forecast: its trouble lasts, and what is known has changed. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from exporter.analysis.engine import EngineReading
from exporter.analysis.forecast import FORECAST_VERDICTS
from exporter.analysis.load_profile import LoadProfile, too_little_seen

if TYPE_CHECKING:
    from exporter.vllm.exposition import EngineKey

__all__ = ["ForecastPolicy", "too_little"]

# A verdict that lasts this long is worth a forecast.
_LASTING: Final = 10.0
_LOOK_EVERY: Final = 5.0  # a load profile costs milliseconds
# After a forecast: when the load has changed, and when it has not.
_SOONEST: Final = 60.0
_LATEST: Final = 600.0
_FRESH: Final = 120.0  # while somebody looks
_CHANGED: Final = 1.5


@dataclass(slots=True)
class _Last:
    """The last look at an engine, and the last forecast."""

    looked: float = -math.inf
    made: float = -math.inf
    tries: int = 0  # forecasts so far
    in_flight: float = 0.0
    facts: object = None


class ForecastPolicy:
    """When to forecast which engine of one target."""

    def __init__(self, most: int | None = None) -> None:
        """Start without forecasts; after `most` of them none is due."""
        self._left = math.inf if most is None else most
        self._last: dict[EngineKey, _Last] = {}

    def due(
        self, t: float, engine: EngineReading, load: Callable[[], LoadProfile | None], *, asked: bool = False
    ) -> LoadProfile | None:
        """Return the load to simulate if an engine needs a forecast now, else None.

        Args:
            t: now.
            engine: its last reading.
            load: computes its load profile.
            asked: whether somebody looks at it: trouble need not last then, and a forecast is renewed sooner.
        """
        last = self._last.setdefault(engine.key, _Last())
        if self._left <= 0 or engine.missing or t - last.looked < _LOOK_EVERY:
            return None
        if not _needs(t, engine, last, asked=asked):
            return None
        last.looked = t
        profile = load()
        if profile is None or too_little(profile):
            return None
        facts = engine.server_facts.facts
        self._last[engine.key] = _Last(t, t, last.tries + 1, _in_flight(engine), facts)
        self._left -= 1
        return profile


def _needs(t: float, engine: EngineReading, last: _Last, *, asked: bool) -> bool:
    judgement, age = engine.judgement, t - last.made
    lasting = asked or t - judgement.since >= _LASTING
    if judgement.verdict not in FORECAST_VERDICTS or not lasting or age < _SOONEST:
        return False
    if engine.forecast is None or not engine.forecast.trusted:
        return age >= min(_LATEST, last.tries * _SOONEST)
    less, more = sorted((_in_flight(engine) + 1, last.in_flight + 1))
    return (
        age >= (_FRESH if asked else _LATEST)
        or more > _CHANGED * less
        or engine.server_facts.facts != last.facts
    )


def too_little(load: LoadProfile | None) -> str:
    """Return why a load is no basis for a forecast; empty if it is one."""
    if load is None:
        return "its load is not known yet"
    return too_little_seen(load.window_seconds, load.requests_finished)


def _in_flight(engine: EngineReading) -> float:
    signals = engine.signals
    return (signals.requests_running or 0.0) + (signals.requests_waiting or 0.0)
