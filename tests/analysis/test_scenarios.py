"""What operators meet, played second by second before the whole pipeline: each scene has one right answer.

None of these is among the recorded field cases. A test's name says what happens and what must be said.
"""

import math
import random

import pytest
from support.bodies import body, engine
from support.scenes import (
    IDLE,
    Player,
    Stage,
    engine_of,
    first,
    fixes,
    found,
    model_of,
    sequence,
    severities,
    verdicts,
    withheld,
)

from exporter.analysis.conditions import Evidence

THRASH, LIGHT, NOT_KV = "preemption_thrash", "preemption_light", "preemption_not_kv"
STALLED, DEADLOCK, UNFITTABLE = "engine_stalled", "scheduler_deadlock", "unfittable_request"
NO_PAGE = {"none", "info", "warning"}
MEMORY = {
    "raise_gpu_memory_utilization",
    "fp8_kv_cache",
    "quantize_weights",
    "raise_tensor_parallel",
    "raise_pipeline_parallel",
    "lower_max_num_seqs",
    "set_watermark",
}
# A pool of 100,000 tokens, three times the longest request.
POOL = {
    "kv_cache_size_tokens": 100_000,
    "kv_cache_max_concurrency": 3.0,
    "block_size": 16,
    "num_gpu_blocks": 6251,
    "gpu_memory_utilization": 0.9,
    "cache_dtype": "auto",
    "enable_prefix_caching": True,
}
OLD_POOL = {name: value for name, value in POOL.items() if not name.startswith("kv_cache")}
# Prompts of 900 tokens on average, at most 2,048 (p99); answers of 350.
LENGTHS = {
    "prompt_lengths": ({512: 300, 1024: 800, 2048: 990, 5000: 1000, math.inf: 1000}, 900_000),
    "output_lengths": ({200: 300, 500: 900, 1000: 1000, math.inf: 1000}, 350_000),
}
BUSY = {"running": 20, "kv": 0.5, "tokens": 800, "finished": 2, **LENGTHS}
FULL = {**BUSY, "kv": 0.97}
STORM = {
    "running": 12,
    "waiting": 10,
    "kv": 0.98,
    "tokens": 300,
    "finished": 0.4,
    "preemptions": 1.2,
    **LENGTHS,
}


def by_turns(one: float, other: float, period: float):
    """A value for the first half of each period, another for the second."""
    return lambda t: one if t % period < period / 2 else other


def printing(*lines: str):
    """A server that prints some lines more."""
    more = "".join(line + "\n" for line in lines).encode()
    return lambda text: text + more


# Preemptions that are none of KV's business.


def test_cache_resets_of_a_training_loop_are_not_a_shortage():
    """All twenty go back at KV 40 %, the counter follows, four times: no word about memory, nothing pages."""
    stage = Stage(cache=POOL, max_num_seqs=64)
    stage.play(100, **BUSY | {"kv": 0.4})
    for _ in range(4):
        stage.play(3, waiting=20)
        stage.play(1, running=20, kv=0.2, tokens=200, preemptions=20)
        reset = stage.play(56, **BUSY | {"kv": 0.4})
        assert verdicts(reset) == {NOT_KV}
        assert "mass_preemption" in found(reset)
        assert fixes(reset[0]) == ["stop_cache_resets"]
    assert sequence(stage.readings) == ["healthy", NOT_KV]
    assert severities(stage.readings) == {"none", "info"}


def test_a_reset_between_two_polls_is_seen_by_the_counter_alone():
    """No gauge shows it; twenty preemptions at KV 40 % can be nothing else."""
    stage = Stage(cache=POOL)
    stage.play(100, **BUSY | {"kv": 0.4})
    stage.play(1, running=20, kv=0.3, tokens=400, preemptions=20)
    assert verdicts(stage.play(60, **BUSY | {"kv": 0.4})) == {NOT_KV}
    assert severities(stage.readings) == {"none", "info"}


def test_a_reset_of_a_well_used_cache_is_told_by_taking_all_at_once():
    """At 85 % a shortage would take one after the other."""
    stage = Stage(cache=POOL)
    stage.play(100, **BUSY | {"kv": 0.85})
    stage.play(3, waiting=20)
    stage.play(1, running=20, kv=0.2, tokens=200, preemptions=20)
    assert verdicts(stage.play(60, **BUSY)) == {NOT_KV}
    assert severities(stage.readings) == {"none", "info"}


