"""KV that nobody uses, slow decoding, endless answers; each scene has one right answer."""

import random

import pytest
from support.loads import BUSY, MEMORY, NO_PAGE, POOL
from support.scenes import (
    Stage,
    first,
    fixes,
    found,
    sequence,
    severities,
    verdicts,
)

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
