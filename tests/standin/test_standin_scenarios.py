"""Each scenario leads the exporter to the verdict that it is meant for: in accelerated time, all the way."""

import functools
from itertools import islice

import pytest

from exporter.analysis import catalogue
from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig
from exporter.standin.scenarios import SCENARIOS, Act, Scenario, arrivals_of, lives
from exporter.standin.server import Play
from exporter.vllm.answers import NO_ANSWERS, ServerAnswers

WATCHED = 240.0


@functools.cache
def watched(name, seed=1, version="0.32.0"):
    """The readings of a scenario, polled each second from its beginning; the server tells its settings."""
    play = Play(SCENARIOS[name], version, "simulated-8b", seed, 1e9)
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
    readings, seconds, answers = [], 0.0, NO_ANSWERS
    while seconds < WATCHED:
        body = play.body(seconds)
        if body is not None:
            answers = ServerAnswers(server_info=play.facts())
        error = None if body is not None else "connection_refused"
        readings.append(pipeline.feed(seconds, body, error, answers))
        seconds += 1.0
    return readings


def ends(story):
    """The last moment of every act within the time that is watched, with the act's name."""
    at, found = 0.0, []
    while at < WATCHED:
        for act in story.acts:
            at += act.seconds
            found.append((min(at, WATCHED) - 1, act.name))
    return [(end, name) for end, name in found if end < WATCHED]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        *((name, "0.32.0") for name in SCENARIOS),
        *(pytest.param(name, "0.26.0", marks=pytest.mark.long) for name in ("storm", "queue")),
    ],
)
def test_a_scenario_leads_to_its_verdict(name, version):
    """At the end of each act, at the first playing and at the second, of one engine at least."""
    story = SCENARIOS[name]
    readings = watched(name, 1, version)
    for end, act in ends(story):
        if act in story.verdict:
            said = {engine.judgement.verdict for engine in readings[int(end)].engines.values()}
            assert story.verdict[act] in said, (act, end)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_the_day_reads_the_same_with_other_arrivals(seed):
    """Chance decides when, not what."""
    readings = watched("day", seed)
    story = SCENARIOS["day"]
    for end, act in ends(story):
        if act in story.verdict:
            (engine,) = readings[int(end)].engines.values()
            assert engine.judgement.verdict == story.verdict[act], (act, end)


@pytest.mark.parametrize("name", [name for name, story in SCENARIOS.items() if story.finding])
def test_a_scenario_leads_to_its_finding(name):
    """Beside the verdict, of an engine or of the model."""
    last = watched(name)[-1]
    found = [*last.engines.values(), *last.models.values()]
    assert SCENARIOS[name].finding in {finding for each in found for finding in each.findings}


@pytest.mark.parametrize("name", ["calm", "imbalance"])
def test_a_calm_scenario_pages_nobody(name):
    """At no poll."""
    for reading in watched(name):
        assert all(each.judgement.severity.value in ("none", "info") for each in reading.engines.values())


def test_the_fix_of_the_day_is_among_the_advice():
    """What the story does is what the exporter had advised in the storm."""
    (engine,) = watched("day")[74].engines.values()
    assert "raise_tensor_parallel" in [advice.fix for advice in engine.advice.fixes]


def test_scenarios_speak_the_catalogues_words():
    """Verdicts and findings that there are."""
    table = catalogue.load()
    for story in SCENARIOS.values():
        assert set(story.verdict.values()) <= set(table.verdicts)
        assert not story.finding or story.finding in table.findings
        assert set(story.verdict) <= {act.name for act in story.acts}


def test_the_same_seed_is_the_same_story():
    """Byte by byte; another seed is another one."""
    bodies = []
    for seed in (5, 5, 6):
        play = Play(SCENARIOS["storm"], "0.32.0", "m", seed, 1e9)
        bodies.append([play.body(float(t)) for t in range(0, 60, 7)])
    assert bodies[0] == bodies[1] != bodies[2]


def test_how_often_it_is_asked_changes_nothing():
    """A poll looks, and does not touch: only ITL samples are means over the time between two polls."""
    often, seldom = (Play(SCENARIOS["storm"], "0.32.0", "m", 1, 1e9) for _ in range(2))
    for tenth in range(600):
        often.at(tenth / 10)
    counted = [
        [line for line in play.body(60.0).decode().splitlines()
         if line.startswith(("vllm:num_", "vllm:kv_", "vllm:request_", "vllm:prompt_tokens_total"))]
        for play in (often, seldom)
    ]  # fmt: skip
    assert counted[0] == counted[1]


def test_a_new_process_begins_at_zero():
    """After the time in which nothing answers; the old one's requests are lost."""
    play = Play(SCENARIOS["restart"], "0.32.0", "m", 1, 1e9)
    before = play.body(59.0)
    assert b'num_preemptions_created{engine="0",model_name="m"} 1000000000.0' in before
    assert play.body(60.0) is play.body(71.9) is None
    after = play.body(72.0)
    assert b"process_start_time_seconds 1000000072.0" in after
    assert b'vllm:generation_tokens_total{engine="0",model_name="m"} 0.0' in after


def test_lives_are_cut_where_the_server_is_down():
    """The day has two processes, and the next day begins with the first one's settings again."""
    first, second, third = islice(lives(SCENARIOS["day"]), 3)
    assert (first.start, first.end, second.start, second.end) == (0.0, 75.0, 78.0, 120.0)
    assert [act.name for _, act in second.acts()] == ["fix applied", "calm again"]
    assert first.server == third.server != second.server
    assert third.start == 123.0


def test_a_scenario_without_a_server_is_refused():
    """The first act says what there is."""
    with pytest.raises(ValueError, match="needs a server"):
        next(lives(Scenario("", (Act("a", "", 1.0),), {})))


def test_arrivals_follow_the_rate():
    """From 0 to 10 a second over a minute: 300 in all, half of the time for a quarter of them."""
    acts = (Act("ramp", "", 60.0, (0.0, 10.0), server=SCENARIOS["calm"].acts[0].server), Act("none", "", 1e6))
    arrivals = arrivals_of(next(lives(Scenario("", acts, {}))), 0, 1)
    times = []
    while (at := arrivals.next_at()) is not None and at < 60e9:
        arrivals.take()
        times.append(at / 1e9)
        if len(times) > 1000:
            break
    assert len(times) == pytest.approx(300, abs=60)
    assert sum(t < 30 for t in times) == pytest.approx(75, abs=30)
    assert times == sorted(times)
