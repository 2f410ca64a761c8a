"""Hangs, deadlocks and long prefills; each scene has one right answer."""

import pytest
from support.loads import BUSY, DEADLOCK, FULL, LENGTHS, MEMORY, POOL, STALLED, UNFITTABLE, printing
from support.scenes import (
    Stage,
    engine_of,
    first,
    fixes,
    found,
    sequence,
    verdicts,
)

from exporter.analysis.conditions import Evidence

# No progress.


def test_a_multimodal_engine_that_cannot_schedule_has_its_encoder_checked():
    """Nothing runs, three wait, KV is empty, and images were served."""
    queries = 'vllm:mm_cache_queries_total{engine="0",model_name="demo-7b"} 55'
    stage = Stage(cache=POOL, max_model_len=32_768, spell=printing(queries))
    stage.play(60, **BUSY)
    scene = stage.play(120, waiting=3, **LENGTHS)
    assert sequence(scene) == ["healthy", DEADLOCK]
    assert "check_encoder_cache" in fixes(scene[-1])
    assert not MEMORY & {*fixes(scene[-1])}


def test_a_request_that_can_never_fit_is_named_once_the_others_are_done():
    """While one still runs it is a queue with room; it never looks healthy in between."""
    stage = Stage(cache=POOL, max_model_len=131_072)
    stage.play(100, running=4, kv=0.2, tokens=100, finished=0.2, **LENGTHS)
    stage.play(100, running=4, waiting=lambda t: 1 + t / 20, kv=0.2, tokens=100, finished=0.04, **LENGTHS)
    alone = stage.play(120, waiting=lambda t: 6 + t / 20, **LENGTHS)
    assert sequence(stage.readings) == ["healthy", "queue_not_kv", UNFITTABLE]
    assert first(alone, UNFITTABLE) <= 60
    assert "max_model_len_exceeds_pool" in found(stage.readings[:1])
    assert {"abort_request", "lower_max_model_len"} <= {*fixes(alone[-1])}


def test_gauges_left_over_from_cancelled_requests_are_told_from_a_hang_by_a_probe():
    """Twenty seem to run and nothing moves: critical, and the first thing to do is to ask the engine."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    scene = stage.play(120, running=20, kv=0.5, **LENGTHS)
    assert sequence(scene) == ["healthy", STALLED]
    assert "stale_gauges" in found(scene[70:])
    assert fixes(scene[-1])[0] == "send_probe_request"


def test_a_hang_with_a_growing_queue_at_a_full_cache_is_a_stall_and_not_a_shortage():
    """New requests pile up; the KV level is a fact beside."""
    stage = Stage(cache=POOL)
    stage.play(100, **FULL)
    scene = stage.play(120, running=20, waiting=lambda t: t / 4, kv=0.97, **LENGTHS)
    assert sequence(scene)[-1] == STALLED
    assert first(scene, STALLED) <= 61
    assert "stale_gauges" not in found(scene)
    assert not MEMORY & {*fixes(scene[-1])}


@pytest.mark.parametrize(
    "kv", [lambda t: t / 400, lambda t: int(t / 20) / 20], ids=["steadily", "every 20 s"]
)
def test_a_prefill_of_five_minutes_is_healthy(kv):
    """The step counter stands still, KV usage creeps up to three quarters: the prompt ends, and fits."""
    stage = Stage(cache=POOL)
    stage.play(30, **LENGTHS)
    stage.play(300, running=1, kv=kv, **LENGTHS)
    stage.play(60, running=1, kv=0.76, tokens=30, **LENGTHS)
    assert verdicts(stage.readings) == {"healthy"}


def test_the_first_request_of_a_cold_server_takes_its_time():
    """Eight seconds of compiling before the first token."""
    stage = Stage(cache=POOL)
    stage.play(30)
    stage.play(8, running=1, kv=0.01)
    stage.play(30, running=1, kv=0.01, tokens=30)
    assert verdicts(stage.readings) == {"healthy"}


def test_gauges_that_come_with_the_first_request_are_not_missing_before_it_and_are_after():
    """Several API server processes; later a gauge goes away for good."""
    stage = Stage(cache=POOL, absent=["running", "waiting", "kv"])
    assert verdicts(stage.play(60)) == {"healthy"}
    stage.players["0"].absent = frozenset()
    assert verdicts(stage.play(60, **BUSY)) == {"healthy"}
    stage.players["0"].absent = frozenset(["kv"])
    assert verdicts(stage.play(10, **BUSY)) == {"metrics_missing"}
    last = engine_of(stage.readings[-1])
    assert last.judgement.evidence == (Evidence("kv_usage", None, note="absent"),)
    # The gauges cannot betray a preemption any more; none seen is not none.
    assert last.signals.preemptions_inferred_per_second is None
    assert last.signals.preemptions_per_second == 0


def every(seconds, at_once):
    """One step of all that run each so many seconds."""
    return lambda t: at_once if t and int(t) % seconds == 0 else 0


@pytest.mark.parametrize("seconds", [15, 40, 63, 75])
def test_one_step_a_minute_is_no_end_of_a_stall(seconds):
    """It stood still for more than a minute; a step now and then is no progress."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    stage.play(70, running=8, waiting=3, kv=0.5, **LENGTHS)
    step = every(seconds, 8)
    scene = stage.play(
        300, running=8, waiting=9, kv=0.5, tokens=step, prompts=0, steps=every(seconds, 1), **LENGTHS
    )
    assert sequence(scene) == [STALLED]


