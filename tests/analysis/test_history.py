"""What is remembered of an engine: counters that survive restarts, windows of real time, bounded memory."""

import itertools
import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import real_recordings
from support.bodies import body, cut, engine
from support.real_recordings import (
    CALM,
    EXHAUSTION,
    QUEUEING,
    TWO_API_SERVERS,
    TWO_ENGINES,
    pipeline,
    polls,
    value,
)

from exporter.analysis.history import COUNTERS, KEEP_POLLS, KV_BOUNDS, History
from exporter.vllm.exposition import EngineKey, Reader, Snapshot

# The ring is cut in pieces of this many polls.
PIECE = 64


def remembered(*taken: tuple[float, bytes]) -> History:
    """The history of the one engine in these bodies."""
    reader, history = Reader(), History()
    for t, text in taken:
        exposition = reader.read(text)
        (snapshot,) = exposition.engines.values()
        history.observe(t, snapshot, exposition.start_time, whole=not exposition.truncated)
    return history


def counted(*values: float, start_time: float | None = None) -> list[tuple[float, bytes]]:
    """Polls a second apart that count these preemptions."""
    return [
        (float(t), body(engine(running=1, preemptions=count), start_time=start_time))
        for t, count in enumerate(values)
    ]


def replay(name: str, until: float = math.inf, number: str = "0") -> History:
    """The history of one engine of a recording."""
    fed = pipeline(name)
    for poll in polls(name):
        if poll.t <= until:
            fed.feed(poll.t, poll.body, poll.error)
    return real_recordings.history(fed, number)


# Own counters, on recordings.


@pytest.mark.parametrize(
    ("name", "number", "preempted", "finished"),
    [
        (EXHAUSTION, "0", 531, 219),
        ("0.26.0-exhaustion-no-prefix-cache", "0", 507, 208),
        (CALM, "0", 0, 371),
        (QUEUEING, "0", 0, 345),
        ("0.26.0-ramp", "0", 382, 314),
        (TWO_ENGINES, "0", 95, 98),
        (TWO_ENGINES, "1", 113, 99),
        (TWO_API_SERVERS, "0", 213, 120),
        ("0.28.0-exhaustion-short", "0", 188, 78),
        ("0.32.0-exhaustion", "0", 706, 290),
    ],
)
def test_own_counters_are_what_the_server_counted_since_first_sight(name, number, preempted, finished):
    """The server's last number less its first, for preemptions and finished requests."""
    first, *_, last = (poll.body for poll in polls(name) if poll.body is not None)
    for series, gained in (("num_preemptions_total", preempted), ("request_success_total", finished)):
        assert value(last, series, engine=number) - value(first, series, engine=number) == gained
    own = replay(name, number=number).own
    assert (own["preemptions"], own["requests_finished"]) == (preempted, finished)


def test_a_server_with_a_past_is_counted_from_first_sight():
    """The exhausted server had finished 371 requests before anybody looked: these are not ours."""
    assert value(polls(EXHAUSTION)[0].body, "request_success_total") == 371
    assert replay(EXHAUSTION, until=0).own["requests_finished"] == 0


# Own counters, by hand.


def test_first_sight_of_an_engine_adds_nothing():
    """What it counted before may be years old."""
    assert remembered(*counted(5000)).own["preemptions"] == 0
    assert remembered(*counted(5000, 5003)).own["preemptions"] == 3


def test_a_fallen_counter_without_a_start_time_adds_its_new_value():
    """10 to 14 are four, then a reset of which seven are visible."""
    assert remembered(*counted(10, 14, 7, 8)).own["preemptions"] == 4 + 7 + 1


def test_a_new_start_time_adds_the_whole_value_even_where_nothing_fell():
    """The new process has overtaken the old one between two polls."""
    before, after = counted(10, 14, start_time=1000.0), counted(20, 21, start_time=2000.0)
    history = remembered(*before, *((t + 60, text) for t, text in after))
    assert history.own["preemptions"] == 4 + 20 + 1
    assert history.restarts == 1


