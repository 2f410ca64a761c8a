"""What was asked of an engine lately: rates, lengths and slices of its steps."""

import json

import pytest
from support.scenes import Stage

CACHE = {"block_size": "16", "num_gpu_blocks": "1000", "kv_cache_size_tokens": "16000"}
LENGTHS = {
    "prompt_lengths": ({100.0: 10.0, 200.0: 40.0, float("inf"): 40.0}, 5000.0),
    "output_lengths": ({500.0: 40.0, float("inf"): 40.0}, 12_000.0),
}


def seen(stage):
    """What is known of the one engine."""
    (load,) = stage.pipeline.loads().values()
    return load


def test_a_steady_load_is_told_as_it_is():
    """Rates per second, means of gauges, capacity and blocks."""
    stage = Stage(cache=CACHE, max_num_seqs=64)
    stage.play(
        90, running=10, waiting=2, kv=0.5, tokens=400, finished=2, preemptions=0.5, steps=40, **LENGTHS
    )
    load = seen(stage)
    assert load.seconds == pytest.approx(60, abs=1)
    assert load.arrivals_per_second == pytest.approx(2, rel=0.05)
    assert load.preemptions_per_minute == pytest.approx(30, rel=0.05)
    assert (load.running, load.running_most, load.waiting) == (10, 10, 2)
    assert (load.kv_capacity_tokens, load.num_gpu_blocks, load.block_size) == (16_000, 1000, 16)
    assert load.prompts.mean == 125
    assert load.outputs.mean == 300


def test_what_the_engine_gained_arrived():
    """A queue that grows by one a second is load too."""
    stage = Stage(cache=CACHE)
    stage.play(61, running=5, waiting=lambda t: t, kv=0.5, tokens=100, finished=1)
    assert seen(stage).arrivals_per_second == pytest.approx(2, rel=0.05)


def test_few_requests_are_told_from_a_longer_window():
    """A minute with less than fifty says little."""
    stage = Stage(cache=CACHE)
    stage.play(200, running=1, kv=0.1, tokens=20, finished=0.1)
    assert seen(stage).seconds == pytest.approx(199, abs=1)


def test_an_engine_that_told_too_little_is_left_out():
    """One poll has no rates."""
    stage = Stage(cache=CACHE)
    stage.play(1, running=1)
    assert stage.pipeline.loads() == {}


def test_an_engine_without_lengths_has_none():
    """Unknown is not zero."""
    stage = Stage()
    stage.play(61, running=5, kv=0.5, tokens=100, finished=1)
    load = seen(stage)
    assert (load.prompts, load.outputs, load.block_size, load.num_gpu_blocks) == (None, None, None, None)
    assert load.as_object()["prompt_tokens"] is None


def test_it_leaves_the_program_as_json():
    """Without infinity: the last bucket has no bound."""
    stage = Stage(cache=CACHE)
    stage.play(61, running=5, kv=0.5, tokens=100, finished=1, **LENGTHS)
    told = json.loads(json.dumps(seen(stage).as_object(), allow_nan=False))
    assert told["prompt_tokens"] == {"mean": 125.0, "buckets": [[100.0, 10.0], [200.0, 30.0], [None, 0.0]]}
