"""From what an exporter says of an engine to a simulation of its present."""

import pytest
from support import real_recordings

from exporter.commands import whatif
from exporter.config import Config, WhatIfConfig
from exporter.publish.status import choose_engine, status_object
from exporter.simulation.candidates import NOW, Candidate, watermark_at
from exporter.simulation.from_status import PresentError, present_from_status
from exporter.simulation.timing import StepTime
from exporter.simulation.whatif import forecast

LOAD = {
    "window_seconds": 60.0,
    "arrivals_per_second": 2.0,
    "requests_running_mean": 10.0,
    "requests_running_max": 12.0,
    "requests_waiting_mean": 0.0,
    "preemptions_per_minute": 3.0,
    "prefix_cache_hit_ratio": 0.25,
    "prompt_tokens": {"mean": 120.0, "buckets": [[100.0, 10.0], [200.0, 30.0], [None, 0.0]]},
    "output_tokens": {"mean": 300.0, "buckets": [[200.0, 0.0], [500.0, 40.0], [None, 0.0]]},
    "requests_finished": 120.0,
    "generation_tokens_per_second": 600.0,
    "inter_token_seconds": 0.02,
    "in_flight_median": 10.0,
    "in_flight_deviation": 3.0,
    "steps": [[2.5, 5.0, 300.0, 600.0, 3000.0]],
    "kv_capacity_tokens": 16_000.0,
    "num_gpu_blocks": 1000,
    "block_size": 16,
}
LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 2048, "watermark": 0.01}


def status(limits=LIMITS, **load):
    """An engine's object in the status, with some of it changed."""
    limits = {name: {"value": value, "source": "configuration"} for name, value in limits.items()}
    return {"load": {**LOAD, **load}, "limits": limits}


def test_the_smaller_limit_of_seats_is_simulated():
    """With the source it has."""
    present = present_from_status(status(LIMITS | {"max_num_active_seqs": 4}))
    assert present.engine.max_num_seqs == 4
    assert "max_num_seqs 4 (configuration)" in present.known


def test_all_that_is_known_is_used():
    """Only what a load does not show is assumed."""
    present = present_from_status(status())
    engine = present.engine
    assert (engine.num_gpu_blocks, engine.block_size, engine.max_num_seqs) == (1000, 16, 64)
    assert (engine.max_num_batched_tokens, engine.max_model_len, engine.watermark) == (4096, 2048, 0.01)
    assert (present.load.rate, present.load.prefix_tokens) == (2.0, 30)
    assert present.load.prompts.mean == pytest.approx(120, abs=1)
    assert present.load.outputs.mean == pytest.approx(300, abs=1)
    assert (present.observed.figures["preemptions_per_minute"], len(present.assumed)) == (3.0, 2)
    assert present.assumed[0] == "requests arrive at random times"
    assert present.assumed[1].startswith("a step with twice the running requests takes 1.")
    assert "2 requests/s, prompts of 120 tokens (30 shared), answers of 300" in present.sentence


def test_the_observed_steps_take_the_observed_time():
    """300 steps of 10 requests and 2 prompt tokens in 5 s: 16.7 ms each, whatever the parts."""
    present = present_from_status(status())
    assert present.engine.step_time == present.step_times[0]
    assert len(present.step_times) >= 3
    for step in present.step_times:
        assert step.of(12, 10) == pytest.approx(5e9 / 300, rel=1e-4)


def test_what_is_not_known_is_said():
    """The defaults of vLLM, each by name; at least as many seats as were seen taken."""
    present = present_from_status(status({}, requests_running_max=300.0, steps=[], block_size=None))
    assert (present.engine.max_num_seqs, present.engine.step_time) == (300, StepTime())
    assert [text.partition(" =")[0] for text in present.assumed[:3]] == [
        "block_size", "max_num_seqs", "max_num_batched_tokens",
    ]  # fmt: skip
    assert "the step time of an 8B model on one GPU (unknown)" in present.assumed
    assert present.observed.guessed == "the step time"


def test_what_somebody_tells_counts_first():
    """Flags of the command."""
    engine = present_from_status(status(), {"max_num_seqs": 8, "num_gpu_blocks": 77, "watermark": 0.2}).engine
    assert (engine.max_num_seqs, engine.num_gpu_blocks, engine.watermark) == (8, 77, 0.2)


@pytest.mark.parametrize(
    ("load", "blocks"),
    [
        ({"num_gpu_blocks": 2000}, 1000),  # of two data-parallel engines
        ({"num_gpu_blocks": None}, 1001),  # the null block holds nothing
        ({"num_gpu_blocks": 700}, 1001),  # a hybrid model: the capacity decides
    ],
)
def test_blocks_of_one_engine(load, blocks):
    """The server tells those of all of them."""
    assert present_from_status(status(**load)).engine.num_gpu_blocks == blocks


