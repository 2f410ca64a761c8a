"""Life cycle, impossible values and mixed sources; each scene has one right answer."""

import random

import pytest
from support.bodies import body, engine
from support.loads import BUSY, FULL, NO_PAGE, OLD_POOL, POOL, STORM, THRASH, printing
from support.scenes import (
    IDLE,
    Player,
    Stage,
    engine_of,
    fixes,
    found,
    sequence,
    severities,
    verdicts,
    withheld,
)

from exporter.analysis.conditions import Evidence


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


# vLLM-Omni shows 0 where it has no fresh number.
OMNI = {"running": 5, "waiting": 0, "kv": 0, "tokens": 500, "prompts": 0, "finished": 1}


def test_zeros_while_requests_run_and_get_tokens_are_not_trusted():
    """From a minute of it on; a prompt that is counted ends it at once."""
    stage = Stage(cache=POOL)
    scene = stage.play(90, **OMNI)
    assert verdicts(scene[:55]) == {"healthy"}
    assert verdicts(scene[62:]) == {"data_untrusted"}
    assert {each.signal for each in engine_of(scene[-1]).judgement.evidence} == {
        "kv_usage",
        "requests_running",
    }
    assert "data_untrusted" not in verdicts(stage.play(30, **OMNI | {"prompts": 900, "kv": 0.1})[1:])


@pytest.mark.parametrize(
    "part",
    [{"prompts": 900}, {"kv": 0.002}, {"tokens": 0, "finished": 0}, {"running": 0}],
    ids=["prompts", "usage", "prefill", "idle"],
)
def test_one_of_the_zeros_alone_is_trusted(part):
    """A model without attention holds no KV; a long first prompt is not counted yet."""
    assert "data_untrusted" not in verdicts(Stage(cache=POOL).play(90, **OMNI | part))


def test_an_engine_that_only_just_began_is_trusted():
    """Idle for minutes, then its first requests, whose first numbers are still on their way."""
    stage = Stage(cache=POOL)
    stage.play(120, **IDLE | {"prompts": 0})
    assert "data_untrusted" not in verdicts(stage.play(20, **OMNI))
    assert "data_untrusted" not in verdicts(stage.play(60, **OMNI | {"prompts": 900, "kv": 0.1}))