def test_the_creation_time_of_counters_stands_in_for_a_missing_start_time():
    """Some servers print no process metrics; their counters still say when they began."""
    history = remembered(
        (0, body(engine(preemptions=10, created=1000.25))),
        (1, body(engine(preemptions=12, created=1000.25))),
        (2, body(engine(preemptions=30, created=1060.5))),
    )
    assert history.own["preemptions"] == 2 + 30
    assert history.restarts == 1


def test_a_cut_off_body_with_the_creation_time_of_another_counter_is_no_new_process():
    """Each counter has its own, some milliseconds apart: a cut body may show that of preemptions only."""
    whole = body(engine(preemptions=10, created=1000.002))
    short = b'vllm:num_preemptions_created{engine="0",model_name="demo-7b"} 1000.001\n' + cut(whole, "gen")
    assert Reader().read(short).truncated
    history = remembered((0, whole), (1, short), (2, whole))
    assert (history.own["preemptions"], history.restarts) == (0, 0)


def test_counters_that_begin_again_at_every_poll_count_every_visible_preemption_once():
    """A crash loop: each life shows its own count, the first of them is not ours."""
    lives = [
        (10.0 * life, body(engine(preemptions=count), start_time=1000.0 + life))
        for life, count in enumerate([9, 1, 4, 4, 2])
    ]
    history = remembered(*lives)
    assert history.own["preemptions"] == 1 + 4 + 4 + 2
    assert history.restarts == 4


def test_a_counter_that_appears_on_a_known_engine_adds_its_whole_value():
    """Ray and the Rust front end create a counter at its first event; its rate reaches back to before."""
    history = remembered(
        (0, body(engine(running=1))),
        (10, body(engine(running=1))),
        (20, body(engine(running=1, preemptions=6))),
    )
    assert history.own["preemptions"] == 6
    assert history.increase("preemptions", history.window_start(0)) == 6
    assert history.rate("preemptions", history.window_start(0)) == pytest.approx(6 / 20)


def test_before_a_late_counter_appears_it_is_unknown():
    """A counter nobody has seen is not zero."""
    history = remembered((0, body(engine(running=1))), (1, body(engine(running=1))))
    assert "preemptions" not in history.own
    assert history.increase("preemptions", 0) is None


def test_a_cut_off_first_body_makes_no_counter_late():
    """What the whole body shows was there before: its 5000 preemptions are not new."""
    whole = body(engine(running=1, kv=0.5, preemptions=5000))
    history = remembered((0, cut(whole, "num_preemptions")), (1, whole), (2, whole))
    assert history.own["preemptions"] == 0


def test_windows_begin_at_the_first_whole_body():
    """So that a rate is known a poll later, not after the window has left the cut body behind."""
    first = body(engine(running=1, preemptions=5000))
    later = body(engine(running=1, preemptions=5004))
    history = remembered((0, cut(first, "num_preemptions")), (1, first), (3, later))
    assert history.rate("preemptions", history.window_start(-57)) == 4 / 2


def test_a_body_cut_off_later_loses_and_doubles_nothing():
    """The counter waits for the next whole body."""
    first, later = (body(engine(running=1, preemptions=count)) for count in (10, 13))
    history = remembered((0, first), (1, cut(later, "num_preemptions")), (2, later))
    assert history.own["preemptions"] == 3


def test_a_counter_that_was_no_number_at_first_sight_is_not_late():
    """NaN says nothing of how long it has been counted."""
    history = remembered(*counted(math.nan, 5000, 5002))
    assert history.own["preemptions"] == 2


def test_numbers_that_nothing_can_have_counted_are_left_out():
    """Adding up 1e308 at every reset would end at infinity."""
    history = remembered(*counted(3, 1e308, 4, 1e308, 1e300, 5))
    assert history.own["preemptions"] == 2


