"""The lengths of requests, from cumulative buckets of a server's whole life to those of the recent past."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import body, cut, engine
from support.real_recordings import EXHAUSTION, history, pipeline, polls, value

from exporter.analysis.history import History
from exporter.analysis.lengths import ENOUGH, PERIOD_SECONDS, LengthHistogram, LengthWindow
from exporter.vllm.exposition import Reader

INF = math.inf


def observed(*taken: tuple[float, dict[float, float], float | None]) -> LengthHistogram | None:
    """The distribution after these polls."""
    window = LengthWindow()
    for t, buckets, total in taken:
        window.observe(t, buckets, total)
    return window.lengths()


def test_without_buckets_there_is_no_distribution():
    """Unknown, not empty."""
    assert LengthWindow().lengths() is None


def test_cumulative_buckets_become_a_distribution():
    """3 up to 100, 4 more up to 200, 1 above."""
    lengths = observed((0, {100.0: 3, 200.0: 7, INF: 8}, 1200.0))
    assert lengths == LengthHistogram(((100.0, 3.0), (200.0, 4.0), (INF, 1.0)), 8.0, 1200.0)
    assert lengths.mean == 150
    assert lengths.detailed


def test_a_quantile_is_the_upper_bound_of_its_bucket():
    """Asked for is whether such a request would fit: the bound does not flatter."""
    buckets = ((100.0, 50.0), (200.0, 49.0), (400.0, 0.0), (800.0, 1.0), (INF, 0.0))
    lengths = LengthHistogram(buckets, 100.0, None)
    assert [lengths.quantile(share) for share in (0.1, 0.5, 0.51, 0.99, 0.995, 1)] == [
        100,
        100,
        200,
        200,
        800,
        800,
    ]


def test_a_quantile_beyond_the_last_bound_is_unknown():
    """A length above everything that is counted apart may be any."""
    lengths = LengthHistogram(((100.0, 98.0), (INF, 2.0)), 100.0, 1.0)
    assert lengths.quantile(0.98) == 100
    assert lengths.quantile(0.99) is None


def test_of_nothing_there_is_neither_mean_nor_quantile():
    """A server before its first request."""
    lengths = observed((0, {100.0: 0, INF: 0}, 0.0))
    assert (lengths.count, lengths.mean, lengths.quantile(0.99)) == (0, None, None)


def test_a_missing_sum_leaves_the_mean_unknown():
    """The buckets alone do not tell it."""
    assert observed((0, {100.0: 3, INF: 3}, None)).mean is None


def test_a_histogram_of_one_bucket_is_not_detailed():
    """Some front ends print nothing but the bucket that holds everything."""
    assert not observed((0, {INF: 9}, 900.0)).detailed


def test_few_recent_requests_are_judged_with_the_whole_life():
    """49 since first sight are not enough, 50 are: before, a thousand short ones count too."""
    old = {100.0: 1000.0, 200.0: 1000.0, INF: 1000.0}
    few = {100.0: 1000.0, 200.0: 1000.0 + ENOUGH - 1, INF: 1000.0 + ENOUGH - 1}
    enough = {100.0: 1000.0, 200.0: 1000.0 + ENOUGH, INF: 1000.0 + ENOUGH}
    assert observed((0, old, 50_000.0), (10, few, 57_350.0)).quantile(0.5) == 100
    recent = observed((0, old, 50_000.0), (10, enough, 57_500.0))
    assert (recent.count, recent.quantile(0.5), recent.mean) == (ENOUGH, 200, 150)


def test_what_is_older_than_half_an_hour_is_forgotten():
    """A hundred requests of 100 tokens in each quarter of the first hour, then only longer ones."""

    def polled(t: float) -> tuple[float, dict[float, float], None]:
        done = t / PERIOD_SECONDS * 100
        return t, {100.0: min(done, 400), 200.0: done, INF: done}, None

    def shortest(quarters: float) -> float | None:
        past = [polled(quarter * PERIOD_SECONDS) for quarter in range(int(quarters) + 1)]
        return observed(*past, polled(quarters * PERIOD_SECONDS)).quantile(0.01)

    assert [shortest(quarters) for quarters in (1, 2, 3, 4, 4.9, 5, 5.9, 6, 7)] == [100] * 5 + [200] * 4
    assert observed(*(polled(quarter * PERIOD_SECONDS) for quarter in range(8))).count == 100


def test_a_fall_of_the_count_begins_a_new_distribution():
    """The ten of the new process, not the 990 less than before."""
    lengths = observed((0, {100.0: 1000.0, INF: 1000.0}, 1.0), (1, {100.0: 0.0, INF: 10.0}, 3000.0))
    assert lengths == LengthHistogram(((100.0, 0.0), (INF, 10.0)), 10.0, 3000.0)


def test_after_a_fall_the_recent_past_is_that_of_the_new_process():
    """1050 since the fall, not the 60 above what the old process had done."""
    lengths = observed((0, {INF: 1000.0}, None), (1, {INF: 10.0}, None), (2, {INF: 1060.0}, None))
    assert lengths.count == 1050


def test_a_new_process_that_has_overtaken_the_old_one_begins_a_new_distribution():
    """Its count did not fall, its start time changed."""
    reader, history = Reader(), History()
    for t, start_time, buckets in ((0, 1000.0, {100: 60, INF: 60}), (9, 2000.0, {100: 0, INF: 120})):
        text = body(engine(running=1, prompt_lengths=(buckets, 1.0)), start_time=start_time)
        exposition = reader.read(text)
        (snapshot,) = exposition.engines.values()
        history.observe(t, snapshot, exposition.start_time)
    assert history.prompt_lengths.lengths().buckets == ((100, 0), (INF, 120))


def test_a_body_that_is_cut_off_changes_no_distribution():
    """Half of the buckets look like a server that has forgotten the other half."""
    reader, history = Reader(), History()
    whole = body(engine(running=1, prompt_lengths=({100: 60, 200: 90, INF: 100}, 1.0)))
    short = cut(whole, 'request_prompt_tokens_bucket{engine="0",model_name="demo-7b",le="200')
    for t, text in enumerate((whole, short)):
        exposition = reader.read(text)
        (snapshot,) = exposition.engines.values()
        history.observe(t, snapshot, exposition.start_time, whole=not exposition.truncated)
    assert snapshot.buckets["prompt_length"] == {100: 60}
    assert history.prompt_lengths.lengths().count == 100


def test_lengths_of_a_recording_are_those_that_its_server_counted():
    """219 requests finished while it was watched; their mean is that of the sums' difference."""
    fed = pipeline(EXHAUSTION)
    for poll in polls(EXHAUSTION):
        fed.feed(poll.t, poll.body, poll.error)
    remembered = history(fed)
    first, last = polls(EXHAUSTION)[0].body, polls(EXHAUSTION)[-1].body
    for window, name in (
        (remembered.prompt_lengths, "request_prompt_tokens"),
        (remembered.output_lengths, "request_generation_tokens"),
    ):
        lengths = window.lengths()
        count, total = (value(last, name + part) - value(first, name + part) for part in ("_count", "_sum"))
        assert lengths.count == count == 219
        assert lengths.mean == pytest.approx(total / count)
        up_to = [
            value(last, f"{name}_bucket", le=le) - value(first, f"{name}_bucket", le=le)
            for le in ("500.0", "1000.0")
        ]
        wanted = 500 if up_to[0] >= 0.99 * 219 else 1000
        assert up_to[1] >= 0.99 * 219
        assert lengths.quantile(0.99) == wanted


NUMBERS = st.floats()
BUCKETS = st.dictionaries(st.one_of(st.floats(0, 1e6), st.just(INF)), NUMBERS, max_size=5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2000), BUCKETS, st.one_of(st.none(), st.floats(0, 1e18))), max_size=6))
def test_whatever_the_buckets_are_a_quantile_is_a_bound_or_unknown(sequence):
    """NaN, infinite and falling counts included."""
    t, window = 0.0, LengthWindow()
    for seconds, buckets, total in sequence:
        t += seconds
        window.observe(t, buckets, total)
        lengths = window.lengths()
        if lengths is not None:
            assert lengths.quantile(0.99) is None or lengths.quantile(0.99) in buckets
            assert lengths.mean is None or lengths.mean >= 0
