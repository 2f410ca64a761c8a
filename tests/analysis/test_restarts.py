"""A new process behind an address is told from two sources that answer by turns."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import body, engine
from support.real_recordings import RESTART, history, pipeline, polls, value

from exporter.analysis.baseline import Baseline
from exporter.analysis.history import History
from exporter.analysis.restarts import TURNS_SECONDS, Restart
from exporter.analysis.signals import compute
from exporter.vllm.exposition import Reader


class Source:
    """A server at work that prints what it has counted when it is asked."""

    def __init__(self, begin: float, pace: float = 1.0, start_time: float | None = None) -> None:
        """Begin at this count, and move on by `pace` at every poll of anybody."""
        self.begin, self.pace, self.start_time = begin, pace, start_time

    def body(self, t: float) -> bytes:
        """All counters that an engine at work moves."""
        count = self.begin + self.pace * t
        return body(
            engine(
                running=5,
                kv=0.5,
                preemptions=count,
                finished=count,
                steps=10 * count,
                prompt_tokens=100 * count,
                generation_tokens=200 * count,
            ),
            start_time=self.start_time,
        )


def remembered(taken: Iterable[tuple[float, bytes]]) -> History:
    """The history of these bodies; own counters never fall on the way."""
    reader, history, before = Reader(), History(), {}
    for t, text in taken:
        exposition = reader.read(text)
        (snapshot,) = exposition.engines.values()
        history.observe(t, snapshot, exposition.start_time)
        assert all(history.own[name] >= count for name, count in before.items())
        before = dict(history.own)
    return history


def by_turns(sources: dict[str, Source], order: str, *, seconds: float = 1.0) -> History:
    """Polls some seconds apart, answered in this order."""
    times = (number * seconds for number in itertools.count())
    return remembered((t, sources[letter].body(t)) for t, letter in zip(times, order, strict=False))


def now_by_turns(history: History) -> bool:
    """Whether two sources are seen at the last poll."""
    return history.sources.by_turns(history.times[-1])


def pair(*, told: bool) -> dict[str, Source]:
    """Three pods of one deployment; `told`: their bodies name their start times."""
    return {
        "A": Source(5000, start_time=3000.0 if told else None),
        "B": Source(400, pace=0.5, start_time=2000.0 if told else None),
        "C": Source(90, pace=0.25, start_time=1000.0 if told else None),
    }


# Two sources.


@pytest.mark.parametrize("order", ["ABAB", "ABABB", "AABBAABB", "ABCABC", "CBACBACB", "BABAB", "AABAABAAB"])
@pytest.mark.parametrize("told", [True, False], ids=["start times", "no start times"])
def test_sources_that_answer_by_turns_are_told_apart(order, told):
    """Whoever answers first, and however long each is answered by."""
    assert now_by_turns(by_turns(pair(told=told), order))


@pytest.mark.parametrize("told", [True, False], ids=["start times", "no start times"])
def test_nothing_is_said_of_how_far_a_mixture_moved(told):
    """No rate, no ratio of counters, no time to full; gauges are what they are."""
    signals = compute(by_turns(pair(told=told), "AABABABB"), {})
    known = signals.known()
    assert not [name for name in known if "per_" in name or "mean_seconds" in name]
    assert {"kv_seconds_to_full", "recomputed_ratio", "prefix_cache_hit_ratio"}.isdisjoint(known)
    assert known["requests_running"] == 5


def test_a_return_is_no_work_done():
    """With start times the first return proves the mixture: only B's first sight was taken for a restart."""
    sources = pair(told=True)
    history = by_turns(sources, "AB" + "AB" * 20)
    assert history.restarts == 1
    assert history.own["preemptions"] == sources["B"].begin + 0.5  # what it showed at its first poll


def test_without_start_times_each_source_is_taken_for_new_once_at_most():
    """B's 400.5 at first sight; A went on from 5000 to 5002 and B from 400.5 to 401.5 before the proof."""
    history = by_turns(pair(told=False), "AB" + "AB" * 20)
    assert history.restarts == 1
    assert history.own["preemptions"] == 400.5 + 2


def test_a_mixture_is_believed_in_for_a_minute_after_the_last_turn():
    """Then rates begin anew, and hold nothing of the mixture."""
    sources = pair(told=True)
    order = "ABA" + "A" * 70
    history = by_turns(sources, order[:63])
    assert history.times[-1] == 2 + TURNS_SECONDS
    assert now_by_turns(history)
    history = by_turns(sources, order[:64])
    assert not now_by_turns(history)
    assert compute(history, {}).preemptions_per_second is None
    history = by_turns(sources, order)
    assert compute(history, {}).preemptions_per_second == 1