def test_a_whole_body_is_not_needed_to_see_a_new_process():
    """Its first body is cut off before its start time: what it counted is added once all the same."""
    old = body(engine(running=1, prompt_tokens=900, steps=90), start_time=1000.0)
    young = body(engine(running=1, prompt_tokens=50, steps=5), start_time=2000.0)
    without = body(engine(running=1, prompt_tokens=50, steps=5)) + b"vllm:num_pree"
    history = remembered((0, old), (60, without), (61, young), (62, young))
    assert history.own["prompt_tokens"] == 50
    assert history.restarts == 1


# Preemptions that the gauges betray.


def test_the_gauges_betray_a_mass_preemption_before_the_counter_moves():
    """Running falls 27 -> 19 -> 8, waiting rises 5 -> 13 -> 23, one finishes: 8 and 10 preemptions."""
    shown = [poll for poll in polls(EXHAUSTION) if 6.5 < poll.t < 8.5]
    series = (
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions_total",
        "request_success_total",
    )
    assert [[value(poll.body, name) for name in series] for poll in shown] == [
        [27, 5, 0, 371],
        [19, 13, 0, 371],
        [8, 23, 0, 372],
    ]
    assert replay(EXHAUSTION, until=6.6).inferred == 0
    assert replay(EXHAUSTION, until=7.1).inferred == min(27 - 19, 13 - 5) == 8
    later = replay(EXHAUSTION, until=8.5)
    assert later.inferred == 8 + min(19 - 8 - 1, 23 - 13) == 18
    assert later.own["preemptions"] == 0


@pytest.mark.parametrize("name", [CALM, QUEUEING])
def test_nothing_is_inferred_where_nothing_is_preempted(name):
    """Neither in a calm run nor where twenty requests wait for a seat."""
    assert replay(name).inferred == 0


def swapped(*, kv: float = 0.95, finished: int = 0, later: float = 1.0, start_time: float = 1000.0) -> float:
    """What is inferred when ten requests stop running and ten more wait."""
    return remembered(
        (0, body(engine(running=20, waiting=0, kv=kv, finished=50), start_time=1000.0)),
        (later, body(engine(running=10, waiting=10, kv=0.6, finished=50 + finished), start_time=start_time)),
    ).inferred


def test_ten_that_stop_running_and_ten_more_that_wait_are_ten_preemptions():
    """The plain case that the others differ from."""
    assert swapped() == 10


def test_finished_requests_explain_a_fall_of_running():
    """Six of the ten finished, and others came to wait."""
    assert swapped(finished=6) == 4


def test_nothing_is_inferred_without_a_full_cache():
    """Clients that give up and try again look the same."""
    assert swapped(kv=0.89) == 0


def test_nothing_is_inferred_across_a_gap():
    """In six seconds anything may have happened."""
    assert swapped(later=6.0) == 0


def test_nothing_is_inferred_across_a_restart():
    """The new process has its own gauges."""
    assert swapped(start_time=2000.0, finished=-45) == 0


# KV usage.


def test_peaks_and_polls_of_kv_usage_are_those_of_the_recordings():
    """Exactly 1.0 in the exhaustion, 0.38 in the calm run; every good poll falls into one bucket."""
    for name, peak in ((EXHAUSTION, 1.0), (CALM, 76 / 199)):
        usages = [value(poll.body, "kv_cache_usage_perc") for poll in polls(name)]
        history = replay(name)
        assert history.highest("kv_usage", 0) == max(usages) == pytest.approx(peak, abs=1e-9)
        bounds = (-1.0, *KV_BOUNDS)
        assert history.kv_polls == [
            *(sum(low < usage <= high for usage in usages) for low, high in itertools.pairwise(bounds)),
            0,
        ]
        assert sum(history.kv_polls) == len(usages)
        assert history.kv_sum == pytest.approx(sum(usages))


def test_impossible_kv_usage_stays_out_of_everything():
    """Usage of 42 is untrusted: not the maximum, not in the mean, in no bucket."""
    history = remembered(*((float(t), body(engine(running=1, kv=kv))) for t, kv in enumerate([0.5, 42, 0.7])))
    assert history.highest("kv_usage", 0) == 0.7
    assert history.mean("kv_usage", 0) == pytest.approx(0.6)
    assert sum(history.kv_polls) == 2
    assert history.kv_sum == pytest.approx(1.2)