def test_a_stall_ends_once_the_engine_steps_again():
    """As soon as the hold time is over."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    stage.play(70, running=8, waiting=3, kv=0.5, **LENGTHS)
    scene = stage.play(60, **BUSY)
    assert sequence(scene) == [STALLED, "healthy"]
    assert first(scene, "healthy") <= 30


def test_a_stall_ends_with_a_prompt_that_is_being_computed():
    """No step puts anything out for minutes, and KV usage grows with each."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    stage.play(70, running=20, kv=0.5, **LENGTHS)
    scene = stage.play(120, running=1, kv=lambda t: 0.1 + t / 500, prompts=0, steps=0, tokens=0, **LENGTHS)
    assert STALLED not in verdicts(scene[31:])


def _calm(t):
    """Seconds of a step: a third more while prompts come."""
    return 0.03 if int(t) % 10 < 5 else 0.04


CALM = {
    "running": 8,
    "kv": 0.4,
    "tokens": lambda t: 8 / _calm(t),
    "steps": lambda t: 1 / _calm(t),
    "prompts": lambda t: 4000 if _calm(t) > 0.03 else 0,
    "finished": 1,
    "inter_token": _calm,
    **LENGTHS,
}


@pytest.mark.parametrize("seconds", [4, 12, 25, 55])
def test_an_engine_of_rare_steps_is_slow_until_they_are_quick_again(seconds):
    """Each of its steps admits a few prompts, which explain no minute; between two nothing is seen at all."""
    stage = Stage(cache=POOL, max_num_batched_tokens=2048)
    stage.play(90, **CALM)
    once = every(seconds, 1)
    scene = stage.play(
        240,
        running=lambda t: 8 + int(t) // seconds % 16,
        waiting=lambda t: int(t) // 2,
        kv=lambda t: 0.4 + 0.012 * (int(t) // seconds % 16),
        tokens=every(seconds, 8),
        steps=once,
        prompts=every(2 * seconds, 1000),
        inter_token=seconds,
        **LENGTHS,
    )
    assert sequence(scene[70:]) == ["decode_slow"]
    assert {engine_of(reading).judgement.severity.value for reading in scene[70:]} == {"critical"}
    after = stage.play(60, **CALM)
    assert sequence(after)[-1] == "healthy"
    assert first(after, "healthy") <= 30


@pytest.mark.parametrize(
    "part",
    [
        {"running": 1, "kv": lambda t: 0.1 + t / 500},
        {"running": 8, "kv": lambda t: 0.1 + t / 300, "waiting": 3},
        {},
        {"running": lambda t: int(t) % 30 < 3, "kv": lambda t: 0.05 * (int(t) % 30 < 3)},
    ],
    ids=["one long prompt", "prompts and a queue", "requests have ended", "a short request now and then"],
)
def test_few_steps_with_little_to_do_are_no_slow_engine(part):
    """A prompt that is being computed moves KV usage; an idle engine has no steps."""
    stage = Stage(cache=POOL, max_num_batched_tokens=2048)
    stage.play(90, **CALM)
    scene = stage.play(200, steps=0, tokens=0, prompts=0, **LENGTHS, **part)
    assert "decode_slow" not in verdicts(scene)


def test_one_pause_is_no_slow_engine():
    """Weights are updated, or a graph is captured: fifty seconds without a step."""
    stage = Stage(cache=POOL, max_num_batched_tokens=2048)
    stage.play(90, **CALM)
    pause = stage.play(50, running=8, kv=0.4, steps=0, tokens=0, prompts=0, **LENGTHS)
    assert verdicts(pause + stage.play(90, **CALM)) == {"healthy"}
