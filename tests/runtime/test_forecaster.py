"""The sidecar forecasts the engines in trouble, and its pipelines rank the fixes by that."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from support.scenes import Stage, engine_of

from exporter.config import WhatIfConfig
from exporter.publish.web.forecasts import Forecasts
from exporter.runtime import forecaster
from exporter.runtime.forecaster import Forecaster

POOL = {"kv_cache_size_tokens": 299 * 32, "block_size": 32, "cache_dtype": "auto"}
STORM = {"running": 20, "waiting": 12, "kv": 0.98, "tokens": 300, "finished": 2, "preemptions": 2}
CALM = {"running": 20, "kv": 0.9, "tokens": 300, "finished": 2}
FIGURES = {"output_tokens_per_second": {"ratio_to_now": 1.4}}
FORECAST = {
    "calibration": {"trusted": True, "reason": "they match"},
    "simulated": {"step_times": []},
    "candidates": [
        {"fixes": ["fp8_kv_cache"], "outcome": "helps", "figures": FIGURES, "parts": [], "score": 1.4}
    ],
}


class Watched:
    """A target whose polls were played."""

    def __init__(self, part, seconds=60):
        self.stage = Stage(cache=POOL)
        self.stage.play(60, **CALM)
        self.stage.play(seconds, **part)
        self.pipeline, self.reading = self.stage.pipeline, self.stage.readings[-1]
        self.url, self.target = "http://a", SimpleNamespace(name="a")


class Fleet(list):
    """Targets."""

    several = False


@pytest.fixture
def made(monkeypatch):
    """Runs a forecaster over targets until it has looked twice; returns what was simulated."""
    asked = []

    async def simulated(_self, question):
        asked.append(question)
        return FORECAST

    monkeypatch.setattr(Forecasts, "_run", simulated)
    monkeypatch.setattr(forecaster, "_LOOK_EVERY", 0.0)

    def run(*targets, visited=False):
        async def looked():
            forecasts = Forecasts(lambda: {"targets": [{"engines": {"0": {}}}]}, WhatIfConfig(), lambda: 0.0)
            own = Forecaster(Fleet(targets), forecasts)
            if visited:
                own.ask()
            task = asyncio.create_task(own.run())
            for _ in range(50):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if asked:  # the API shows the forecast that was made in the background
                answer = await forecasts.answer(SimpleNamespace(query={}))
                assert (answer.status, json.loads(answer.body)["age_seconds"]) == (200, 0.0)

        asyncio.run(looked())
        return asked

    return run


def test_an_engine_in_trouble_is_forecast_once_and_its_fixes_are_ranked_by_it(made):
    """From the next poll on."""
    watched = Watched(STORM)
    assert len(made(watched)) == 1
    shown = engine_of(watched.stage.play(1, **STORM)[-1])
    assert (shown.advice.fixes[0].fix, shown.advice.fixes[0].gain) == ("fp8_kv_cache", 1.4)
    assert shown.forecast.trusted


def test_a_visit_does_not_wait_until_the_trouble_lasts(made):
    """Nobody has to reload the page for it."""
    storm = Watched(STORM, seconds=9)
    assert made(storm) == []
    assert len(made(storm, visited=True)) == 1


def test_an_engine_without_trouble_costs_nothing(made):
    """No process starts."""
    assert made(Watched({"running": 4, "kv": 0.2, "tokens": 100, "finished": 2})) == []


def test_a_fault_ends_no_other_forecast(made, caplog):
    """It is logged."""
    broken, watched = Watched(STORM), Watched(STORM)
    broken.pipeline = None
    assert len(made(broken, watched)) == 1
    assert "cannot forecast" in caplog.text