# Windows.


def test_rates_go_by_real_time_over_failed_polls():
    """After 24 failed polls the 50 preemptions of 25 seconds are two a second."""
    history = remembered(
        (0, body(engine(preemptions=100))),
        (1, body(engine(preemptions=101))),
        (26, body(engine(preemptions=151))),
    )
    assert history.rate("preemptions", history.window_start(1)) == 50 / 25
    assert history.rate("preemptions", history.window_start(26 - 60)) == 51 / 26


def test_a_window_reaches_back_to_the_poll_before_it():
    """Between two polls far apart nothing is lost; a gauge's window has only what was polled inside it."""
    history = remembered(*((t, body(engine(kv=kv))) for t, kv in ((0.0, 0.9), (50.0, 0.5), (100.0, 0.6))))
    assert history.window_start(40) == 0
    assert history.first_index_since(40) == 1
    assert history.window_start(50) == history.first_index_since(50) == 1
    assert history.first_index_since(1000) == 2


def test_a_window_does_not_reach_into_the_life_before_a_restart():
    """What the new process showed first is not a rate: nobody knows since when."""
    old, young = counted(10, 14, start_time=1000.0), counted(90, 93, start_time=2000.0)
    history = remembered(*old, *((t + 2, text) for t, text in young))
    assert history.window_start(0) == history.first_index_since(0) == 2
    assert history.rate("preemptions", history.window_start(0)) == 3


def test_a_window_of_one_poll_has_no_rate():
    """There is no time in it."""
    history = remembered(*counted(3))
    assert history.rate("preemptions", 0) is None
    assert history.increase("preemptions", 0) == 0


def test_share_of_polls_counts_only_known_ones():
    """Two of three known usages are at least 0.9."""
    texts = [body(engine(running=1, kv=kv)) for kv in (0.9, None, 0.95, 0.2)]
    history = remembered(*((float(t), text) for t, text in enumerate(texts)))
    assert history.share("kv_usage", 0, 0.9) == 2 / 3
    assert history.share("requests_waiting", 0, 1) is None


# The ring and the minutes.


def snapshot(**values: float) -> Snapshot:
    """A cheap snapshot."""
    return Snapshot(EngineKey("m", "0"), values)


def test_memory_is_bounded_and_windows_stay_right():
    """20,000 polls, one a second; in the end ten minutes are still there, and their rates are right."""
    history = History()
    for poll in range(20_000):
        values = {"kv_usage": poll % 100 / 100, "preemptions": 3.0 * poll, "requests_running": 1.0}
        history.observe(float(poll), snapshot(**values), 1000.0)
        assert len(history.times) <= 660 + 1 + PIECE
    assert all(len(column) == len(history.times) for column in history.columns.values())
    assert history.times[0] <= 19_999 - 660
    assert history.rate("preemptions", history.window_start(19_999 - 600)) == 3
    assert history.times[history.window_start(19_999 - 600)] == 19_399


def test_memory_is_bounded_at_any_pace():
    """A hundred polls a second: the ring reaches back less far, and no further than its length."""
    history = History()
    for poll in range(5000):
        history.observe(poll / 100, snapshot(requests_running=1.0), None)
    assert KEEP_POLLS <= len(history.times) <= KEEP_POLLS + PIECE


def test_a_restart_stays_the_limit_of_windows_while_the_ring_is_cut():
    """1000 polls of the old process and 700 of the new one: no window reaches back to the old one's."""
    history = History()
    for poll in range(1700):
        start, count = (1000.0, 10.0 * poll) if poll < 1000 else (2000.0, poll - 1000.0)
        history.observe(float(poll), snapshot(preemptions=count), start)
        if poll > 1000:
            begin = history.window_start(-1.0)
            assert history.times[begin] >= 1000
            assert history.rate("preemptions", begin) == 1
    assert history.own["preemptions"] == 9990 + 699