# Preemptions that the counter does not show.


def test_clients_that_give_up_at_a_full_cache_are_a_storm_before_the_counter_moves():
    """Half goes back, again and again, and tokens fall: inferred, and said to be."""
    stage = Stage(cache=POOL)
    stage.play(120, **FULL)
    scene = stage.play(
        120,
        running=by_turns(20, 10, 6),
        waiting=by_turns(0, 12, 6),
        kv=by_turns(0.97, 0.7, 6),
        tokens=by_turns(300, 100, 6),
        finished=0.1,
        **LENGTHS,
    )
    assert first(scene, THRASH) <= 5
    assert verdicts(scene[5:]) == {THRASH}
    assert "preemption_inferred" in found(scene)
    assert engine_of(scene[-1]).signals.preemptions_total == 0


def test_the_same_gauges_at_a_half_empty_cache_are_nothing():
    """At KV 40 % it is the clients' own business."""
    stage = Stage(cache=POOL)
    stage.play(120, **BUSY | {"kv": 0.4})
    scene = stage.play(
        120,
        running=by_turns(20, 10, 6),
        waiting=by_turns(0, 12, 6),
        kv=by_turns(0.4, 0.2, 6),
        tokens=700,
        finished=1,
        **LENGTHS,
    )
    assert verdicts(scene) == {"healthy"}
    assert not found(scene) & {"preemption_inferred", "mass_preemption"}