def test_turns_of_minutes_count_nothing_twice():
    """A connection that is kept alive stays with one pod for two minutes, then moves to the other."""
    sources = pair(told=True)
    history = by_turns(sources, "A" * 120 + "B" * 120 + "A" * 120 + "B" * 120)
    assert history.restarts == 1
    # B's first sight, and what each pod did while it was watched, apart from the minutes of mixture.
    assert history.own["preemptions"] <= (400 + 60) + 120 + 60 + 120 + 60
    assert history.own["preemptions"] >= (400 + 60) + 119 + 59 + 58 + 29


def test_a_mixture_has_no_level():
    """Nothing is counted in it, and zero tokens per second is not what the engine did: 200 is."""
    sources, reader, history, baseline = pair(told=True), Reader(), History(), Baseline()
    for second, letter in enumerate("A" * 61 + "AB" * 80):
        exposition = reader.read(sources[letter].body(float(second)))
        (snapshot,) = exposition.engines.values()
        history.observe(float(second), snapshot, exposition.start_time)
        baseline.observe(history, frozen=False)
    assert history.rate("generation_tokens", history.window_start(180.0)) == 0
    assert baseline.level == 200


def test_a_source_that_has_done_nothing_is_a_source():
    """One of the two pods gets no requests at all."""
    sources = {"A": Source(5000), "B": Source(0, pace=0)}
    assert now_by_turns(by_turns(sources, "ABABA"))


def test_a_mixture_is_no_standstill():
    """Nothing is counted in it, so nothing can be said of what stands still."""
    history = by_turns(pair(told=True), "ABA" + "A" * 50)
    assert history.moved_at == history.times[-1]


def test_sources_of_nearly_equal_counts_are_told_apart():
    """Two processes that share the load evenly."""
    sources = {"A": Source(5000), "B": Source(4990)}
    assert now_by_turns(by_turns(sources, "ABABABAB"))


# One source.


def lives(*counts: Sequence[float], start_times: bool, away: float = 0) -> list[tuple[float, bytes]]:
    """Processes one after the other, polled every second, each away for a while before it begins."""
    taken, t = [], 0.0
    for number, life in enumerate(counts):
        for count in life:
            start_time = 1000.0 * (number + 1) if start_times else None
            taken.append((t, Source(count, pace=0, start_time=start_time).body(t)))
            t += 1
        t += away
    return taken


@pytest.mark.parametrize("start_times", [True, False], ids=["start times", "no start times"])
def test_a_server_that_restarts_every_ten_seconds_is_one_source(start_times):
    """Each of ten lives counts to 9, passing what the one before it reached, and is counted whole."""
    history = remembered(lives(*[range(10)] * 10, start_times=start_times))
    assert not now_by_turns(history)
    assert history.restarts == 9
    assert history.own["preemptions"] == 10 * 9


@pytest.mark.parametrize("start_times", [True, False], ids=["start times", "no start times"])
def test_a_server_that_fails_at_its_first_requests_is_one_source(start_times):
    """Three prompts, all seen in one poll, are its whole life; then it is away for as long as it loads."""
    history = remembered(lives(*[(0, 3, 3)] * 6, start_times=start_times, away=15))
    assert not now_by_turns(history)
    assert history.restarts == 5
    assert history.own["preemptions"] == 6 * 3


def test_small_counts_after_a_restart_are_growth_and_no_return():
    """Six of the old process, then 0, 2, 4, 6, 8 of the new one: eight are new, not two."""
    history = remembered(lives((2, 4, 6), (0, 2, 4, 6, 8), start_times=False))
    assert history.own["preemptions"] == 4 + 8
    assert (history.restarts, now_by_turns(history)) == (1, False)


def test_processes_that_are_overtaken_are_not_returned_to():
    """Polled every ten seconds: the third life is seen first at 12, past all that the first one did."""
    polled = lives((0, 4, 8), (0, 4, 10, 20), (12, 19), start_times=False)
    history = remembered((10 * t, text) for t, text in polled)
    assert history.own["preemptions"] == 8 + 20 + 19
    assert history.restarts == 2


def test_a_sign_of_work_that_falls_alone_is_no_restart():
    """Tokens and steps went on, so the process did."""
    history = remembered(
        [
            (0, body(engine(running=1, steps=10, prompt_tokens=10, generation_tokens=10, finished=10))),
            (1, body(engine(running=1, steps=11, prompt_tokens=11, generation_tokens=11, finished=2))),
        ]
    )
    assert history.restarts == 0
    assert history.own["requests_finished"] == 0


def test_one_counter_that_falls_alone_is_no_restart():
    """The process goes on, so its new value is no new work; nothing else is counted from zero."""
    history = remembered(
        [
            (0, body(engine(preemptions=9, steps=10, prompt_tokens=10, generation_tokens=10, finished=10))),
            (1, body(engine(preemptions=4, steps=11, prompt_tokens=11, generation_tokens=11, finished=11))),
        ]
    )
    assert history.restarts == 0
    assert history.own["preemptions"] == 0


