"""From bodies and errors to readings of a target: what is up, known, too old, missing and forgotten."""

import gzip
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import body, cut, engine
from support.real_recordings import (
    EXHAUSTION,
    EXPOSITIONS,
    RECORDINGS,
    RESTART,
    TWO_API_SERVERS,
    TWO_ENGINES,
    at,
    exposition,
    header,
    idle,
    only,
    pipeline,
    polls,
    replayed,
    value,
)

from exporter.analysis.pipeline import FORGET_SECONDS, MAX_REMEMBERED, UNREADABLE, Pipeline, TargetReading
from exporter.analysis.signals import Signals
from exporter.config import AnalysisConfig


def fresh(interval: float = 1.0, **facts: object) -> Pipeline:
    """A pipeline that has seen nothing."""
    return Pipeline(AnalysisConfig(), facts, interval)


def fed(*taken: tuple[float, bytes | str], interval: float = 1.0) -> TargetReading:
    """The reading after these polls: bodies, or words for why there is none."""
    one = fresh(interval)
    for t, outcome in taken:
        reading = one.feed(t, outcome) if isinstance(outcome, bytes) else one.feed(t, None, outcome)
    return reading


def named(reading: TargetReading) -> dict[str, Signals]:
    """The signals by the engine's name."""
    return {key.name: one.signals for key, one in reading.engines.items()}


# Recordings.


def test_the_exhaustion_from_beginning_to_end():
    """Every poll is good, 531 preemptions are counted, 219 requests finish, the cache is full at times."""
    readings = replayed(EXHAUSTION)
    assert all(reading.up and reading.error is None and not reading.unreadable for reading in readings)
    last = only(readings[-1])
    assert (last.signals.preemptions_total, last.signals.requests_finished_total) == (531, 219)
    assert max(only(reading).signals.kv_usage_ratio for reading in readings) == 1.0
    assert sum(last.kv_polls) == len(readings) == 297
    assert last.kv_polls[-2] == sum(
        0.99 < value(poll.body, "kv_cache_usage_perc") <= 1 for poll in polls(EXHAUSTION)
    )
    assert (last.restarts, last.missing, dict(last.untrusted), last.duplicates) == (0, False, {}, frozenset())
    assert last.version[:2] == (0, 26)


def test_before_the_first_start_nothing_is_known():
    """Thirty refused connections: the target is down, and no engine is made up."""
    reading = at(replayed(RESTART), 29)
    assert (reading.up, reading.error, reading.good_at) == (False, "connection_refused", None)
    assert not reading.engines


def test_a_killed_server_keeps_its_values_for_max_age_and_its_own_counters_for_ever():
    """The last good poll was at 65.009 s; five seconds later all that was measured is unknown."""
    readings = replayed(RESTART)
    last = only(at(readings, 65.1))
    assert last.signals.preemptions_total == 192
    for t in (66.2, 68, 70):
        reading = at(readings, t)
        assert (reading.up, only(reading).signals) == (False, last.signals)
        assert reading.good_at == pytest.approx(65.009, abs=1e-3)
    for t in (71, 90, 105):
        reading = at(readings, t)
        assert (reading.up, reading.error) == (False, "connection_refused")
        assert only(reading).signals.known() == {"preemptions_total": 192, "requests_finished_total": 74}
        assert not only(reading).missing


def test_a_restart_is_counted_once_and_own_counters_go_on():
    """192 before the kill and 144 after it; the new process's first poll has no rate yet."""
    readings = replayed(RESTART)
    first = only(at(readings, 106))
    assert first.restarts == 1
    assert first.signals.preemptions_total == 192
    assert first.signals.preemptions_per_second is None
    assert first.signals.requests_running == 24
    second = only(at(readings, 107.1))
    assert second.signals.preemptions_per_second == 0
    last = only(readings[-1])
    assert (last.restarts, last.signals.preemptions_total) == (1, 192 + 144)
    assert last.signals.requests_finished_total == 74 + 62
    assert sum(last.kv_polls) == sum(poll.body is not None for poll in polls(RESTART)) == 72


def test_two_engines_are_counted_apart():
    """95 and 113 preemptions since first sight, in the order of their names."""
    last = named(replayed(TWO_ENGINES)[-1])
    assert list(last) == ["0", "1"]
    assert [one.preemptions_total for one in last.values()] == [95, 113]


