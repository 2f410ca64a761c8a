"""Preemptions: storms, light ones, and those that KV did not cause; each scene has one right answer."""

import math
import random

import pytest
from support.loads import (
    BUSY,
    DEADLOCK,
    FULL,
    LENGTHS,
    LIGHT,
    MEMORY,
    NO_PAGE,
    NOT_KV,
    OLD_POOL,
    POOL,
    STORM,
    THRASH,
    by_turns,
)
from support.scenes import (
    Stage,
    engine_of,
    first,
    fixes,
    found,
    sequence,
    severities,
    verdicts,
)

from exporter.analysis.catalogue import Severity

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
    stage = Stage(cache={**POOL, "enable_prefix_caching": False})
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


def test_a_storm_that_is_over_does_not_come_back_with_the_next_request():
    """The engine was idle in between; the counts of the last minute are those of the storm."""
    stage = Stage(cache=POOL)
    stage.play(120, **BUSY)
    assert THRASH in verdicts(stage.play(60, **STORM))
    after = stage.play(8) + stage.play(120, running=1, kv=0.05, tokens=20, finished=0.1)
    assert THRASH not in verdicts(after[8:])


@pytest.mark.parametrize("kv", [0.3, 0.9])
def test_a_storm_that_comes_back_is_seen_again(kv):
    """It was idle, or quiet, for some seconds: the pool fills at once."""
    stage = Stage(cache=POOL)
    stage.play(120, **BUSY)
    stage.play(60, **STORM)
    stage.play(8) if kv < 0.5 else stage.play(40, **BUSY | {"kv": kv})
    assert first(stage.play(60, **STORM), THRASH) <= 12


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


@pytest.mark.parametrize(("seconds", "told"), [(0.09, True), (0.04, False)])
def test_a_latency_that_doubled_is_named_as_the_harm(seconds, told):
    """Beside the preemptions, with twice the calm time as its threshold; less than that is no harm."""
    stage = Stage(cache={"kv_cache_size_tokens": 100_000}, max_num_seqs=64)
    stage.play(180, running=20, kv=0.6, tokens=600, finished=1, inter_token=0.03)
    part = {"running": 20, "waiting": 8, "kv": 0.98, "tokens": 500, "finished": 1, "preemptions": 1.5}
    reading = engine_of(stage.play(90, **part, inter_token=seconds)[-1])
    assert reading.judgement.verdict == "preemption_thrash"
    assert (reading.judgement.severity is Severity.CRITICAL) is told
    named = {each.signal: each for each in reading.judgement.evidence}
    assert ("inter_token_latency_mean_seconds" in named) is told
    if told:
        assert named["inter_token_latency_mean_seconds"].threshold == pytest.approx(0.06, rel=0.1)