def test_a_counter_that_falls_by_one_and_returns_has_counted_nothing():
    """99,999 instead of 100,000 for a poll is a slip of the page, and neither way is work."""
    counts = (100_000, 99_999, 99_999, 100_000, 100_004)
    bodies = [Source(1000).body(t) for t in range(len(counts))]
    shown = [
        re.sub(rb"(num_preemptions_total\S*) .*", rb"\1 %d" % n, one)
        for n, one in zip(counts, bodies, strict=True)
    ]
    history = remembered(enumerate(shown))
    assert (history.own["preemptions"], history.restarts) == (4, 0)


@pytest.mark.parametrize(
    "starts", [(1000, 1001, 1000), (1000, 999, 1000), (1000, 1001, 1002), (1000, 4600, 1000)]
)
def test_a_start_time_that_is_corrected_is_no_restart(starts):
    """Some programs compute it from the clock at each poll; the counters go on from where they were."""
    history = remembered(
        (10 * number + t, Source(100_000, start_time=float(start)).body(10 * number + t))
        for number, start in enumerate(starts)
        for t in range(10)
    )
    assert (history.own["preemptions"], history.restarts) == (29, 0)
    assert not now_by_turns(history)


STEP = st.tuples(
    st.sampled_from(["poll", "poll", "poll", "gap", "restart", "jitter", "slip"]),
    st.lists(st.integers(0, 50), min_size=5, max_size=5),
    st.sampled_from(["preemptions", "finished", "steps", "prompt_tokens", "generation_tokens"]),
    st.integers(1, 3),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(STEP, max_size=40), st.booleans())
def test_own_counters_never_gain_more_than_the_server_counted(story, told):
    """Through restarts, outages, corrected start times and single counters that fall by a little.

    Without start times a second restart may look like a return to the first process: none is drawn there.
    """
    names = ("preemptions", "finished", "steps", "prompt_tokens", "generation_tokens")
    counts = dict.fromkeys(names, 1000)
    history, reader, t, start, truth = History(), Reader(), 0.0, 1000.0, 0
    for kind, grown, slipping, by in [("poll", [0] * 5, "", 0), *story]:
        what = "gap" if kind == "restart" and not told else kind
        t += {"gap": 30.0, "restart": 40.0}.get(what, 1.0)
        if what == "restart":
            counts, start = dict.fromkeys(names, 0), 1000.0 + t
        counts = {name: counts[name] + more for name, more in zip(names, grown, strict=True)}
        truth += grown[0]
        shown = {
            name: max(0, n - by) if (what, name) == ("slip", slipping) else n for name, n in counts.items()
        }
        jitter = by if what == "jitter" else 0
        page = reader.read(body(engine(running=1, **shown), start_time=start + jitter if told else None))
        history.observe(t, next(iter(page.engines.values())), page.start_time)
        assert history.own["preemptions"] <= truth


def test_an_idle_server_is_one_source():
    """Nothing moves for three minutes."""
    history = remembered(lives([7] * 180, start_times=False))
    assert (history.restarts, now_by_turns(history)) == (0, False)


# What is told of a restart.


def test_a_restart_tells_what_was_last_seen_before_it():
    """The recorded server was killed after 65 s in a storm; its last minute is kept."""
    fed = pipeline(RESTART)
    for poll in polls(RESTART):
        fed.feed(poll.t, poll.body, poll.error)
    killed = history(fed)
    good = [poll for poll in polls(RESTART) if poll.body is not None]
    last = max((poll for poll in good if poll.t < 66), key=lambda poll: poll.t)
    assert value(last.body, "num_preemptions_total") == 192
    assert killed.restarts == 1
    assert killed.restart == Restart(
        at=106.0,
        kv_usage=value(last.body, "kv_cache_usage_perc"),
        kv_usage_max=1.0,
        running=10,
    )


def test_of_a_restart_only_the_last_minutes_before_it_are_told():
    """Full ten minutes ago, 0.4 in the last minute."""
    polled = [
        (float(t), body(engine(running=2, kv=1.0 if t < 60 else 0.4, preemptions=t), start_time=1000.0))
        for t in range(601)
    ]
    history = remembered([*polled, (640.0, body(engine(running=0, preemptions=0), start_time=2000.0))])
    assert history.restart == Restart(640.0, 0.4, 0.4, 2.0)


def test_what_a_restart_cannot_tell_is_unknown():
    """The old process had no gauges yet."""
    begun = [(start_time, body(engine(steps=1), start_time=start_time)) for start_time in (1.0, 9.0)]
    assert remembered(begun).restart == Restart(9.0, None, None, None)


def test_a_restart_forgets_which_readings_the_old_process_had():
    """A gauge that is missing now was not lost by the new process: it has not had it yet."""
    history = remembered(
        [
            (0, body(engine(running=1, kv=0.5, steps=1), start_time=1.0)),
            (9, body(engine(steps=1), start_time=2.0)),
        ]
    )
    assert history.seen == {"engine_steps"}
    assert math.isnan(history.columns["kv_usage"][-1])
