"""Facts beside a verdict: when each holds, and when not."""

import pytest
from support.scenes import Stage, engine_of, found

BUSY = {"running": 10, "kv": 0.6, "tokens": 500, "finished": 1}


def first_findings(cache=None, **facts):
    """What is said at the first poll of an idle engine."""
    stage = Stage(cache=cache, **facts)
    return found(stage.play(1))


@pytest.mark.parametrize(
    ("cache", "facts", "findings"),
    [
        ({"kv_cache_size_tokens": 36_000}, {"max_model_len": 32_768}, {"kv_too_small"}),
        ({"kv_cache_size_tokens": 36_000, "kv_cache_max_concurrency": 1.1}, {}, {"kv_too_small"}),
        ({"kv_cache_size_tokens": 66_000}, {"max_model_len": 32_768}, set()),
        (
            {"kv_cache_size_tokens": 30_000},
            {"max_model_len": 32_768},
            {"kv_too_small", "max_model_len_exceeds_pool"},
        ),
        ({"kv_cache_size_tokens": 30_000}, {}, set()),
        ({"num_gpu_blocks": 2501, "block_size": 16}, {}, {"capacity_is_estimate"}),
        ({"num_gpu_blocks": "None", "block_size": 16}, {}, set()),
        (
            {"kv_cache_size_tokens": 90_000, "kv_cache_max_concurrency": 5.0},
            {"max_model_len": 32_768},
            {"capacity_labels_disagree"},
        ),
        (
            {"kv_cache_size_tokens": 90_000, "kv_cache_max_concurrency": 2.75},
            {"max_model_len": 32_768},
            set(),
        ),
        ({"enable_prefix_caching": "False"}, {}, {"prefix_cache_off"}),
        ({"enable_prefix_caching": "True"}, {"enable_prefix_caching": False}, set()),  # the server knows best
        ({}, {"enable_prefix_caching": False}, {"prefix_cache_off"}),
        ({}, {"num_speculative_tokens": 3}, {"speculation_enlarges_kv"}),
        ({}, {"num_speculative_tokens": 0}, set()),
        ({}, {}, set()),
    ],
)
def test_facts_of_the_configuration_are_found_at_the_first_poll(cache, facts, findings):
    """Before any load."""
    assert first_findings(cache, **facts) == findings


def test_drafted_tokens_tell_of_speculation_by_themselves():
    """The counter exists only with it."""
    line = b'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="demo-7b"} 12\n'
    stage = Stage(spell=lambda text: text + line)
    assert "speculation_enlarges_kv" in found(stage.play(1, **BUSY))


def test_a_restart_is_spoken_of_for_five_minutes():
    """With what was last seen before it."""
    stage = Stage()
    stage.play(30, **BUSY)
    stage.restart()
    scene = stage.play(400, **BUSY)
    assert [one.t - scene[0].t for one in scene if "restarted" in found([one])][-1] == 300


def test_a_mass_preemption_is_spoken_of_for_a_minute():
    """All ten at a full cache, once."""
    stage = Stage()
    stage.play(30, **BUSY | {"kv": 0.97})
    stage.play(5, waiting=10)
    scene = stage.play(120, **BUSY)
    assert [one.t for one in scene if "mass_preemption" in found([one])][-1] == pytest.approx(90, abs=1)


@pytest.mark.parametrize(
    ("running", "kv"), [(3, 0.97), (10, 0.5)], ids=["three are no mass", "the cache was not full"]
)
def test_no_mass_preemption_without_a_mass_or_a_reason(running, kv):
    """The counter does not confirm it either."""
    stage = Stage()
    stage.play(30, **BUSY | {"running": running, "kv": kv})
    scene = stage.play(30, waiting=running)
    assert "mass_preemption" not in found(scene)


def test_requests_that_finish_and_come_anew_are_no_mass_preemption():
    """A batch ends and the next one arrives between two polls."""
    stage = Stage()
    stage.play(30, **BUSY | {"kv": 0.97})
    scene = stage.play(1, waiting=10, finished=10)
    assert "mass_preemption" not in found(scene)
    assert "preemption_inferred" not in found(scene)


def test_inferred_preemptions_go_when_the_counter_has_followed():
    """Six went back; two seconds later the server has counted six."""
    stage = Stage()
    stage.play(30, **BUSY | {"kv": 0.97})
    assert "preemption_inferred" in found(stage.play(2, **BUSY | {"running": 4, "waiting": 6, "finished": 0}))
    after = stage.play(5, **BUSY | {"preemptions": lambda t: 6 if t == 0 else 0})
    assert "preemption_inferred" not in found(after)


def test_gauges_are_stale_when_they_show_work_and_nothing_moves():
    """After a minute; an engine with nothing to show is idle."""
    stage = Stage()
    stage.play(30, **BUSY)
    scene = stage.play(90, running=10, kv=0.6)
    assert next(one.t - scene[0].t for one in scene if "stale_gauges" in found([one])) in (59, 60)
    idle = Stage()
    idle.play(30, **BUSY)
    assert "stale_gauges" not in found(idle.play(200))


def test_an_engine_that_is_gone_has_no_findings():
    """Nothing holds of what cannot be seen."""
    stage = Stage(cache={"kv_cache_size_tokens": 100}, max_model_len=1000)
    stage.play(10, **BUSY)
    scene = stage.fail(20)
    assert engine_of(scene[-1]).findings == ()
    assert engine_of(scene[-1]).advice.fixes == ()
