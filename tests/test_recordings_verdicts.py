"""Verdicts on real servers: how fast a storm is named, that it stays named, and that calm stays calm.

When a storm began is read from the bodies here, by regular expressions and without the program's eyes.
"""

import pytest
from support.real_recordings import (
    CALM,
    EXHAUSTION,
    QUEUEING,
    RESTART,
    TWO_API_SERVERS,
    TWO_ENGINES,
    at,
    idle,
    only,
    polls,
    replayed,
    value,
)
from support.scenes import engine_of, fixes, found, sequence, verdicts

from exporter.analysis.pipeline import Pipeline
from exporter.analysis.signals import NAMES
from exporter.config import AnalysisConfig

THRASH = "preemption_thrash"
NO_PREFIX_CACHE, NEWER = "0.26.0-exhaustion-no-prefix-cache", "0.32.0-exhaustion"
RAMP, SHORT = "0.26.0-ramp", "0.28.0-exhaustion-short"
# A storm: recording, engine, seconds of the first and last poll of its load.
STORMS = [
    pytest.param(EXHAUSTION, "0", 0, 95.3, id="exhaustion"),
    pytest.param(NO_PREFIX_CACHE, "0", 0, 63, id="no-prefix-cache"),
    pytest.param(NEWER, "0", 0, 95, id="0.32"),
    pytest.param(SHORT, "0", 0, 30, id="0.28"),
    pytest.param(RESTART, "0", 30, 65, id="before-restart"),
    pytest.param(RESTART, "0", 107, 136, id="after-restart"),
    pytest.param(TWO_API_SERVERS, "0", 0, 38, id="two-api-servers"),
    pytest.param(TWO_ENGINES, "0", 0, 46, id="engine-0"),
    pytest.param(TWO_ENGINES, "1", 0, 46, id="engine-1"),
]


def bodies(name: str, begin: float, end: float):
    """Time and body of the good polls of a part of a recording."""
    return [(poll.t, poll.body) for poll in polls(name) if poll.body and begin <= poll.t <= end]


def first_sign(name: str, number: str, begin: float, end: float) -> float:
    """When preemption first shows: the counter moves, or running falls while waiting rises at a full cache.

    One request that went back is not a sign yet: it may have come anew. Two are.
    """
    before = None
    for t, text in bodies(name, begin, end):
        now = [
            value(text, metric, engine=number)
            for metric in (
                "num_preemptions_total",
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
            )
        ]
        if before is not None and None not in now and None not in before:
            went_back = min(before[1] - now[1], now[2] - before[2])
            if now[0] > before[0] or (went_back >= 2 and max(before[3], now[3]) >= 0.9):
                return t
        before = now
    raise AssertionError("no preemption in this part")


def part(name: str, begin: float, end: float):
    """The readings of a part of a recording."""
    return [reading for reading in replayed(name) if begin <= reading.t <= end]


@pytest.mark.parametrize(("name", "number", "begin", "end"), STORMS)
def test_a_storm_is_named_within_five_seconds_and_three_polls(name, number, begin, end):
    """Counted from the first sign in the bodies, be it of the counter or of the gauges."""
    sign = first_sign(name, number, begin, end)
    after = [reading for reading in part(name, sign, end) if reading.up]
    named = next(i for i, one in enumerate(after) if engine_of(one, number).judgement.verdict == THRASH)
    assert named <= 3
    assert after[named].t - sign <= 5


@pytest.mark.parametrize(("name", "number", "begin", "end"), STORMS)
def test_a_storm_keeps_its_name_until_the_load_ends(name, number, begin, end):
    """No flapping: from when it is named it stays so, and ten seconds later it is critical at every poll.

    The harm: none of them shows calm times before, and a quarter (two engines) to a third (exhaustion) of the
    tokens is computed twice, half of them without a prefix cache.
    """
    scene = part(name, begin, end)
    named = next(i for i, one in enumerate(scene) if engine_of(one, number).judgement.verdict == THRASH)
    assert verdicts(scene[named:], number) == {THRASH}
    later = [one for one in scene if one.t >= scene[named].t + 10]
    assert {engine_of(one, number).judgement.severity.value for one in later} == {"critical"}


@pytest.mark.parametrize(("name", "number", "begin", "end"), STORMS)
def test_nothing_critical_is_said_before_a_storm(name, number, begin, end):
    """Before its first sign the engine may be filling up, which is a warning at most."""
    before = [one for one in part(name, begin, first_sign(name, number, begin, end) - 0.01) if one.up]
    known = [one for one in before if one.engines]
    assert {engine_of(one, number).judgement.severity.value for one in known} <= {"none", "info", "warning"}


@pytest.mark.parametrize(("name", "number", "begin", "end"), STORMS)
def test_a_storm_is_cured_by_less_at_once_or_more_memory(name, number, begin, end):
    """At the end of the load there is advice, and what makes a storm worse is not in it."""
    advised = fixes(part(name, begin, end)[-1], number)
    assert {"lower_max_num_seqs", "set_watermark", "fp8_kv_cache", "add_replicas"} & {*advised}
    assert not {"raise_max_num_seqs", "lower_gpu_memory_utilization", "restart_engine"} & {*advised}


