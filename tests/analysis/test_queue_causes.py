"""What a queue waits for, slow engines, and queues of which nothing finishes: both sides of each rule."""

import pytest
from support.scenes import Stage, engine_of, fixes, found, verdicts

POOL = {"kv_cache_size_tokens": 100_000}
BUSY = {"running": 8, "kv": 0.3, "tokens": 240, "prompts": 100, "steps": 30, "finished": 1}
QUEUE = BUSY | {"waiting": 6, "deferred": 0}


def last(stage: Stage) -> str:
    """The verdict after the last poll."""
    return engine_of(stage.readings[-1]).judgement.verdict


@pytest.mark.parametrize(("running", "verdict"), [(16, "seat_bound"), (15, "kv_bound"), (9, "kv_bound")])
def test_all_seats_means_all_seats(running, verdict):
    """One seat free, capacity lacking, steps nearly empty: the blocks are short."""
    stage = Stage(cache=POOL, max_num_seqs=16, max_num_batched_tokens=2048)
    stage.play(60, **BUSY)
    stage.play(60, **QUEUE | {"running": running})
    assert last(stage) == verdict


def test_full_steps_are_no_shortage_of_blocks():
    """The budget of a step is used up."""
    stage = Stage(cache=POOL, max_num_seqs=64, max_num_batched_tokens=2048)
    stage.play(60, **BUSY)
    stage.play(60, **QUEUE | {"prompts": 60_000})
    assert last(stage) == "prefill_bound"


@pytest.mark.parametrize(("factor", "severity"), [(4, "warning"), (30, "critical")])
def test_a_slow_engine_is_named_before_its_queue(factor, severity):
    """Steps take many times longer at the same load."""
    stage = Stage(cache=POOL, max_num_seqs=8)
    stage.play(120, **BUSY, inter_token=1 / 30)
    slow = {"tokens": 240 / factor, "steps": 30 / factor, "finished": 0.1, "prompts": 10}
    scene = stage.play(90, **QUEUE | slow, inter_token=factor / 30)
    assert verdicts(scene[40:]) == {"decode_slow"}
    assert {engine_of(one).judgement.severity.value for one in scene[60:]} == {severity}


def test_a_long_prompt_is_no_slow_engine():
    """KV grows by more than was counted: a prompt takes the steps."""
    stage = Stage(cache=POOL, max_num_seqs=64)
    stage.play(120, **BUSY, inter_token=1 / 30)
    part = BUSY | {"tokens": 8, "steps": 1, "finished": 0, "prompts": 0, "kv": lambda t: 0.3 + t / 200}
    scene = stage.play(90, **part, inter_token=1.0)
    assert not verdicts(scene) & {"decode_slow", "preemption_thrash"}


@pytest.mark.parametrize(("finished", "severity"), [(0, "critical"), (0.02, "warning")])
def test_a_queue_of_which_nothing_finishes_is_critical_after_ten_minutes(finished, severity):
    """And the one request that runs can be aborted; as long as some finish it stays a warning."""
    stage = Stage(cache=POOL, max_num_seqs=16, max_num_batched_tokens=2048, interval=2.0)
    stage.play(60, **BUSY)
    part = QUEUE | {"running": 1, "kv": 0.97, "tokens": 20, "steps": 20, "prompts": 0}
    scene = stage.play(700, **part | {"finished": finished})
    assert last(stage) == "kv_bound"
    assert {engine_of(one).judgement.severity.value for one in scene[-5:]} == {severity}
    assert ("abort_request" in fixes(stage.readings[-1])) == (severity == "critical")


def test_clients_that_give_up_are_a_finding_and_no_preemption():
    """Running falls and waiting rises again and again, and the counter stands still."""
    stage = Stage(cache=POOL, max_num_seqs=64)
    stage.play(60, **BUSY)
    swing = {"running": lambda t: 20 - (t % 20), "waiting": lambda t: 4 + (t % 20), "kv": 0.5, "finished": 0}
    scene = stage.play(120, **BUSY | swing)
    assert "clients_give_up" in found(scene[-10:])
    assert "preemption_thrash" not in verdicts(scene)


def test_a_queue_of_seats_has_no_clients_that_give_up():
    """The other side: no request goes back."""
    stage = Stage(cache=POOL, max_num_seqs=8)
    assert "clients_give_up" not in found(stage.play(120, **QUEUE))