def test_gauges_that_appear_with_the_first_request_are_unknown_before_it():
    """Several API servers print no gauge and no start time until then; their counters stand at zero."""
    readings = replayed(TWO_API_SERVERS)
    assert not re.search(rb"process_start_time|_created", polls(TWO_API_SERVERS)[0].body)
    before = only(at(readings, 3.1)).signals.known()
    assert before["preemptions_total"] == 0
    assert {"requests_running", "requests_waiting", "kv_usage_ratio", "kv_usage_max_ratio"}.isdisjoint(before)
    after = only(at(readings, 4.7)).signals
    assert (after.requests_running, after.requests_waiting) == (8, 16)
    last = only(readings[-1])
    assert (last.signals.preemptions_total, last.restarts) == (213, 0)
    assert sum(last.kv_polls) == sum(
        value(poll.body, "kv_cache_usage_perc") is not None for poll in polls(TWO_API_SERVERS)
    )


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
def test_a_server_that_keeps_no_statistics_is_up_and_has_no_engine(version):
    """Its answer has not one of vLLM's series."""
    reading = fed((0, idle(version, "stats-disabled")))
    assert (reading.up, reading.error, dict(reading.engines)) == (True, None, {})


@pytest.mark.parametrize("version", ["0.26.0", "0.28.0", "0.30.0", "0.32.0"])
def test_an_idle_server_is_known_to_be_idle(version):
    """Zeros that are told are zeros; what is a matter of two polls is unknown at the first."""
    reading = fed((0, idle(version)))
    known = only(reading).signals.known()
    assert {name: known[name] for name in ("kv_usage_ratio", "requests_running", "requests_waiting")} == {
        "kv_usage_ratio": 0,
        "requests_running": 0,
        "requests_waiting": 0,
    }
    assert known["kv_capacity_tokens"] > 0
    assert "preemptions_per_second" not in known
    assert "queue_time_mean_seconds" not in known


def test_every_release_has_its_gauges_and_counters():
    """From 0.10.2 on: the values that its metric code prints with all series at zero are known, and zero."""
    zero = (
        "preemptions_total",
        "preemptions_per_second",
        "requests_running",
        "requests_waiting",
        "kv_usage_ratio",
        "requests_finished_per_second",
        "generation_tokens_per_second",
        "prompt_tokens_per_second",
        "engine_steps_per_second",
    )
    expected = {**dict.fromkeys(zero, 0), "progress_idle_seconds": 1}
    wrong = {}
    for path in EXPOSITIONS:
        text = exposition(path)
        known = only(fed((0, text), (1, text))).signals.known()
        wrong[path.name] = {name: known.get(name) for name in expected if known.get(name) != expected[name]}
    assert {name: values for name, values in wrong.items() if values} == {}


# Errors, age.


def test_a_failed_poll_says_why():
    """The word is passed on; without one it is unknown why."""
    assert fed((0, "timeout")).error == "timeout"
    assert fresh().feed(0, None).error == "unknown"


@pytest.mark.parametrize("text", [b"<html><body>404</body></html>", b'{"detail": "no"}', b"\x00\x01\x02"])
def test_a_body_that_is_no_metrics_text_is_a_failed_poll(text):
    """A proxy's page must not look like a server without engines."""
    reading = fed((0, body(engine(running=3))), (1, text))
    assert (reading.up, reading.error, reading.good_at) == (False, UNREADABLE, 0)
    assert only(reading).signals.requests_running == 3


def test_values_hold_for_three_polls_where_polls_are_far_apart():
    """Thirty seconds at a poll per ten seconds, more than the five of max_age."""
    polled = (0, body(engine(running=3, preemptions=1)))
    assert only(fed(polled, (10, "timeout"), (30, "timeout"), interval=10)).signals.requests_running == 3
    late = only(fed(polled, (10, "timeout"), (30.1, "timeout"), interval=10))
    assert late.signals.known() == {"preemptions_total": 0}
    assert fed(polled, interval=10).max_age == 30
    assert fed(polled).max_age == 5


