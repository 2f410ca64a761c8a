"""Forecasts of the engines in trouble, in the background, one at a time."""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from exporter.analysis.forecast import EngineForecast
from exporter.analysis.forecast_policy import ForecastPolicy
from exporter.publish.status import engine_names, question
from exporter.publish.web.forecasts import Forecasts
from exporter.runtime.fleet import Fleet, Watched

__all__ = ["Forecaster"]

log = logging.getLogger(__name__)

_LOOK_EVERY: Final = 1.0


class Forecaster:
    """Gives the pipelines the forecasts that are due, and those that somebody asked for."""

    def __init__(self, fleet: Fleet, forecasts: Forecasts) -> None:
        """Prepare, without starting anything."""
        self._fleet = fleet
        self._forecasts = forecasts
        self._policies: WeakKeyDictionary[Watched, ForecastPolicy] = WeakKeyDictionary()
        forecasts.made = self._made
        self._asked = False

    def ask(self) -> None:
        """Look at all engines as one does for somebody who looks at them too."""
        self._asked = True

    async def run(self) -> None:
        """Forecast what is due, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            asked, self._asked = self._asked, False
            for watched in list(self._fleet):
                try:
                    await self._look(watched, asked=asked)
                except Exception:  # a fault of ours must not end the forecasts
                    log.exception("cannot forecast target=%s", watched.url)

    async def _look(self, watched: Watched, *, asked: bool) -> None:
        reading = watched.reading
        if reading is None or not reading.up:
            return
        target = watched.target.name if self._fleet.several else ""  # as the API is asked
        policy = self._policies.setdefault(watched, ForecastPolicy())
        for name, engine in engine_names(reading).items():
            load = policy.due(reading.t, engine, partial(watched.pipeline.load, engine.key), asked=asked)
            if load is not None:
                await self._forecasts.make(target, name, question(engine, load))

    def _made(self, target: str, name: str, at: float, document: Mapping[str, Any]) -> None:
        """Give a forecast to the pipeline of its engine; it is from the readings up to `at`."""
        for watched in self._fleet:
            if watched.reading is None or (self._fleet.several and watched.target.name != target):
                continue
            engine = engine_names(watched.reading).get(name)
            if engine is not None:
                watched.pipeline.set_forecast(engine.key, EngineForecast.from_dict(document, at))
                return
