"""Forecasts of the commands: those that are due by the sidecar's own policy, made at once."""

from collections.abc import Callable
from functools import partial

from exporter.analysis.forecast import EngineForecast
from exporter.analysis.forecast_policy import ForecastPolicy
from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.config import WhatIfConfig
from exporter.publish.status import engine_names, question
from exporter.simulation import worker

__all__ = ["forecast_due"]


def forecast_due(
    t: float,
    reading: TargetReading,
    pipeline: Pipeline,
    policy: ForecastPolicy,
    thresholds: WhatIfConfig,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Forecast each engine that needs it, and give its pipeline the result; returns whether there is one.

    Args:
        t: time of the reading.
        reading: the last one.
        pipeline: that of the target.
        policy: that of the target.
        thresholds: how much to simulate, and the thresholds of the verdicts.
        progress: called with the number of finished runs and of all runs.
    """
    made = False
    for name, engine in engine_names(reading).items():
        load = policy.due(t, engine, partial(pipeline.load, engine.key))
        if load is not None:
            try:
                document = worker.answer(name, question(engine, load), thresholds, progress=progress)
            except (ValueError, ArithmeticError) as problem:  # settings that no server has
                document = {"error": f"the load cannot be simulated: {problem}"}
            pipeline.set_forecast(engine.key, EngineForecast.from_dict(document, t))
            made = True
    return made