# Signs of work.


def test_a_long_prefill_moves_only_the_kv_usage():
    """That is progress, too."""
    history = remembered(
        *((float(t), body(engine(running=1, kv=t / 10, steps=5, prompt_tokens=7))) for t in range(4))
    )
    assert history.moved_at == 3


def test_a_body_that_is_cut_off_is_no_sign_of_work():
    """Neither what goes missing nor what is back has moved."""
    whole = body(engine(running=1, kv=0.5, steps=5, generation_tokens=7))
    history = remembered(
        (0, whole), (1, cut(whole, "generation")), (2, whole), (3, cut(whole, "kv")), (4, whole)
    )
    assert history.moved_at == 0


def test_a_restart_is_a_sign_of_work():
    """The new process has not stood still since the old one did."""
    history = remembered(
        (0, body(engine(running=1, steps=5), start_time=1000.0)),
        (50, body(engine(running=1, steps=5), start_time=2000.0)),
    )
    assert history.moved_at == 50


# Whatever a server prints.

NUMBERS = st.one_of(
    st.none(),
    st.integers(0, 50).map(float),
    st.floats(0, 1e6),
    st.floats(0, allow_nan=False, allow_infinity=False),
)
RATIOS = st.one_of(st.none(), st.floats(0, 1))
ORIGINS = st.sampled_from([None, 1000.0, 2000.0, 3000.0])
POLL = st.tuples(
    st.floats(0, 100),
    ORIGINS,
    st.booleans(),
    st.fixed_dictionaries(dict.fromkeys((*COUNTERS[:12], "requests_running", "requests_waiting"), NUMBERS)),
    RATIOS,
)


def taken(sequence: Iterable[tuple]) -> Iterable[tuple[float, Snapshot, float | None, bool]]:
    """Times rise by the first number; what is None is absent."""
    t = 0.0
    for seconds, origin, whole, numbers, usage in sequence:
        t += seconds
        values = {
            name: number for name, number in {**numbers, "kv_usage": usage}.items() if number is not None
        }
        yield t, snapshot(**values), origin, whole


@settings(deadline=None, max_examples=150)
@given(st.lists(POLL, max_size=25))
def test_own_counters_never_fall_and_are_always_numbers(sequence):
    """Whatever the order of processes, cut bodies, resets and absurd numbers."""
    history = History()
    before = {}
    for t, one, origin, whole in taken(sequence):
        history.observe(t, one, origin, whole=whole)
        assert all(math.isfinite(count) for count in history.own.values())
        assert all(history.own[name] >= count for name, count in before.items())
        assert history.inferred >= 0
        assert sum(history.kv_polls) <= len(sequence)
        before = dict(history.own)


@settings(deadline=None, max_examples=50)
@given(st.lists(POLL, min_size=1, max_size=25))
def test_the_same_polls_make_the_same_history(sequence):
    """No clock and no chance in it."""
    one, other = History(), History()
    for history in (one, other):
        for t, shown, origin, whole in taken(sequence):
            history.observe(t, shown, origin, whole=whole)
    assert (one.own, one.times, one.inferred) == (other.own, other.times, other.inferred)
    assert repr(one.columns) == repr(other.columns)


def test_the_mean_of_any_window_is_that_of_its_known_polls():
    """Long enough for the ring to be moved, with polls that lack a gauge, and a load that ends."""
    requests = [None if t % 97 == 0 else (t * 7) % 31 for t in range(900)]
    history = remembered(*((float(t), body(engine(running=n, kv=0.5))) for t, n in enumerate(requests)))
    wrong = []
    for start in range(len(history.times)):
        known = [n for n in requests[-len(history.times) + start :] if n is not None]
        wanted = sum(known) / len(known) if known else None
        if history.mean("requests_running", start) != pytest.approx(wanted, rel=1e-12):
            wrong.append((start, wanted))
    assert len(history.times) < len(requests)
    assert wrong == []
