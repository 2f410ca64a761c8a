"""An engine's own normal: what it put out in calm times, and how long a token took at which load."""

import pytest
from support.scenes import Stage


def baseline(stage):
    """Of the one engine."""
    (played,) = stage.pipeline._engines.values()
    return played._baseline


CALM = {"running": 10, "kv": 0.6, "tokens": 500, "finished": 1}


def test_the_level_is_what_calm_slices_put_out():
    """Two of twenty seconds are enough, one is not."""
    stage = Stage()
    stage.play(30, **CALM)
    assert baseline(stage).level is None
    stage.play(30, **CALM)
    assert baseline(stage).level == pytest.approx(500, rel=0.05)
    assert baseline(stage).level_requests == pytest.approx(10)


def test_idle_time_is_no_level():
    """An engine without requests has no speed."""
    stage = Stage()
    stage.play(120)
    assert baseline(stage).level is None


def test_preempted_slices_count_only_where_there_were_no_others():
    """Light preemption from the start is normal; after calm it is not what is compared with."""
    stage = Stage()
    stage.play(100, **CALM | {"tokens": 300, "preemptions": 0.1})
    assert baseline(stage).level == pytest.approx(300, rel=0.05)
    stage = Stage()
    stage.play(100, **CALM)
    stage.play(100, **CALM | {"tokens": 300, "preemptions": 0.1})
    assert baseline(stage).level == pytest.approx(500, rel=0.05)


def test_an_engine_in_a_storm_does_not_get_used_to_it():
    """Ten minutes of it leave the level as it was."""
    stage = Stage()
    stage.play(120, **CALM)
    stage.play(600, running=6, waiting=6, kv=0.98, tokens=100, finished=0.1, preemptions=1)
    assert baseline(stage).level == pytest.approx(500, rel=0.05)


def test_latency_is_compared_at_about_the_same_load_only():
    """The same number running, at the same usage, with no more prefill; and after some minutes."""
    stage = Stage()
    stage.play(200, **CALM, inter_token=0.03)
    assert baseline(stage).latency(10, 0.6, 1000) is None
    stage.play(200, **CALM, inter_token=0.03)
    assert baseline(stage).latency(10, 0.6, 1000) == pytest.approx(0.03)
    assert baseline(stage).latency(20, 0.6, 1000) is None
    assert baseline(stage).latency(10, 0.9, 1000) is None
    assert baseline(stage).latency(10, 0.6, 9000) is None


def test_a_slice_knows_how_many_times_its_normal_it_took():
    """Twice, at a load that was seen before."""
    stage = Stage()
    stage.play(500, **CALM, inter_token=0.03)
    stage.play(100, **CALM | {"tokens": 250}, inter_token=0.06)
    paces = baseline(stage).paces(stage.now - 60)
    assert len(paces) >= 2
    assert [pace.factor for pace in paces] == pytest.approx([2.0] * len(paces), rel=0.05)


def test_the_most_that_ran_without_preemption_is_remembered_of_a_well_used_cache():
    """Thirty short ones at a tenth of it say nothing of how many fit."""
    stage = Stage()
    stage.play(60, **CALM | {"running": 30, "kv": 0.1})
    stage.play(60, **CALM)
    stage.play(60, **CALM | {"running": 25, "kv": 0.9, "preemptions": 0.2})
    assert baseline(stage).calm_running() == 10


def test_an_unknown_number_of_running_requests_is_no_number():
    """The gauge is missing for a while."""
    stage = Stage(absent=["running"])
    stage.play(120, **CALM)
    assert baseline(stage).calm_running() == 0