@pytest.mark.parametrize(("tokens", "expected"), [(0, True), (30, False)])
def test_a_request_that_evicts_itself_is_unfittable(tokens, expected):
    """Usage falls again and again from nearly full, and no token comes; with tokens it is none."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    part = {"running": 1, "waiting": 3, "kv": lambda t: 0.2 + (t % 40) / 50, "tokens": tokens, "prompts": 0}
    assert ("unfittable_request" in verdicts(stage.play(240, **part))) == expected


def test_gauges_that_come_seldom_hold_for_one_and_a_half_of_their_periods():
    """Ray: healthy while they come, missing once they do not; a replica that stands still is left out."""
    stage = Stage(cache=POOL)
    seldom = {
        "running": lambda t: 8 if t % 10 == 0 else None,
        "waiting": lambda t: 0 if t % 10 == 0 else None,
        "kv": lambda t: 0.3 if t % 10 == 0 else None,
    }
    assert verdicts(stage.play(120, **BUSY | seldom)[1:]) == {"healthy"}
    gone = {"running": None, "waiting": None, "kv": None}
    assert engine_of(stage.play(60, **BUSY | gone)[-1]).judgement.verdict == "metrics_missing"
    scene = stage.play(60, **gone | {"tokens": 0, "finished": 0, "steps": 0, "prompts": 0})
    assert scene[-1].engines == {}


def works(share, running=8):
    """An engine whose steps take 10 ms and the time of their prompts, a share of all at 200 tokens."""

    def prompts(t):
        return 100 if int(t) % 8 < 4 else 300

    def seconds(t):
        return 0.01 + prompts(t) / 200 * 0.01 * share / (1 - share)

    return {
        "running": running,
        "steps": lambda t: 1 / seconds(t),
        "tokens": lambda t: running / seconds(t),
        "prompts": lambda t: prompts(t) / seconds(t),
        "inter_token": seconds,
        "finished": 1,
    }


GROWS = lambda t: 5 + t  # noqa: E731
STAYS = 5


@pytest.mark.parametrize(
    ("share", "waiting", "seats", "verdict"),
    [
        (0.75, GROWS, None, "prefill_bound"),  # four times as many requests would do a quarter more
        (0.35, GROWS, None, "kv_bound"),  # they would do twice as much
        (0.35, GROWS, 10, "prefill_bound"),  # but only two more have a seat
        (0.6, STAYS, None, "kv_bound"),  # clients that wait for answers: no speed shortens their queue
        (0.6, GROWS, None, "prefill_bound"),
    ],
)
def test_prompts_that_take_the_steps_outweigh_a_full_pool(share, waiting, seats, verdict):
    """What counts is what more of each would give."""
    stage = Stage(cache=POOL, **{} if seats is None else {"max_num_seqs": seats})
    stage.play(80, **works(share) | {"kv": 0.3})
    stage.play(90, **works(share) | {"kv": 0.98, "waiting": waiting})
    assert last(stage) == verdict


@pytest.mark.parametrize(("kv", "verdict"), [(0.3, "seat_bound"), (0.9, "prefill_bound")])
def test_more_seats_help_as_far_as_the_pool_has_room(kv, verdict):
    """Prompts take 40 % of the steps."""
    stage = Stage(cache=POOL, max_num_seqs=8)
    stage.play(80, **works(0.4, running=4) | {"kv": 0.3})
    stage.play(90, **works(0.4) | {"kv": kv, "waiting": GROWS})
    assert last(stage) == verdict


@pytest.mark.parametrize(("share", "expected"), [(0.3, True), (0.75, False)])
def test_a_storm_of_an_engine_that_computes_prompts_all_the_time_is_none(share, expected):
    """Without the preemptions it would do hardly more."""
    stage = Stage(cache=POOL)
    stage.play(80, **works(share) | {"kv": 0.3})
    scene = stage.play(90, **works(share) | {"kv": 0.98, "waiting": GROWS, "preemptions": 1.2})
    assert ("preemption_thrash" in verdicts(scene)) == expected


@pytest.mark.parametrize(("deferred", "expected"), [(0.5, False), (4, True)])
def test_a_connector_that_loads_quickly_is_no_trouble(deferred, expected):
    """Eight requests run; the loads take a sixteenth of their time, or half of it."""
    stage = Stage(cache=POOL, max_num_seqs=64)
    stage.play(60, **BUSY)
    blinks = {"waiting": deferred, "deferred": deferred, "capacity": 0}
    assert ("deferred_wait" in verdicts(stage.play(90, **BUSY | blinks))) == expected


@pytest.mark.parametrize(("deferred", "expected"), [(0, True), (20, False)])
def test_requests_that_load_hold_the_blocks_for_which_others_are_preempted(deferred, expected):
    """More requests wait for the connector than run: the storm ends with their loads."""
    stage = Stage(cache=POOL, max_num_seqs=64)
    stage.play(60, **BUSY)
    storm = QUEUE | {"waiting": 60, "deferred": deferred, "kv": 0.98, "preemptions": 2, "finished": 0.5}
    assert ("preemption_thrash" in verdicts(stage.play(90, **storm))) == expected


@pytest.mark.parametrize(("preemptions", "verdict"), [(0.3, "kv_bound"), (0.0, "queue_not_kv")])
def test_a_pool_that_preempts_is_short_whatever_its_mean_usage(preemptions, verdict):
    """A long queue, and usage swings: room on average, none where it is needed."""
    stage = Stage(cache=POOL)
    stage.play(60, **BUSY)
    swing = {"kv": lambda t: 0.99 if int(t) % 6 == 0 else 0.6, "preemptions": preemptions}
    stage.play(90, **QUEUE | swing)
    assert last(stage) == verdict
