"""What was asked of an engine lately: rates, lengths and slices of its steps."""

import json

import pytest
from support.scenes import Stage

from exporter.analysis.load_profile import LoadProfile

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
    assert load.window_seconds == pytest.approx(60, abs=1)
    assert load.arrivals_per_second == pytest.approx(2, rel=0.05)
    assert load.preemptions_per_minute == pytest.approx(30, rel=0.05)
    assert (load.requests_running_mean, load.requests_running_max, load.requests_waiting_mean) == (10, 10, 2)
    assert (load.kv_capacity_tokens, load.num_gpu_blocks, load.block_size) == (16_000, 1000, 16)
    assert load.prompt_tokens.mean == 125
    assert load.output_tokens.mean == 300


def test_what_the_engine_gained_arrived():
    """A queue that grows by one a second is load too."""
    stage = Stage(cache=CACHE)
    stage.play(61, running=5, waiting=lambda t: t, kv=0.5, tokens=100, finished=1)
    assert seen(stage).arrivals_per_second == pytest.approx(2, rel=0.05)


def test_few_requests_are_told_from_a_longer_window():
    """A minute with less than fifty says little."""
    stage = Stage(cache=CACHE)
    stage.play(200, running=1, kv=0.1, tokens=20, finished=0.1)
    assert seen(stage).window_seconds == pytest.approx(199, abs=1)


def test_the_calm_before_is_no_part_of_the_load():
    """12 s after three requests became twelve the window has at most these 12 s; after 60 s it is whole."""
    stage = Stage(cache=CACHE, max_num_seqs=64)
    stage.play(60, running=3, waiting=0, kv=0.2, tokens=100, finished=1)
    stage.play(12, running=12, waiting=20, kv=0.9, tokens=400, finished=2)
    load = seen(stage)
    assert 5 < load.window_seconds <= 13
    assert load.requests_running_mean == 12
    stage.play(50, running=12, waiting=lambda t: 20 + t, kv=0.9, tokens=400, finished=2)
    assert seen(stage).window_seconds == pytest.approx(60, abs=1)


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
    assert (load.prompt_tokens, load.output_tokens) == (None, None)
    assert (load.block_size, load.num_gpu_blocks) == (None, None)
    assert load.to_dict()["prompt_tokens"] is None


def test_the_document_is_read_again_as_the_same_profile():
    """By another exporter, that has other keys too."""
    stage = Stage(cache=CACHE)
    stage.play(61, running=5, kv=0.5, tokens=100, finished=1, steps=20, **LENGTHS)
    document = json.loads(json.dumps(seen(stage).to_dict(), allow_nan=False))
    again = LoadProfile.from_dict({**document, "later": 1})
    assert again.to_dict() == document
    assert again.prompt_tokens == seen(stage).prompt_tokens
    assert LoadProfile.from_dict({"requests_running_mean": 3}).requests_running_mean == 3
    assert LoadProfile.from_dict({}).prompt_tokens is None


def test_it_leaves_the_program_as_json():
    """Without infinity: the last bucket has no bound."""
    stage = Stage(cache=CACHE)
    stage.play(61, running=5, kv=0.5, tokens=100, finished=1, **LENGTHS)
    told = json.loads(json.dumps(seen(stage).to_dict(), allow_nan=False))
    assert told["prompt_tokens"] == {"mean": 125.0, "buckets": [[100.0, 10.0], [200.0, 30.0], [None, 0.0]]}