def test_a_slow_storm_without_a_counter_is_found_within_half_a_minute():
    """Two go back every four seconds, at a third of the tokens."""
    stage = Stage(cache=POOL)
    stage.play(120, **FULL)
    scene = stage.play(
        240,
        running=lambda t: 20 - 2 * (int(t) // 4 % 3),
        waiting=lambda t: 2 * (int(t) // 4 % 3),
        kv=lambda t: 0.99 - 0.04 * (int(t) % 3),
        tokens=250,
        finished=0.05,
        **LENGTHS,
    )
    assert first(scene, THRASH) <= 30
    assert sequence(scene)[-1] == THRASH
    assert sequence(scene).count(THRASH) == 1


def test_an_engine_without_a_preemption_counter_can_still_storm():
    """V1 of 0.7 counts none: running falls and waiting rises at a full cache."""
    stage = Stage(cache={}, absent=["preemptions"])
    stage.play(120, **BUSY)
    scene = stage.play(
        60,
        running=by_turns(12, 9, 4),
        waiting=by_turns(10, 13, 4),
        kv=by_turns(0.99, 0.85, 4),
        tokens=300,
        finished=0.5,
    )
    assert first(scene, THRASH) <= 10
    assert "preemptions_per_second" not in engine_of(scene[-1]).signals.known()


def test_a_mass_preemption_that_never_recovers_becomes_a_deadlock():
    """First a storm, then longer than its pause: critical throughout, with a probe and not with memory."""
    stage = Stage(cache=POOL, max_model_len=32_768)
    stage.play(100, **FULL)
    scene = stage.play(200, waiting=20, **LENGTHS)
    assert sequence(scene) == [THRASH, DEADLOCK]
    assert first(scene, DEADLOCK) <= 60
    assert not MEMORY & {*fixes(scene[-1])}


def test_one_mass_preemption_that_recovers_is_over_within_two_minutes():
    """The storm's name goes after the hold time, and comes no second time."""
    stage = Stage(cache=POOL, max_model_len=32_768)
    stage.play(100, **FULL)
    stage.play(15, waiting=20)
    stage.play(1, running=18, waiting=2, kv=0.5, tokens=10, preemptions=20)
    scene = stage.play(180, **FULL)
    assert sequence(stage.readings) == ["healthy", "kv_full_ok", THRASH, LIGHT, "kv_full_ok"]
    assert first(scene, LIGHT) <= 60


# Storms: how fast, how long, by which spelling.


@pytest.mark.parametrize("interval", [0.5, 1.0, 2.0, 5.0, 15.0, 30.0])
def test_a_storm_is_named_in_time_at_any_pace_of_polls(interval):
    """Within three polls or ten seconds, once, and gone within a minute of its end."""
    stage = Stage(cache=POOL, interval=interval)
    stage.play(600, **BUSY)
    storm = stage.play(300, **STORM)
    after = stage.play(300, **BUSY)
    assert first(storm, THRASH) <= max(10.0, 3 * interval)
    assert sequence(stage.readings).count(THRASH) == 1
    assert verdicts(storm[math.ceil(10 / interval) :]) == {THRASH}
    assert THRASH not in verdicts([one for one in after if one.t - after[0].t >= 60])


def test_a_storm_seen_by_irregular_polls_has_one_name():
    """One to nine seconds between polls, as a busy machine makes them."""
    chance = random.Random(3)
    stage = Stage(cache=POOL)
    for part, end in ((BUSY, 300), (STORM, 600), (BUSY, 900)):
        while stage.now < end:
            stage.interval = chance.choice([1, 1, 2, 4, 9])
            stage.play(stage.interval, **part)
    assert sequence(stage.readings) == ["healthy", LIGHT, THRASH, LIGHT, "healthy"]


def test_idle_readings_in_the_middle_of_a_storm_do_not_end_it():
    """Every seventh poll finds the engine between two steps."""
    stage = Stage(cache=POOL)
    stage.play(100, **BUSY)
    spiky = {name: (lambda t, v=STORM[name]: 0 if int(t) % 7 == 3 else v) for name in ("running", "waiting")}
    scene = stage.play(200, **STORM | spiky | {"kv": lambda t: 0 if int(t) % 7 == 3 else 0.98})
    assert verdicts(scene[10:]) == {THRASH}
    stage.play(120, **BUSY)
    assert sequence(stage.readings).count(THRASH) == 1


def test_a_storm_that_was_there_before_the_exporter_is_a_storm():
    """Nothing better was ever seen of this engine; most of its work is done twice."""
    stage = Stage(cache=POOL)
    scene = stage.play(300, **STORM | {"tokens": 40, "finished": 0})
    assert verdicts(scene[10:]) == {THRASH}


def test_batch_jobs_that_storm_every_minute_change_their_name_no_faster_than_the_hold_time():
    """Twelve bad seconds a minute: each is named, none flickers."""
    stage = Stage(cache=POOL)
    for _ in range(5):
        stage.play(12, **STORM)
        stage.play(8, **BUSY)
        stage.play(40)
    for number, name in enumerate(sequence(stage.readings)[1:]):
        assert name == (LIGHT, THRASH, "healthy")[number % 3]


def v0(text: bytes) -> bytes:
    """As the V0 engine spelt it: no engine label, other names."""
    for new, old in (
        (b'engine="0",', b""),
        (b"kv_cache_usage_perc", b"gpu_cache_usage_perc"),
        (b"inter_token_latency_seconds", b"time_per_output_token_seconds"),
    ):
        text = text.replace(new, old)
    return text


def ray(text: bytes) -> bytes:
    """As Ray's agent spells it: counters that never moved have no series, and nothing tells the start."""
    text = text.replace(b"vllm:", b"ray_vllm_").replace(b'{engine="0"', b'{engine="0",ReplicaId="xyz"')
    lines = [line for line in text.split(b"\n") if not line.startswith(b"process_")]
    return b"\n".join(line for line in lines if not (b"_total{" in line and line.endswith(b" 0.0")))


def open_metrics(text: bytes) -> bytes:
    """As the Rust front end answers: TYPE without ``_total``, and an end."""
    return text + b"# EOF\n"


@pytest.mark.parametrize(("spell", "name"), [(v0, "0"), (ray, "xyz/0"), (open_metrics, "0")])
def test_a_storm_is_one_in_every_spelling(spell, name):
    """The same scene as old, as Ray and as OpenMetrics print it."""
    stage = Stage(cache=OLD_POOL, spell=spell)
    stage.play(120, **{part: value for part, value in BUSY.items() if part not in LENGTHS})
    storm = stage.play(120, **{part: value for part, value in STORM.items() if part not in LENGTHS})
    assert verdicts(storm[10:], name) == {THRASH}
    assert engine_of(storm[-1], name).signals.preemptions_per_second == pytest.approx(1.2, rel=0.1)


def test_advice_for_a_pool_of_unknown_size_makes_up_no_number():
    """No label, no lengths: what can be done is said, how far it goes is not."""
    stage = Stage(cache={})
    stage.play(120, running=20, kv=0.5, tokens=800, finished=2)
    storm = stage.play(60, running=12, waiting=10, kv=0.98, tokens=300, finished=0.4, preemptions=1.2)
    advised = engine_of(storm[-1]).advice.fixes
    assert {"set_watermark", "fp8_kv_cache"} <= {advice.fix for advice in advised}
    for advice in advised:
        assert advice.value in (None, 0.05), advice  # the watermark is a rule of thumb, not a computation
        assert advice.suffices is None
        assert advice.gain in (None, 2.0)


# Preemptions that do no harm.


@pytest.mark.parametrize(
    ("preemptions", "finished"),
    [(0.15, 2), (0.5, 1), (lambda t: 3 if int(t) % 60 == 0 else 0, 2)],
    ids=["one in thirteen", "one in two", "six at once each minute"],
)
def test_light_preemption_for_an_hour_never_pages(preemptions, finished):
    """Work gets done all the time."""
    stage = Stage(cache=POOL, interval=2.0)
    kv = lambda t: 0.93 + 0.01 * (int(t) % 7)  # noqa: E731
    stage.play(3600, running=30, kv=kv, tokens=900, finished=finished, preemptions=preemptions, **LENGTHS)
    assert severities(stage.readings) <= {"none", "info"}
    assert sequence(stage.readings)[-1] == LIGHT
    assert sequence(stage.readings).count(LIGHT) == 1


@pytest.mark.parametrize(
    ("running", "tokens", "finished", "preemptions"),
    [(8, 200, 0.002, 0.01), (20, 600, 0.007, 0.016), (100, 3000, 0.1, 0.3), (300, 9000, 0.3, 1.0)],
)
def test_answers_of_32k_tokens_are_light_at_any_scale(running, tokens, finished, preemptions):
    """More preemptions than finished requests, because answers take a quarter of an hour; tokens flow."""
    stage = Stage(cache=POOL, interval=2.0)
    stage.play(300, running=running, kv=0.85, tokens=tokens, finished=finished)
    kv = lambda t: 0.93 + 0.01 * (int(t) % 7)  # noqa: E731
    part = {"running": running - 1, "waiting": 1, "kv": kv, "tokens": 0.97 * tokens, "finished": finished}
    scene = stage.play(2400, preemptions=preemptions, **part)
    assert severities(stage.readings) <= NO_PAGE
    assert sequence(scene)[-1] == LIGHT
    assert verdicts(scene[300:]) == {LIGHT}


def test_answers_of_32k_tokens_seen_only_under_pressure_page_for_no_longer_than_it_takes_to_see():
    """The exporter starts in the middle: what is done twice is less than half, and some requests finish."""
    stage = Stage(cache=POOL)
    kv = lambda t: 0.93 + 0.01 * (int(t) % 7)  # noqa: E731
    scene = stage.play(900, running=300, waiting=2, kv=kv, tokens=9000, finished=0.3, preemptions=1.0)
    assert verdicts(scene[60:]) == {LIGHT}


def test_fewer_users_with_longer_contexts_are_not_starved():
    """Two of twenty are left and put out a tenth; a preemption now and then is no collapse."""
    stage = Stage(cache=POOL)
    stage.play(300, running=20, kv=0.6, tokens=600, finished=1)
    scene = stage.play(600, running=2, kv=0.97, tokens=60, finished=0.004, preemptions=0.02)
    assert severities(scene) <= {"none", "info"}


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
    assert (advice.fix, advice.value, advice.suffices) == ("raise_max_loras", 4, True)
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


@pytest.mark.parametrize(
    ("printed", "said"), [("97.0", "is 97.0, expected 0 to 1"), ("NaN", "is nan, expected 0 to 1")]
)
def test_a_value_that_cannot_be_is_quoted_and_no_zero(printed, said):
    """What the server printed, beside what was expected."""
    stage = Stage(cache=POOL)
    stage.play(30, **BUSY)
    good = body(engine(running=5, waiting=0, kv=0.25))
    reading = stage.take(good.replace(b"0.25", printed.encode()))
    assert verdicts([reading]) == {"data_untrusted"}
    assert engine_of(reading).judgement.evidence == (Evidence("kv_usage", None, note=said),)


# KV that nobody uses.


@pytest.mark.parametrize("kv", [0.35, 0.97])
def test_kv_held_with_nothing_to_do_is_a_leak_after_a_minute(kv):
    """Whatever the level, it is not demand."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY | {"kv": kv})
    scene = stage.play(300, kv=kv)
    assert first(scene, "kv_held_no_requests") <= 65
    assert sequence(scene)[-1] == "kv_held_no_requests"
    assert not MEMORY & {*fixes(scene[-1])}
    assert severities(scene) <= NO_PAGE


@pytest.mark.parametrize("lease", [30, 480])
def test_kv_held_within_its_lease_is_on_purpose(lease):
    """A prefill pod whose decode side fetches in time."""
    stage = Stage(cache=POOL, role="prefill", kv_lease_seconds=lease)
    stage.play(60, running=5, kv=0.3, tokens=20, prompts=4000, finished=5)
    stage.play(lease, kv=0.5)
    stage.play(60)
    assert verdicts(stage.readings) == {"healthy"}
    assert not found(stage.readings)


def test_kv_held_beyond_a_long_lease_is_seen_although_it_outlasts_the_history():
    """Eight minutes of lease and a minute more."""
    stage = Stage(cache=POOL, role="prefill", kv_lease_seconds=900, interval=5.0)
    stage.play(60, running=5, kv=0.3, tokens=20, prompts=4000, finished=5)
    scene = stage.play(1200, kv=0.5)
    assert 900 < first(scene, "kv_held_no_requests") <= 970
    assert "check_kv_connector" in fixes(scene[-1])


def test_a_little_kv_left_over_is_not_worth_a_word():
    """Five per cent through the night."""
    stage = Stage(cache=POOL, interval=5.0)
    stage.play(3600, kv=0.05)
    assert verdicts(stage.readings) == {"healthy"}


# Life cycle.


def sleeping(stage: Stage, awake: int, weights: int, discard: int) -> None:
    """Make the server print a sleep state from now on."""
    states = {"awake": awake, "weights_offloaded": weights, "discard_all": discard}
    stage._spell = printing(
        *(
            f'vllm:engine_sleep_state{{engine="0",model_name="demo-7b",sleep_state="{name}"}} {value}'
            for name, value in states.items()
        )
    )


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_is_no_standstill_and_neither_is_waking_up(level):
    """Gauges frozen with five running, ten minutes of it, and half a minute until the first token."""
    stage = Stage(cache=POOL)
    sleeping(stage, 1, 0, 0)
    stage.play(60, **BUSY)
    sleeping(stage, 0, int(level == 1), int(level == 2))
    asleep = stage.play(600, running=5, kv=0.5)
    sleeping(stage, 1, 0, 0)
    stage.play(30, running=5, kv=0.5)
    stage.play(60, **BUSY)
    assert sequence(stage.readings) == ["healthy", "sleeping", "healthy"]
    assert found(asleep) == set()
    assert severities(stage.readings) == {"none"}


def test_a_rolling_restart_at_idle_is_a_restart_and_no_more():
    """Drained before it went: no suspicion, and no fix is held back."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    stage.play(30)
    stage.fail(60)
    stage.restart()
    scene = stage.play(60, **BUSY)
    assert verdicts(scene) == {"healthy"}
    assert found(scene) == {"restarted"}
    assert stage.readings[-1].restarts == 1


@pytest.mark.parametrize(("used", "suspect"), [(0.92, False), (0.96, True), (None, False)])
def test_a_crash_under_load_is_suspected_of_memory_only_where_little_was_left(used, suspect):
    """And more utilization is advised after none of them, even when a storm follows."""
    pool = {name: value for name, value in POOL.items() if name != "gpu_memory_utilization"}
    stage = Stage(cache=pool, **{} if used is None else {"gpu_memory_utilization": used})
    stage.play(100, **BUSY | {"kv": 0.72})
    stage.fail(60)
    stage.restart()
    back = stage.play(30, **BUSY)
    assert ("suspect_out_of_memory" in found(back)) == suspect
    assert ("lower_gpu_memory_utilization" in fixes(back[-1])) == suspect
    storm = stage.play(60, **STORM)
    assert verdicts(storm[10:]) == {THRASH}
    assert ("lower_gpu_memory_utilization" in fixes(storm[-1])) == suspect
    assert "raise_gpu_memory_utilization" in withheld(storm[-1])
    assert not any("raise_gpu_memory_utilization" in fixes(one) for one in stage.play(120, **STORM))


def test_a_crash_loop_is_unreachable_again_and_again_and_never_a_storm():
    """Five seconds of life in twenty: each outage is said, each restart is counted."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    for _ in range(10):
        down = stage.fail(15)
        assert verdicts(down[-5:]) == {"unreachable"}
        stage.restart()
        up = stage.play(5, running=2, kv=0.1, tokens=10)
        assert verdicts(up) == {"healthy"}
        assert "restarted" in found(up)
    assert stage.readings[-1].restarts == 10
    assert verdicts(stage.readings) == {"healthy", "unreachable"}


def test_a_server_that_says_503_while_it_loads_is_starting():
    """Within the grace, then healthy, then no second grace."""
    stage = Stage(cache=POOL)
    assert {one.judgement.verdict for one in [*stage.fail(20), *stage.fail(60, "http_503")]} == {"starting"}
    assert verdicts(stage.play(60)) == {"healthy"}
    assert stage.fail(30, "http_503")[-1].judgement.verdict == "unreachable"


def test_a_wrong_path_is_unreachable_after_the_grace_with_the_endpoint_to_check():
    """404 for ever."""
    stage = Stage(startup_grace_seconds=60)
    scene = stage.fail(120, "http_404")
    assert scene[30].judgement.verdict == "starting"
    assert scene[-1].judgement.verdict == "unreachable"
    assert "check_endpoint" in scene[-1].judgement.fixes


def test_a_web_page_in_place_of_metrics_is_missing_metrics_for_target_and_engine():
    """A proxy took over: the server answers, so it is not unreachable, and nothing pages."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    scene = [stage.take(b"<html><body>welcome</body></html>") for _ in range(60)]
    assert {one.judgement.verdict for one in scene} == {"metrics_missing"}
    assert sequence(scene) == ["healthy", "metrics_missing"]
    assert engine_of(scene[-1]).signals.requests_running is None
    assert severities(scene) <= NO_PAGE


def test_a_poll_now_and_then_is_enough():
    """Three of four time out: the last reading holds for three polls."""
    stage = Stage(cache=POOL)
    for _ in range(60):
        stage.play(1, **BUSY)
        stage.fail(3, "timeout")
    assert verdicts(stage.readings) == {"healthy"}


# Who answers.


@pytest.mark.parametrize("told", [True, False], ids=["start times", "no start times"])
@pytest.mark.parametrize("order", ["by turns", "at random"])
def test_two_pods_behind_one_service_are_untrusted_within_ten_seconds(told, order):
    """No rates, no restart that was none, no word about memory, and the pod is to be polled."""
    chance = random.Random(2)
    stage = Stage(cache=POOL | {"gpu_memory_utilization": 0.96})
    pods = [Player("0", "demo-7b", stage.players["0"].cache, ()) for _ in range(2)]
    pods[1].counted |= {"tokens": 500_000, "prompts": 900_000, "finished": 4000, "steps": 70_000}
    parts = [BUSY | {"kv": 0.6}, FULL | {"running": 40, "tokens": 1600}]
    for second in range(60):
        shown = [pod.step(second, 1.0, IDLE | part) for pod, part in zip(pods, parts, strict=True)]
        which = second % 2 if order == "by turns" else chance.randrange(2)
        stage.take(body(shown[which], start_time=1e9 + 50 * which if told else None))
    late = stage.readings[10:]
    assert verdicts(late) == {"data_untrusted"}
    assert fixes(late[-1])[0] == "scrape_pod_not_service"
    assert not found(late)
    assert not [name for name in engine_of(late[-1]).signals.known() if "_per_" in name]
    assert severities(stage.readings) <= NO_PAGE


def test_two_sources_that_share_a_start_time_are_two_sources():
    """A proxy prints its own start time in front of two engines."""
    stage = Stage(cache=POOL)
    pods = [Player("0", "demo-7b", POOL, ()) for _ in range(2)]
    pods[1].counted |= {"tokens": 500_000, "prompts": 900_000, "finished": 4000, "steps": 70_000}
    for second in range(30):
        shown = [pod.step(second, 1.0, IDLE | BUSY) for pod in pods]
        stage.take(body(shown[second % 2], start_time=1e9))
    assert verdicts(stage.readings[10:]) == {"data_untrusted"}
    assert engine_of(stage.readings[-1]).signals.preemptions_total == 0


def test_gauges_of_several_processes_are_one_gauge():
    """0.9 and 0.10 print the usage per process: the one that moves is right."""

    def twice(text: bytes) -> bytes:
        usage = next(line for line in text.split(b"\n") if line.startswith(b"vllm:kv_cache_usage_perc{"))
        both = usage.replace(b"}", b',pid="11"}') + b"\n" + usage.split(b"}")[0] + b',pid="12"} 0.0'
        return text.replace(usage, both)

    stage = Stage(cache=OLD_POOL, spell=twice)
    scene = stage.play(60, **BUSY | {"kv": lambda t: 0.5 + 0.01 * (t % 3)})
    assert "duplicate_series" in found(scene)
    assert engine_of(scene[-1]).signals.kv_usage_ratio == pytest.approx(0.52)
    assert verdicts(scene) == {"healthy"}


# Several engines.


def test_an_engine_that_is_scaled_in_is_missing_and_its_sister_is_not_touched():
    """The server answers without it: no values, a finding of the target, no page."""
    stage = Stage(cache=POOL, engines=("0", "1"))
    stage.play(60, {"0": BUSY, "1": BUSY})
    scene = stage.play(60, {"0": BUSY})
    assert verdicts(scene) == {"healthy"}
    assert scene[-1].judgement.findings == ("engine_missing",)
    assert engine_of(scene[-1], "1").signals.requests_running is None
    assert severities(scene) <= NO_PAGE


def test_an_imbalance_of_memory_with_equal_requests_is_one():
    """Ten requests each, but all the long contexts sit on one engine."""
    stage = Stage(cache=POOL, engines=("0", "1"))
    scene = stage.play(90, {"0": FULL, "1": BUSY | {"kv": 0.1}})
    assert model_of(scene[-1]).findings == ("dp_imbalance",)
    assert fixes(scene[-1], "0")[0] == "balance_routing"


@pytest.mark.parametrize(
    ("most", "others", "unbalanced"), [(20, 2, True), (3, 2, False), (7, 0, False), (30, 28, False)]
)
def test_one_engine_of_eight_is_unbalanced_only_with_enough_requests_to_share(most, others, unbalanced):
    """And a little more than the others have is no imbalance."""
    stage = Stage(cache=POOL, engines=[str(number) for number in range(8)])
    part = {name: BUSY | {"running": most if name == "3" else others, "kv": 0.3} for name in stage.players}
    scene = stage.play(90, part)
    assert (model_of(scene[-1]).findings == ("dp_imbalance",)) == unbalanced


# Decode.


def test_decode_that_is_twice_as_slow_at_the_same_load_is_slow():
    """And it is no matter of memory."""
    stage = Stage(cache=POOL)
    stage.play(700, **BUSY, inter_token=0.03)
    scene = stage.play(300, **BUSY | {"tokens": 400, "finished": 1}, inter_token=0.06)
    assert 60 <= first(scene, "decode_slow") <= 150
    assert sequence(scene)[-1] == "decode_slow"
    assert not MEMORY & {*fixes(scene[-1])}


@pytest.mark.parametrize(
    "part",
    [
        {"running": 40, "kv": 0.8, "inter_token": 0.06},
        {"kv": 0.8, "inter_token": 0.06},
        {"prompts": 8000, "inter_token": 0.06},
        {"inter_token": 0.04},
    ],
    ids=["more running", "longer contexts", "more prefill", "a little slower"],
)
def test_decode_that_is_slower_for_a_reason_is_not_slow(part):
    """Each step has more to do."""
    stage = Stage(cache=POOL)
    stage.play(700, **BUSY, inter_token=0.03)
    assert verdicts(stage.play(400, **BUSY | part)) == {"healthy"}


def test_slow_decode_under_a_changing_load_does_not_flicker():
    """Each slice of the past is compared with others of its own load."""
    chance = random.Random(1)
    stage = Stage(cache=POOL)
    for number in range(80):
        running = chance.randint(4, 16)
        step = (0.03 + 0.001 * running) * (2 if number >= 60 else 1)
        stage.play(
            20, running=running, kv=0.03 * running, tokens=running / step, finished=1, inter_token=step
        )
    assert sequence(stage.readings) == ["healthy", "decode_slow"]


def test_a_generation_that_never_ends_is_for_information():
    """One answer of 60 tokens a second for twenty minutes, alone."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    scene = stage.play(1200, running=1, kv=lambda t: 0.02 + t / 4000, tokens=60)
    assert sequence(scene) == ["healthy", "runaway_generation"]
    assert {"check_client_limits", "abort_request"} <= {*fixes(scene[-1])}
    assert not MEMORY & {*fixes(scene[-1])}
    assert severities(scene) == {"none", "info"}


# Facts of the configuration that change the advice of one and the same storm.


@pytest.mark.parametrize(
    ("facts", "pool", "named", "not_named"),
    [
        ({"kv_cache_dtype": "fp8"}, {}, "set_watermark", "fp8_kv_cache"),
        ({}, {"cache_dtype": "fp8_e4m3"}, "set_watermark", "fp8_kv_cache"),
        ({"gpu_memory_utilization": 0.95}, {}, "fp8_kv_cache", "raise_gpu_memory_utilization"),
        ({}, {"kv_cache_memory_bytes": 1 << 34}, "fp8_kv_cache", "raise_gpu_memory_utilization"),
        ({}, {"num_gpu_blocks_override": 6251}, "fp8_kv_cache", "raise_gpu_memory_utilization"),
        ({}, {"enable_prefix_caching": False}, "enable_prefix_caching", "lower_max_num_batched_tokens"),
        ({}, {}, "set_watermark", "enable_prefix_caching"),
        ({"watermark": 0.05}, {}, "fp8_kv_cache", "set_watermark"),
        ({"vllm_version": "0.23.0"}, {}, "fp8_kv_cache", "set_watermark"),
        ({"scheduler_reserve_full_isl": False}, {}, "reserve_full_prompt", "drop_full_prompt_reservation"),
        ({}, {}, "fp8_kv_cache", "reserve_full_prompt"),
        ({"num_speculative_tokens": 4}, {}, "disable_speculation", "restart_engine"),
        ({}, {}, "fp8_kv_cache", "disable_speculation"),
    ],
)
def test_advice_knows_the_configuration(facts, pool, named, not_named):
    """What is done already, overridden or too new is not advised; what is switched off is."""
    stage = Stage(cache=POOL | pool, **facts)
    stage.play(60, **BUSY)
    storm = stage.play(60, **STORM)
    assert named in fixes(storm[-1])
    assert not_named not in fixes(storm[-1])


def test_an_old_counter_that_does_not_move_means_nothing():
    """4,812 preemptions long ago, and an engine at work."""
    stage = Stage(cache=POOL)
    stage.players["0"].counted["preemptions"] = 4812.0
    assert verdicts(stage.play(120, **BUSY)) == {"healthy"}
    assert engine_of(stage.readings[-1]).signals.preemptions_total == 0


def test_a_usage_out_of_range_is_neither_clamped_nor_used():
    """97 in place of 0.97."""
    stage = Stage()
    reading = stage.take(body(engine(running=3, waiting=0, kv=97.0)))
    assert verdicts([reading]) == {"data_untrusted"}
    assert engine_of(reading).signals.kv_usage_ratio is None