def test_a_storm_that_ramps_up_is_named_when_it_harms_and_stays_so():
    """Two clients more every twelve seconds: a few preemptions at first, a storm with all of them."""
    readings = replayed(RAMP)
    said = sequence(readings)
    assert said.count(THRASH) == 1
    assert verdicts(part(RAMP, 120, 140)) == {THRASH}
    assert verdicts(part(RAMP, 0, first_sign(RAMP, "0", 0, 150) - 0.01)) <= {"healthy", "kv_pressure_rising"}


@pytest.mark.parametrize(
    ("name", "done"), [(EXHAUSTION, 118.4), (NO_PREFIX_CACHE, 74.6), (NEWER, 105)], ids=["", "off", "0.32"]
)
def test_a_drained_engine_is_healthy_after_a_few_polls(name, done):
    """The last request is done, and nothing of the storm is left but its counter."""
    idle_since = next(t for t, text in bodies(name, done - 2, 1e9) if not value(text, "num_requests_running"))
    assert verdicts(part(name, idle_since + 3, 1e9)) <= {"healthy"}
    assert verdicts([replayed(name)[-1]]) == {"healthy"}


def test_calm_is_healthy_at_every_poll():
    """Eight clients at a third of the cache, from the first request to the idle end."""
    readings = replayed(CALM)
    assert verdicts(readings) == {"healthy"}
    assert found(readings) <= {"prefix_cache_off", "capacity_is_estimate"}


def test_a_queue_for_seats_is_named_with_the_seats_as_cure():
    """Four seats, twenty-four clients, KV at 5 %: warning at the most, and nothing about memory."""
    known = Pipeline(AnalysisConfig(), {"max_num_seqs": 4}, 1.0)
    readings = [known.feed(poll.t, poll.body, poll.error) for poll in polls(QUEUEING)]
    assert sequence(readings)[:2] == ["healthy", "seat_bound"]
    busy = [one for one in readings if 45 <= one.t <= 70]
    assert verdicts(busy) == {"seat_bound"}
    advised = {fix for one in busy for fix in fixes(one)}
    assert "raise_max_num_seqs" in advised
    assert advised <= {"raise_max_num_seqs", "add_replicas"}


def test_a_queue_for_seats_that_nobody_told_of_is_no_more_than_a_queue():
    """A plateau of running proves no limit."""
    unknown = Pipeline(AnalysisConfig(), {}, 1.0)
    readings = [unknown.feed(poll.t, poll.body, poll.error) for poll in polls(QUEUEING)]
    assert verdicts(readings) == {"healthy", "queue_not_kv"}


@pytest.mark.parametrize("name", [CALM, QUEUEING])
def test_nothing_pages_without_preemption(name):
    """Whatever is said of a calm or a queueing server, it is no reason to get up."""
    assert {only(one).judgement.severity.value for one in replayed(name)} <= {"none", "info", "warning"}


def test_a_killed_server_is_unreachable_and_then_restarted_once():
    """Refused before the first start is starting; after the kill it is out until it answers."""
    readings = replayed(RESTART)
    assert at(readings, 10).judgement.verdict == "starting"
    assert at(readings, 90).judgement.verdict == "unreachable"
    assert verdicts([at(readings, 90)]) == {"unreachable"}
    back = at(readings, 107)
    assert (back.judgement.verdict, back.restarts) == ("reachable", 1)
    assert "restarted" in found([back])
    assert readings[-1].restarts == 1
    assert not any("suspect_out_of_memory" in found([one]) for one in readings if one.engines)


def test_engines_that_share_their_load_are_not_called_unbalanced():
    """Two data-parallel engines, both in a storm."""
    assert not any(model.findings for one in replayed(TWO_ENGINES) for model in one.models.values())


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
def test_a_server_without_statistics_says_so_at_once(version):
    """Its page has not one of vLLM's series."""
    reading = Pipeline(AnalysisConfig(), {}, 1.0).feed(0.0, idle(version, "stats-disabled"))
    assert reading.judgement.verdict == "metrics_missing"
    assert "enable_log_stats" in reading.judgement.fixes
    assert not reading.engines


@pytest.mark.parametrize("version", ["0.26.0", "0.28.0", "0.30.0", "0.32.0"])
def test_an_idle_server_is_healthy_for_as_long_as_it_idles(version):
    """The same body for half an hour: nothing moves, and nothing has to."""
    idling = Pipeline(AnalysisConfig(), {}, 5.0)
    readings = [idling.feed(5.0 * number, idle(version)) for number in range(360)]
    assert verdicts(readings) == {"healthy"}
    assert "stale_gauges" not in found(readings)


@pytest.mark.parametrize(
    "name", [EXHAUSTION, NO_PREFIX_CACHE, NEWER, SHORT, RAMP, QUEUEING, RESTART, TWO_ENGINES]
)
def test_evidence_with_a_signal_s_name_is_that_signal(name):
    """At the poll at which it was found; another window's number has another name."""
    seen: dict[object, set[tuple[str, float]]] = {}
    told = 0
    for reading in replayed(name):
        for key, one in reading.engines.items():
            known = one.signals.known()
            seen.setdefault(key, set()).update(known.items())
            mine = {(each.signal, each.value) for each in one.judgement.evidence if each.signal in NAMES}
            assert mine <= seen[key]
            told += len(mine)
    assert told
