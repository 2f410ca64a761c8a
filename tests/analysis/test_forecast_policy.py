"""When a forecast is due: trouble that lasts, enough of a load, and something that has changed."""

from dataclasses import replace
from itertools import pairwise

import pytest
from support.scenes import Stage, engine_of

from exporter.analysis.forecast import EngineForecast
from exporter.analysis.forecast_policy import ForecastPolicy, too_little
from exporter.analysis.load_profile import LoadProfile

LOAD = replace(LoadProfile.from_dict({}), window_seconds=60.0, requests_finished=50.0)
POOL = {"kv_cache_size_tokens": 299 * 32, "block_size": 32, "cache_dtype": "auto"}
STORM = {"running": 20, "waiting": 12, "kv": 0.98, "tokens": 300, "finished": 0.5, "preemptions": 2}


@pytest.fixture(scope="module")
def engine():
    """An engine in a storm."""
    return engine_of(Stage(cache=POOL).play(60, **STORM)[-1])


@pytest.fixture(scope="module")
def calm():
    """An engine without trouble."""
    return engine_of(Stage(cache=POOL).play(60, running=4, kv=0.2, tokens=100, finished=0.5)[-1])


def asked_at(policy, engine, *times, load=LOAD):
    """The times at which a forecast was due."""
    return [t for t in times if policy.due(t, engine, lambda: load) is not None]


def made(engine, at, *, trusted=True):
    """The engine with a forecast."""
    return replace(engine, forecast=EngineForecast(at, trusted, "they match"))


def test_trouble_that_lasts_is_forecast_once(engine):
    """Not in its first seconds, and not every second."""
    since = engine.judgement.since
    times = [since + second for second in range(60)]
    assert asked_at(ForecastPolicy(), engine, *times) == [since + 10]


def test_no_trouble_needs_no_forecast_even_if_somebody_looks(calm):
    """There is nothing to cure."""
    policy = ForecastPolicy()
    assert asked_at(policy, calm, *range(60, 1000)) == []
    assert not any(policy.due(t, calm, lambda: LOAD, asked=True) for t in range(60, 1000))


def test_while_somebody_looks_trouble_need_not_last_and_a_forecast_is_renewed_sooner(engine):
    """Every two minutes, and never more often than one a minute."""
    policy, since = ForecastPolicy(), engine.judgement.since
    assert policy.due(since + 1, engine, lambda: LOAD) is None
    assert policy.due(since + 1, engine, lambda: LOAD, asked=True) is LOAD
    forecast = made(engine, since + 1)
    due = [t for t in range(2, 600) if policy.due(since + t, forecast, lambda: LOAD, asked=True) is not None]
    assert due == [121, 241, 361, 481]


def test_too_little_load_is_no_forecast(engine):
    """And it is looked at again."""
    policy = ForecastPolicy()
    at = engine.judgement.since + 20
    short = replace(LOAD, requests_finished=5.0)
    assert asked_at(policy, engine, at, at + 5, load=short) == []
    assert asked_at(policy, engine, at + 10) == [at + 10]
    assert "5 finished requests were observed, 30 s with 30 are needed" in too_little(short)
    assert too_little(None)
    assert not too_little(LOAD)


def test_a_trusted_forecast_is_renewed_when_the_load_has_changed_or_it_is_old(engine):
    """Half as many requests again are another load; a few more are not."""
    start = engine.judgement.since + 20

    def times(*readings):
        policy = ForecastPolicy()
        assert asked_at(policy, engine, start) == [start]
        return [t for t, one in readings if policy.due(start + t, one, lambda: LOAD) is not None]

    def with_waiting(waiting):
        return made(replace(engine, signals=replace(engine.signals, requests_waiting=waiting)), start)

    assert times(*((t, made(engine, start)) for t in range(0, 700, 10))) == [600]
    assert times((30, with_waiting(60.0)), (70, with_waiting(60.0))) == [70]
    assert times((70, with_waiting(16.0))) == []
    other = replace(engine.server_facts, facts={**engine.server_facts.facts, "max_num_seqs": 7})
    assert times((70, made(replace(engine, server_facts=other), start))) == [70]


def test_a_forecast_that_is_not_trusted_is_tried_again_ever_more_seldom(engine):
    """After one, two, three minutes; at last every ten."""
    start = engine.judgement.since + 20
    doubted = made(engine, start, trusted=False)
    due = asked_at(ForecastPolicy(), doubted, *range(int(start), int(start) + 800, 5))
    gaps = [later - sooner for sooner, later in pairwise(due)]
    assert gaps == [60, 120, 180, 240]


def test_a_recording_gets_few(engine):
    """So that its replay is bounded."""
    start = engine.judgement.since + 20
    doubted = made(engine, start, trusted=False)
    assert len(asked_at(ForecastPolicy(2), doubted, *range(int(start), int(start) + 900, 5))) == 2