def test_a_changed_pace_changes_how_long_values_hold():
    """A slow server is asked every five seconds from now on."""
    one = fresh()
    one.feed(0, body(engine(running=3)))
    one.set_interval(5.0)
    assert only(one.feed(14, None, "timeout")).signals.requests_running == 3
    assert only(one.feed(15.1, None, "timeout")).signals.requests_running is None


def test_a_good_poll_after_an_outage_goes_on_where_it_ended():
    """Ten preemptions while nobody could look: counted, and spread over the whole time."""
    reading = fed(
        (0, body(engine(running=3, preemptions=7))),
        *((float(t), "timeout") for t in range(1, 20)),
        (20, body(engine(running=1, preemptions=17))),
    )
    assert only(reading).signals.preemptions_total == 10
    assert only(reading).signals.preemptions_per_second == 0.5


def test_a_gauge_that_is_gone_from_the_body_is_unknown_at_once():
    """A body without it is not a poll that failed: the old value no longer holds."""
    signals = only(fed((0, body(engine(running=3, kv=0.5))), (1, body(engine(running=3))))).signals
    assert signals.kv_usage_ratio is None
    assert signals.kv_usage_max_ratio == 0.5


def test_an_impossible_value_is_unknown_and_says_why():
    """42 is no share of a cache, and NaN is no number of requests."""
    one = only(fed((0, body(engine(running=math.nan, waiting=2, kv=42.0)))))
    assert (one.signals.kv_usage_ratio, one.signals.requests_running, one.signals.requests_waiting) == (
        None,
        None,
        2,
    )
    assert one.untrusted.keys() == {"kv_usage", "requests_running"}
    assert sum(one.kv_polls) == 0


# Engines that go and come.

BOTH = (engine("0", running=3, preemptions=10), engine("1", running=5, preemptions=100))


def test_an_engine_that_is_gone_from_the_body_is_missing_and_unknown_at_once():
    """Its own counters stay; its neighbour is not touched."""
    reading = fed((0, body(*BOTH)), (1, body(BOTH[0])))
    gone = reading.engines[next(key for key in reading.engines if key.engine == "1")]
    assert (gone.missing, gone.seen_at) == (True, 0)
    assert gone.signals.known() == {"preemptions_total": 0}
    assert named(reading)["0"].requests_running == 3


def test_an_engine_that_returns_has_lost_and_doubled_nothing():
    """Seven preemptions happened while it was away, with no new process."""
    back = engine("1", running=5, preemptions=107)
    reading = fed((0, body(*BOTH)), (1, body(BOTH[0])), (2, "timeout"), (3, body(BOTH[0], back)))
    assert named(reading)["1"].preemptions_total == 7
    assert not any(one.missing for one in reading.engines.values())


def test_an_engine_that_a_cut_off_body_does_not_reach_is_not_missing():
    """Nothing is known of it, as after a failed poll: its values hold until they are too old."""
    head = body(BOTH[0]) + b'vllm:num_requests_running{engine="1'
    reading = fed((0, body(*BOTH)), (1, head))
    assert named(reading)["1"].requests_running == 5
    assert not any(one.missing for one in reading.engines.values())
    assert named(fed((0, body(*BOTH)), (6, head)))["1"].requests_running is None


def test_an_engine_that_is_gone_for_now_still_has_its_share_of_the_blocks():
    """400 blocks for two engines, told at the start; the second is missing, or in a part that was cut off."""
    cache = {"num_gpu_blocks": 400, "block_size": 16}
    both = [engine(name, running=1, cache=cache) for name in "01"]
    head = body(both[0]) + b"vllm:num_pree"
    assert named(fed((0, body(*both)), (1, head)))["0"].kv_capacity_tokens == 199 * 16
    assert named(fed((0, body(*both)), (1, body(both[0]))))["0"].kv_capacity_tokens == 199 * 16


def test_an_engine_is_forgotten_after_an_hour():
    """From then on it has no series, and should it come back it is a new one."""
    one = fresh()
    one.feed(0, body(*BOTH))
    assert len(one.feed(FORGET_SECONDS, body(BOTH[0])).engines) == 2
    assert len(one.feed(FORGET_SECONDS + 1, body(BOTH[0])).engines) == 1
    back = one.feed(FORGET_SECONDS + 2, body(BOTH[0], engine("1", running=5, preemptions=300)))
    assert named(back)["1"].preemptions_total == 0


