"""Forecasts from the pages of simulated servers, against the same changes with the true parameters."""

import random

import pytest

from bench.judge.draw import draw
from bench.judge.trial import _Server
from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig, WhatIfConfig, parse_facts
from exporter.publish.status import choose_engine, status_object
from exporter.simulation.candidates import NOW, Candidate, parse_candidate
from exporter.simulation.from_status import present_from_status
from exporter.simulation.load import Load
from exporter.simulation.whatif import forecast

KNOWN = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "watermark")
ONCE = WhatIfConfig(seeds=2)


def seen(scenario, seconds=100):
    """The present as the exporter reads it from the pages of a calm and some seconds of the trouble."""
    facts, _ = parse_facts({name: getattr(scenario.engine, name) for name in KNOWN}, strict=False)
    facts |= parse_facts({"async_scheduling": scenario.engine.async_scheduling}, strict=False)[0]
    server, pipeline = _Server(scenario), Pipeline(AnalysisConfig(), facts, 1.0)
    dice = random.Random(scenario.seed)
    for second in range(int(scenario.calm) + seconds):
        late = second + 0.1 * dice.random()
        for machine in server.machines:
            machine.until(late)
        reading = pipeline.feed(late, server.body(late))
    status = status_object("", reading, reading.t, pipeline.loads())
    return present_from_status(choose_engine(status, None)[1])


@pytest.mark.parametrize("seed", [2, 13, 28])
def test_a_forecast_from_pages_is_that_with_the_true_parameters(seed):
    """Random step times, lengths and closed loads in which KV is short: throughput to an eighth.

    The truth is between the extremes of the set of step times, to a twentieth.
    """
    scenario = draw(seed, "overload")
    present = seen(scenario)
    phase = scenario.traffic[0].phases[-1]
    load = Load(phase.prompts, phase.outputs, clients=phase.clients)
    seats = max(1, round(0.6 * present.observed.figures["running"]))

    def rows(load, engine, **known):
        changes = [parse_candidate(text, engine) for text in (f"seats={seats}", "pool=x2", "watermark=0.1")]
        return forecast(load, [Candidate(NOW, engine), *changes], thresholds=ONCE, **known)

    told = rows(present.load, present.engine, step_times=present.step_times, observed=present.observed)
    assert told.calibration.trusted is True, told.calibration.sentence
    true = rows(load, scenario.engine)
    real = {row.candidate.label: row.figures["output_tokens_per_second"].ratio for row in true.rows}
    for row in told.rows:
        tokens, ratio = row.figures["output_tokens_per_second"], real[row.candidate.label]
        assert tokens.ratio == pytest.approx(ratio, abs=0.13), row.candidate.label
        assert tokens.ratio_least - 0.05 <= ratio <= tokens.ratio_most + 0.05, row.candidate.label
