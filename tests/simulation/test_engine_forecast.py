"""The forecast of an engine is bounded in work and memory, whatever the gauges say."""

import tracemalloc
from dataclasses import replace

import pytest

from exporter.config import WhatIfConfig
from exporter.simulation import engine_forecast, run, whatif, worker
from exporter.simulation.engine_forecast import bounded, simulate_engine
from exporter.simulation.from_status import Present
from exporter.simulation.load import Load
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import Lengths

ENGINE = Engine(num_gpu_blocks=300, block_size=32, max_num_seqs=32)
PROMPTS, ANSWERS = Lengths.between(50, 400), Lengths.between(200, 800)
ONCE = WhatIfConfig(seeds=1)


def simulated(present):
    """The forecast of an engine with one seed."""
    return simulate_engine(bounded(present), ONCE, (), None, None, map)


@pytest.fixture
def little(monkeypatch):
    """A budget of a tenth, and a count of what is spent."""
    monkeypatch.setattr(engine_forecast, "BUDGET", 12_500)
    spent = []

    class Run(run.Run):
        """Counts the steps that were simulated one by one."""

        def until(self, end):
            """Run on."""
            before = self.scheduler.effort
            ended = super().until(end)
            spent.append(self.scheduler.effort - before)
            return ended

    monkeypatch.setattr(run, "Run", Run)
    return spent


@pytest.mark.parametrize(
    "load",
    [
        Load(PROMPTS, ANSWERS, clients=10**9),
        pytest.param(Load(PROMPTS, ANSWERS, rate=1e18), marks=pytest.mark.long),
        pytest.param(Load(PROMPTS, ANSWERS, rate=200.0), marks=pytest.mark.long),
        Load(Lengths.between(1, 10**6), Lengths.between(1, 10**9), clients=64),
        Load(PROMPTS, ANSWERS, clients=64, prefixes=1, prefix_tokens=10**9),
    ],
    ids=["clients", "rate", "overload", "lengths", "prefix"],
)
def test_work_and_memory_are_bounded_whatever_the_gauges_say(load, little):
    """Every run stops at its share of the budget, and no queue is longer than is useful."""
    tracemalloc.start()
    try:
        result = simulated(Present(load, ENGINE))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.rows
    assert sum(little) <= 12_500 * 1.2
    assert peak < 8 << 20


def test_a_step_that_takes_no_time_ends_too(little):
    """A server may claim a thousand steps in no time."""
    engine = replace(ENGINE, step_time=StepTime(0, 0, 0))
    assert simulated(Present(Load(PROMPTS, ANSWERS, clients=64), engine)).rows
    assert sum(little) <= 12_500 * 1.2


def test_a_queue_that_is_cut_is_said():
    """Four requests per seat wait for ever anyway."""
    short = bounded(Present(Load(PROMPTS, ANSWERS, clients=10_000), ENGINE))
    assert short.load.clients == 128
    assert "128 requests at a time instead of 10000" in short.assumed[0]
    kept = Present(Load(PROMPTS, ANSWERS, clients=100), ENGINE)
    assert bounded(kept) == kept


def test_the_same_engine_gives_the_same_forecast():
    """No number depends on the machine's speed."""
    present = Present(Load(PROMPTS, ANSWERS, clients=48), ENGINE)
    first, second = (simulated(present) for _ in range(2))
    assert whatif.Forecast.__eq__(first, second)


def test_the_pool_grows_by_what_the_advice_computed():
    """The bytes of this server, instead of the assumed share."""
    fixes = (
        {"fix": "quantize_weights", "inputs": {"kv_capacity_ratio": 1.4}},
        {"fix": "add_replicas", "value": 3},
    )
    present = Present(Load(PROMPTS, ANSWERS, clients=48), ENGINE, fixes=fixes)
    labels = {row.candidate.label: row.candidate.fixes for row in simulated(present).rows}
    assert labels["pool x1.4"] == ("quantize_weights",)
    assert "3 more replicas" in labels


def test_what_is_missing_is_said_instead():
    """No load, no forecast."""
    assert "has not seen it at work" in worker.answer("0", {"load": None}, ONCE)["error"]