def test_a_target_that_is_down_for_hours_forgets_nothing():
    """Failed polls say nothing of its engines; three preemptions are added when it is back."""
    reading = fed(
        (0, body(BOTH[0])),
        (3 * FORGET_SECONDS, "timeout"),
        (3 * FORGET_SECONDS + 1, body(engine(preemptions=13))),
    )
    assert named(reading)["0"].preemptions_total == 3


def test_replicas_are_engines_of_their_own():
    """Ray tells them apart by a label; each shares blocks with its own engines only."""
    replicas = [engine("0", running=1, replica=name) for name in ("a", "b")]
    info = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="200",engine="0",ReplicaId="a"} 1\n'
    reading = fed((0, body(*replicas) + info))
    assert list(named(reading)) == ["a/0", "b/0"]
    assert named(reading)["a/0"].kv_capacity_tokens == 199 * 16
    assert named(reading)["b/0"].kv_capacity_tokens is None


def test_no_more_engines_are_remembered_than_a_limit():
    """However often a server changes its labels."""
    one = fresh()
    for number in range(MAX_REMEMBERED + 50):
        reading = one.feed(float(number), body(engine(running=1, model=f"m{number}")))
    assert len(reading.engines) == MAX_REMEMBERED


def busy(model: str, count: int, start: float | None, *names: str, **more: object) -> bytes:
    """A page of one process with these engines, which have counted so far."""
    engines = (
        engine(name, model=model, running=1, preemptions=count, steps=count, finished=count, **more)
        for name in names or ("0",)
    )
    return body(*engines, start_time=start)


@pytest.mark.parametrize("told", [True, False], ids=["start times", "no start times"])
def test_another_model_at_the_same_address_is_a_new_process_that_misses_nothing(told):
    """Its engine has the whole cache, the old one is not shown, and the server is asked again."""
    cache = {"num_gpu_blocks": 101, "block_size": 16}
    one = fresh()
    for t in range(60):
        one.feed(t, busy("v1", t, 1000.0 if told else None, cache=cache))
    for t in range(60, 100):
        one.feed(t, None, "connection_refused")
    for t in range(100, 130):
        reading = one.feed(t, busy("v2", t - 100, 2000.0 if told else None, cache=cache))
        assert [key.model for key in reading.engines] == ["v2"]
        assert (reading.restarts, reading.judgement.findings) == (1, ())
    assert only(reading).signals.kv_capacity_tokens == 1600


def test_fewer_engines_after_a_restart_are_not_missed_and_count_on_if_they_return():
    """A smaller --data-parallel-size; the engine that is back has lost nothing of its own counters."""
    one = fresh()
    one.feed(0, busy("m", 50, 1000.0, "0", "1"))
    one.feed(1, busy("m", 57, 1000.0, "0", "1"))
    reading = one.feed(30, busy("m", 2, 2000.0))
    assert (list(named(reading)), reading.restarts) == (["0"], 1)
    back = one.feed(60, busy("m", 4, 3000.0, "0", "1"))
    assert (named(back)["1"].preemptions_total, back.restarts) == (7 + 4, 2)


def test_an_engine_that_dies_without_a_restart_of_the_server_is_missed():
    """The others go on, so it should be there."""
    reading = fed((0, busy("m", 5, 1000.0, "0", "1")), (1, busy("m", 6, 1000.0)))
    assert (len(reading.engines), reading.judgement.findings) == (2, ("engine_missing",))


def test_a_replica_that_ray_removes_is_not_missed_but_all_of_them_are():
    """Ray scales down, and gives a replica that it restarts a new name."""
    pages = [
        body(*(engine(running=1, preemptions=t, replica=name) for name in names))
        for t, names in enumerate(("abc", "abc", "a"))
    ]
    reading = fed(*enumerate(pages))
    assert (list(named(reading)), reading.judgement.findings) == (["a/0"], ())
    assert fed(*enumerate(pages), (3, body(engine(model="other", running=1)))).judgement.findings


def test_servers_of_two_models_behind_one_address_are_no_endless_restart():
    """Each has a start time that returns."""
    one = fresh()
    for t in range(20):
        reading = one.feed(t, busy("ab"[t % 2], 50 + t, 1000.0 + t % 2))
    assert reading.restarts <= 1
    assert len(reading.engines) == 2