@pytest.mark.parametrize(
    ("finished", "produced", "mean"),
    [
        (20.0, 9000.0, 450),  # 6000 tokens of those that finished: half as many again are on their way
        (20.0, 5000.0, 300),
        (20.0, 90_000.0, 900),  # at most three times as long
        (400.0, 180_000.0, 300),  # many have finished: the long ones too
    ],
)
def test_answers_are_longer_while_only_the_short_ones_have_finished(finished, produced, mean):
    """The tokens of requests that still run tell it."""
    lengths = {"mean": 300.0, "produced": produced, "buckets": [[200.0, 0.0], [500.0, finished], [None, 0.0]]}
    load = present_from_status(status(output_tokens=lengths)).load
    assert load.outputs.mean == pytest.approx(mean, rel=0.05)


def test_lengths_without_buckets_are_spread_around_the_mean():
    """From half of it to one and a half."""
    present = present_from_status(status(prompt_tokens={"mean": 100.0, "buckets": [[None, 5.0]]}))
    assert present.load.prompts.ranges == ((50, 150, 1),)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"load": None}, "the load of the engine is unknown"),
        (status(prompt_tokens=None), "prompt tokens of requests are unknown"),
        (status(kv_capacity_tokens=None), "--num-gpu-blocks"),
        (status(arrivals_per_second=0.0), "no request arrived"),
    ],
)
def test_what_cannot_do_without_is_named(changed, told):
    """Rather than a guess."""
    with pytest.raises(PresentError, match=told):
        present_from_status(changed)


@pytest.mark.parametrize(
    ("name", "trusted"),
    [
        ("0.26.0-exhaustion", True),
        ("0.32.0-exhaustion", True),
        ("0.28.0-exhaustion-short", True),
        ("0.26.0-exhaustion-no-prefix-cache", True),
        ("0.26.0-ramp", True),
        # All its clients pause several times in the window.
        ("0.26.0-queueing", False),
        ("0.26.0-two-engines", False),  # the machine was starved, and there were few polls
    ],
)
def test_the_present_of_a_real_server_is_simulated_or_not_trusted(name, trusted):
    """In the worst minute of each recording: preemptions within a tenth, tokens per second within 6 %."""
    path = real_recordings.RECORDINGS / f"{name}.jsonl.gz"
    shown = whatif._status_of_recording(path, None, Config())
    _, engine = choose_engine(shown, None)
    present = present_from_status(engine)
    result = forecast(present.load, [Candidate(NOW, present.engine)], observed=present.observed)
    assert result.calibration.trusted is trusted
    if trusted:
        figures = result.present.figures
        real = present.observed.figures["output_tokens_per_second"]
        assert figures["preemptions_per_minute"].mean == pytest.approx(
            present.observed.figures["preemptions_per_minute"], rel=0.1, abs=1
        )
        assert figures["output_tokens_per_second"].mean == pytest.approx(real, rel=0.06)
    else:
        assert result.calibration.trusted is False


def test_the_calm_are_calm():
    """No preemption in the forecast of a server that had none."""
    fed = real_recordings.pipeline(real_recordings.CALM)
    for poll in real_recordings.polls(real_recordings.CALM)[:40]:
        reading = fed.feed(poll.t, poll.body, poll.error)
    _, engine = choose_engine(status_object("", reading, reading.t, fed.loads()), None)
    present = present_from_status(engine)
    result = forecast(present.load, [Candidate(NOW, present.engine)], observed=present.observed)
    assert result.present.figures["preemptions_per_minute"].mean == 0.0


MANY = {"requests_waiting_mean": 1e9, "in_flight_median": 1e9, "in_flight_deviation": 0.0}


@pytest.mark.parametrize(
    "load",
    [
        MANY,
        {"arrivals_per_second": 1e9, "requests_finished": 6e10, "in_flight_deviation": 1e5},
        {**MANY, "prompt_tokens": {"mean": 1e12, "buckets": [[1e15, 1.0], [None, 100.0]]}},
        pytest.param({**MANY, "steps": [[2.5, 5.0, *[1e15] * 4]]}, marks=pytest.mark.long),
        pytest.param({**MANY, "steps": [[1.0, 5e-5, 50.0, 0.0, 3000.0]]}, marks=pytest.mark.long),
    ],
    ids=["waiting", "arriving", "prompts", "counters", "short steps"],
)
def test_whatever_a_server_says_a_forecast_ends(load):
    """After a bounded number of simulated steps, and it is not trusted where it cannot be the server."""
    present = present_from_status(status(**load))
    result = forecast(
        present.load,
        [Candidate(NOW, present.engine), watermark_at(present.engine, 0.05)],
        step_times=present.step_times[:2],
        observed=present.observed,
        thresholds=WhatIfConfig(seeds=1),
    )
    assert len(result.rows) == 1
    if load.keys() >= MANY.keys():
        assert result.calibration.trusted is False
