"""What a queue waits for; each scene has one right answer."""

import math

import pytest
from support.loads import BUSY, LENGTHS, MEMORY, NO_PAGE, POOL, printing
from support.scenes import (
    Stage,
    engine_of,
    fixes,
    sequence,
    severities,
    verdicts,
    withheld,
)

# Queues.


@pytest.mark.parametrize("preemptions", [0.0, 0.015], ids=["none", "one per 200 finished"])
def test_an_overloaded_engine_that_reserves_whole_prompts_is_kv_bound(preemptions):
    """The pool is full, the queue grows, work gets done; more seats are no cure."""
    stage = Stage(cache=POOL)
    kv = lambda t: 0.98 + 0.005 * (int(t) % 3)  # noqa: E731
    part = {"running": 40, "kv": kv, "tokens": 1200, "finished": 3, "queue": 20, **LENGTHS}
    scene = stage.play(400, waiting=lambda t: 5 + t / 5, preemptions=preemptions, **part)
    assert verdicts(scene[60:]) == {"kv_bound"}
    assert {"fp8_kv_cache", "add_replicas"} <= {*fixes(scene[-1])}
    assert {"raise_max_num_seqs", "set_watermark"} <= withheld(scene[-1])
    assert severities(scene) <= NO_PAGE


def test_a_watermark_is_not_room():
    """What --watermark keeps free at 94 % is not for those who wait."""
    waiting = {**BUSY, "kv": 0.94, "waiting": 5}
    for facts, said in (({}, "queue_not_kv"), ({"watermark": 0.05}, "kv_bound")):
        stage = Stage(cache=POOL, **facts)
        assert verdicts(stage.play(90, **waiting)[60:]) == {said}


def test_a_pool_that_is_nearly_roomy_enough_does_not_flicker():
    """Free blocks swing around the longest prompt every minute."""
    stage = Stage(cache=POOL)
    scene = stage.play(900, **BUSY | {"kv": lambda t: 0.98 + 0.003 * math.sin(t / 10), "waiting": 5})
    assert sequence(scene)[-1] == "kv_bound"
    assert len(sequence(scene)) <= 3


@pytest.mark.parametrize(
    ("kv", "more_seats"), [(0.3, True), (0.95, False)], ids=["room for more", "hardly any room"]
)
def test_a_known_seat_limit_is_named_and_raised_only_if_kv_allows(kv, more_seats):
    """All seats are taken; whether more of them help depends on what the cache would hold."""
    stage = Stage(cache=POOL, max_num_seqs=64)
    scene = stage.play(200, **BUSY | {"running": 64, "waiting": lambda t: 5 + t / 5, "kv": kv})
    assert verdicts(scene[60:]) == {"seat_bound"}
    assert ("raise_max_num_seqs" in fixes(scene[-1])) == more_seats
    assert not MEMORY & {*fixes(scene[-1])}


def test_a_plateau_of_running_proves_no_seat_limit():
    """Nobody told how many seats there are."""
    stage = Stage(cache=POOL)
    scene = stage.play(200, **BUSY | {"running": 64, "waiting": lambda t: 5 + t / 5})
    assert verdicts(scene[60:]) == {"queue_not_kv"}
    assert "raise_max_num_seqs" not in fixes(scene[-1])


def test_idle_readings_in_the_middle_of_a_queue_do_not_end_it():
    """Every seventh poll finds nothing running and nothing waiting."""
    stage = Stage(cache=POOL, max_num_seqs=16)
    gauge = lambda value: lambda t: 0 if int(t) % 7 == 3 else value  # noqa: E731
    scene = stage.play(300, **BUSY | {"running": gauge(16), "waiting": gauge(10), "kv": gauge(0.5)})
    assert verdicts(scene[60:]) == {"seat_bound"}


@pytest.mark.parametrize(
    ("budget", "said"), [(2048, "prefill_bound"), (8192, "queue_not_kv"), (None, "queue_not_kv")]
)
def test_a_queue_behind_prompts_is_prefill_bound_where_the_budget_is_known_to_be_used_up(budget, said):
    """Ten steps a second with 1,900 prompt tokens each."""
    stage = Stage(cache=POOL, **{} if budget is None else {"max_num_batched_tokens": budget})
    part = {"running": 12, "waiting": 9, "kv": 0.3, "tokens": 120, "steps": 10, "prompts": 19_000}
    scene = stage.play(120, finished=3, **part, **LENGTHS)
    assert verdicts(scene[60:]) == {said}
    assert severities(scene) <= NO_PAGE


def test_requests_behind_one_prompt_of_minutes_are_prefill_bound_without_a_known_budget():
    """No step puts out a token while KV usage grows: all of the GPU goes into that prompt."""
    stage = Stage(cache=POOL, max_num_seqs=64)
    stage.play(30, **LENGTHS)
    scene = stage.play(240, running=1, waiting=4, kv=lambda t: t / 400, **LENGTHS)
    assert verdicts(scene[60:]) == {"prefill_bound"}
    assert not MEMORY & {*fixes(scene[-1])}


def lora(slots: int, running: str, waiting: str) -> str:
    """The state of the adapters now."""
    labels = f'max_lora="{slots}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} 1.7e9"


@pytest.mark.parametrize(
    ("reasons", "said"), [({"capacity": 0, "deferred": 6}, "deferred_wait"), ({}, "queue_not_kv")]
)
def test_requests_that_wait_for_a_lora_slot_need_slots(reasons, said):
    """Both slots are taken, two other adapters wait; old versions do not tell that they are deferred."""
    stage = Stage(cache=POOL, max_num_seqs=64, spell=printing(lora(2, "a,b", "c,d")))
    scene = stage.play(120, running=3, waiting=6, kv=0.1, tokens=120, finished=0.3, **reasons, **LENGTHS)
    assert verdicts(scene[60:]) == {said}
    advice = engine_of(scene[-1]).advice.fixes[0]
    assert (advice.fix, advice.value, advice.suffices) == ("raise_max_loras", 4, None)
    assert not MEMORY & {*fixes(scene[-1])}


def test_deferred_requests_of_a_decode_pod_point_at_the_connector_and_stay_critical():
    """Three finish in five minutes while six wait for their KV."""
    fetch = 'vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="demo-7b",stage="in_progress"} 5'
    stage = Stage(cache=POOL, max_num_seqs=64, role="decode", spell=printing(fetch))
    part = {"running": 2, "waiting": 6, "capacity": 0, "deferred": 6, "kv": 0.6, "tokens": 60}
    scene = stage.play(400, finished=0.01, **part)
    assert verdicts(scene[60:]) == {"deferred_wait"}
    assert "check_kv_connector" in fixes(scene[-1])
    assert {engine_of(one).judgement.severity.value for one in scene[160:]} == {"critical"}