def test_dead_engines_never_hide_a_live_one():
    """Room is made by forgetting the one that is missing for longest."""
    one = fresh()
    one.feed(0, body(*(engine(str(number), running=0) for number in range(MAX_REMEMBERED))))
    one.feed(1, body(*(engine(str(number), running=0) for number in range(1, MAX_REMEMBERED))))
    for t in range(2, 5):
        reading = one.feed(t, body(engine(model="new", running=3, preemptions=t)))
    assert len(reading.engines) == MAX_REMEMBERED
    live = [key for key, shown in reading.engines.items() if not shown.missing]
    assert [key.model for key in live] == ["new"]
    assert "0" not in {key.engine for key in reading.engines if key.model != "new"}


# Sources by turns.


@pytest.mark.parametrize("told", [True, False], ids=["start times", "no start times"])
def test_two_pods_behind_one_address_have_no_rates(told):
    """Their gauges are shown as they come; own counters never fall."""
    one, before = fresh(), 0.0
    for t in range(60):
        count = 5000 + 3 * t if t % 2 else 90 + t
        text = body(
            engine(
                running=4 + t % 2, preemptions=count, finished=count, steps=9 * count, prompt_tokens=count
            ),
            start_time=(1000.0 if t % 2 else 2000.0) if told else None,
        )
        signals = only(one.feed(float(t), text)).signals
        assert signals.preemptions_total >= before
        before = signals.preemptions_total
        if t > 6:
            assert not [name for name in signals.known() if "_per_" in name]
            assert signals.requests_running == 4 + t % 2


# Anything.


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 2000),
            st.one_of(
                st.sampled_from(["timeout", b"", b"<html>", b"\xff\xfe"]),
                st.integers(0, len(idle("0.26.0"))).map(lambda length: idle("0.26.0")[:length]),
                st.integers(0, 12).map(
                    lambda number: cut(polls(EXHAUSTION)[20 * number].body, "request_success_total")
                ),
                st.integers(0, 14).map(lambda number: polls(EXHAUSTION)[20 * number].body),
            ),
        ),
        max_size=12,
    )
)
def test_whatever_comes_the_same_polls_have_the_same_readings(sequence):
    """Nothing is raised, own counters never fall, and a second pipeline says the same."""
    one, other, t, before = fresh(), fresh(), 0.0, {}
    for seconds, outcome in sequence:
        t += seconds
        taken = (t, outcome, None) if isinstance(outcome, bytes) else (t, None, outcome)
        reading = one.feed(*taken)
        assert reading == other.feed(*taken)
        assert reading.up == (reading.error is None)
        own = {
            (key, name): number
            for key, known in reading.engines.items()
            for name, number in known.signals.known().items()
            if name.endswith("_total")
        }
        assert all(own.get(key, number) >= number for key, number in before.items())
        before = own


def test_recordings_of_the_tests_are_all_readable():
    """Each has a header with an interval, and polls in order."""
    names = sorted(path.name.removesuffix(".jsonl.gz") for path in RECORDINGS.glob("*.jsonl.gz"))
    assert len(names) >= 10
    for name in names:
        assert gzip.decompress((RECORDINGS / f"{name}.jsonl.gz").read_bytes()).endswith(b"\n")
        assert header(name).interval > 0
        times = [poll.t for poll in polls(name)]
        assert times == sorted(times)
        assert any(pipeline(name).feed(poll.t, poll.body, poll.error).engines for poll in polls(name))


def test_a_verdict_that_failed_polls_interrupt_goes_on_when_it_returns():
    """Ten seconds without an answer are no end of a storm, and no new one begins after them."""
    one, storm, since = fresh(), None, set()
    for poll in polls(EXHAUSTION):
        if storm is not None and storm + 10 <= poll.t < storm + 20:
            reading = one.feed(poll.t, None, "timeout")
        else:
            reading = one.feed(poll.t, poll.body)
        judgement = only(reading).judgement if reading.engines else None
        if judgement and judgement.verdict == "preemption_thrash":
            storm = storm or poll.t
            since.add(judgement.since)
        elif storm is not None and poll.t < storm + 30:
            assert judgement.verdict == "unreachable"
    assert since == {storm}
