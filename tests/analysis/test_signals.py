"""The signals: right values by hand and from recordings, unknown where nothing can be known."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import body, engine
from support.real_recordings import (
    CALM,
    EXHAUSTION,
    QUEUEING,
    RESTART,
    TWO_API_SERVERS,
    TWO_ENGINES,
    at,
    only,
    polls,
    replayed,
    value,
)

from exporter.analysis.history import COUNTERS, History
from exporter.analysis.signals import NAMES, Signals, Windows, compute, stale
from exporter.vllm.exposition import CacheConfig, EngineKey, Reader, Snapshot

Polled = Iterable[tuple[float, bytes]]


def signals(polled: Polled, *, facts: Mapping[str, object] | None = None, engines: int = 1) -> Signals:
    """The signals after these polls of one engine."""
    reader, history = Reader(), History()
    for t, text in polled:
        exposition = reader.read(text)
        (snapshot,) = exposition.engines.values()
        history.observe(t, snapshot, exposition.start_time, whole=not exposition.truncated)
    return compute(history, facts or {}, engines=engines)


# Recordings, against plain arithmetic on the bodies.


def moved(name: str, series: str, until: float, seconds: float) -> tuple[float, float]:
    """How far a counter moved over a window, and in how many seconds.

    The window ends with the last poll at or before `until`, and begins with the last one at or before
    `seconds` earlier, or with the first.
    """
    known = [poll for poll in polls(name) if poll.t <= until]
    last = known[-1]
    first = next((poll for poll in reversed(known) if poll.t <= last.t - seconds), known[0])
    return value(last.body, series) - value(first.body, series), last.t - first.t


RATES = {
    "preemptions_per_second": "num_preemptions_total",
    "requests_finished_per_second": "request_success_total",
    "generation_tokens_per_second": "generation_tokens_total",
    "prompt_tokens_per_second": "prompt_tokens_total",
    "engine_steps_per_second": "iteration_tokens_total_count",
}
MEANS = {
    "inter_token_latency_mean_seconds": "inter_token_latency_seconds",
    "time_to_first_token_mean_seconds": "time_to_first_token_seconds",
    "queue_time_mean_seconds": "request_queue_time_seconds",
}


@pytest.mark.parametrize("until", [20, 50, 70, 90, 119, 148])
def test_rates_and_means_of_the_exhaustion_are_those_of_its_bodies(until):
    """Over sixty seconds of real time, or since the first poll."""
    known = only(at(replayed(EXHAUSTION), until)).signals.known()
    for name, series in RATES.items():
        increase, seconds = moved(EXHAUSTION, series, until, 60)
        assert known[name] == pytest.approx(increase / seconds), name
    for name, series in MEANS.items():
        total, _ = moved(EXHAUSTION, f"{series}_sum", until, 60)
        count, _ = moved(EXHAUSTION, f"{series}_count", until, 60)
        assert known[name] == pytest.approx(total / count), name
    preempted, _ = moved(EXHAUSTION, "num_preemptions_total", until, 300)
    finished, _ = moved(EXHAUSTION, "request_success_total", until, 300)
    assert known["preemptions_per_finished_request"] == pytest.approx(preempted / finished)


def test_the_storm_at_its_height():
    """At 69.67 s: 353 preemptions in the sixty seconds before it, two and a half per finished request."""
    known = only(at(replayed(EXHAUSTION), 70)).signals
    assert moved(EXHAUSTION, "num_preemptions_total", 70, 60) == (353, pytest.approx(60.17, abs=1e-3))
    assert known.preemptions_total == 358
    assert known.preemptions_per_second == pytest.approx(353 / 60.17, abs=1e-3)
    assert known.preemptions_per_finished_request == pytest.approx(358 / 140)
    assert (known.requests_running, known.requests_waiting, known.requests_deferred) == (8, 23, 0)
    assert known.kv_usage_ratio == 154 / 199
    assert known.kv_capacity_tokens == 6400
    assert known.kv_max_concurrency == 6400 / 2048
    assert known.progress_idle_seconds == 0


@pytest.mark.parametrize("until", [7, 20, 70, 148])
def test_kv_maximum_and_mean_of_the_exhaustion_are_those_of_its_polls(until):
    """Of the polls of the last sixty seconds."""
    reading = at(replayed(EXHAUSTION), until)
    usages = [
        value(poll.body, "kv_cache_usage_perc")
        for poll in polls(EXHAUSTION)
        if reading.t - 60 <= poll.t <= reading.t
    ]
    known = only(reading).signals
    assert known.kv_usage_max_ratio == max(usages)
    assert known.kv_usage_mean_ratio == pytest.approx(sum(usages) / len(usages))


def test_the_recomputed_share_of_the_exhaustion():
    """Each victim loses what is generated until the next request ends, which is less than it holds."""
    until = 70
    end = at(replayed(EXHAUSTION), until).t
    window = [poll for poll in polls(EXHAUSTION) if end - 60 <= poll.t <= end]
    begin = max((poll for poll in polls(EXHAUSTION) if poll.t <= end - 60), key=lambda poll: poll.t)
    window = window if window[0] is begin else [begin, *window]
    held = 6400 * sum(value(poll.body, "kv_cache_usage_perc") for poll in window)
    held /= sum(value(poll.body, "num_requests_running") for poll in window)
    generated, prompts, finished, found = (
        moved(EXHAUSTION, series, until, 60)[0]
        for series in (
            "generation_tokens_total",
            "prompt_tokens_total",
            "request_success_total",
            "prompt_tokens_cached_total",
        )
    )
    again = 353 * min(held, generated / (353 + finished))
    assert again < 353 * held / 2
    assert only(at(replayed(EXHAUSTION), until)).signals.recomputed_ratio == pytest.approx(
        again / (again + generated + prompts - found)
    )


def test_a_calm_server_has_no_preemptions():
    """Neither a number nor a rate nor a share, at any poll; its cache is never more than 38 % full."""
    for reading in replayed(CALM)[1:]:
        known = only(reading).signals
        assert known.preemptions_total == known.preemptions_per_second == 0
        assert known.recomputed_ratio == known.preemptions_inferred_per_second == 0
        assert known.kv_usage_max_ratio <= 0.382
    assert only(replayed(CALM)[-1]).signals.requests_finished_total == 371


def test_a_queue_for_seats_is_seen_in_its_waiting_time():
    """Twenty wait for one of four seats while 5 % of the cache are full."""
    known = only(at(replayed(QUEUEING), 60)).signals
    total, _ = moved(QUEUEING, "request_queue_time_seconds_sum", 60, 60)
    count, _ = moved(QUEUEING, "request_queue_time_seconds_count", 60, 60)
    assert (known.requests_running, known.requests_waiting) == (4, 20)
    assert known.queue_time_mean_seconds == pytest.approx(total / count)
    assert known.queue_time_mean_seconds > 1
    assert known.kv_usage_max_ratio < 0.06
    assert known.kv_capacity_tokens == 32_000


@pytest.mark.parametrize("name", [CALM, QUEUEING, EXHAUSTION, RESTART, TWO_API_SERVERS, "0.26.0-ramp"])
def test_a_cache_that_swings_has_no_time_to_full(name):
    """Not when a load begins and fills it with its first prompts either."""
    for reading in replayed(name):
        for one in reading.engines.values():
            assert one.signals.kv_seconds_to_full is None


def test_each_of_two_engines_has_its_own_capacity():
    """240 blocks in all, of which the label tells one engine's share."""
    for one in replayed(TWO_ENGINES)[-1].engines.values():
        assert one.cache.num_gpu_blocks == 240
        assert one.signals.kv_capacity_tokens == 3840
        assert not one.signals.kv_capacity_is_estimate
        assert one.signals.kv_max_concurrency == 3840 / 2048


@pytest.mark.parametrize(
    "name", [EXHAUSTION, CALM, QUEUEING, RESTART, TWO_ENGINES, TWO_API_SERVERS, "0.32.0-exhaustion"]
)
def test_no_signal_of_a_recording_is_negative_or_absurd(name):
    """Restarts and gaps included; these small servers did at most 300 steps and 6000 tokens a second."""
    for reading in replayed(name):
        for one in reading.engines.values():
            known = one.signals.known()
            assert all(math.isfinite(number) and number >= 0 for number in known.values())
            assert known.get("preemptions_per_second", 0) < 12
            assert known.get("engine_steps_per_second", 0) < 500
            assert known.get("prompt_tokens_per_second", 0) < 10_000
            assert known.get("kv_usage_ratio", 0) <= known.get("kv_usage_max_ratio", 0) <= 1


# Windows.


def test_a_window_shrinks_to_what_was_seen():
    """Six preemptions in the three seconds since first sight are two a second."""
    polled = [(float(t), body(engine(preemptions=2 * t))) for t in range(4)]
    assert signals(polled).preemptions_per_second == 2
    assert signals(polled[:1]).preemptions_per_second is None


def test_windows_are_as_long_as_asked():
    """One preemption a second, then for ten seconds two."""
    history = History()
    for t in range(101):
        values = {"preemptions": float(t + max(0, t - 90)), "requests_finished": t / 10}
        history.observe(float(t), Snapshot(EngineKey("m", "0"), values), None)
    assert compute(history, {}, windows=Windows(10, 20, 40)).preemptions_per_second == 2
    assert compute(history, {}, windows=Windows(20, 20, 40)).preemptions_per_second == 1.5
    assert compute(
        history, {}, windows=Windows(10, 20, 40)
    ).preemptions_per_finished_request == pytest.approx(15)


def test_a_peak_from_before_an_outage_is_no_peak_of_this_minute():
    """The target was away for ten minutes, and nobody knows how full it was."""
    known = signals([(0, body(engine(running=1, kv=1.0))), (600, body(engine(running=1, kv=0.2)))])
    assert (known.kv_usage_max_ratio, known.kv_usage_mean_ratio) == (0.2, 0.2)


def test_nothing_is_made_of_a_single_poll_but_what_it_says():
    """No rate, no ratio, no share of anything: unknown is not zero."""
    known = signals([(0, body(engine(running=3, kv=0.5, preemptions=9, generation_tokens=9, finished=9)))])
    assert known.known() == {
        "preemptions_total": 0,
        "requests_finished_total": 0,
        "requests_running": 3,
        "kv_usage_ratio": 0.5,
        "kv_usage_max_ratio": 0.5,
        "kv_usage_mean_ratio": 0.5,
        "progress_idle_seconds": 0,
    }


def test_queue_time_is_that_of_the_shortest_window_with_a_scheduled_request():
    """Of the last minute, else of the last five, else of the last ten."""

    def polled(until: int) -> Polled:
        """Nine seconds of waiting for three requests at 5 s, one second for one at 400 s."""
        for t in range(0, until + 1, 5):
            queue = (0.0, 0) if t < 5 else (9.0, 3) if t < 400 else (10.0, 4)
            yield float(t), body(engine(running=1, queue=queue))

    means = [
        signals(polled(until)).queue_time_mean_seconds for until in (0, 60, 65, 300, 310, 400, 900, 1005)
    ]
    assert means == [None, 3, 3, 3, 3, 1, 1, None]


def test_queue_time_of_a_window_in_between():
    """At 395 s nothing was scheduled for five minutes; the three of the last ten still count."""
    polled = [
        (float(t), body(engine(running=1, queue=(9.0, 3) if t >= 5 else (0.0, 0)))) for t in range(0, 400, 5)
    ]
    assert signals(polled).queue_time_mean_seconds == 3


def test_the_prefix_hit_ratio_is_that_of_the_tokens_asked_for_lately():
    """30 of 120 tokens; the thousand of before first sight do not count."""
    polled = [
        (0, body(engine(running=1, prefix_queries=1000, prefix_hits=1000))),
        (1, body(engine(running=1, prefix_queries=1120, prefix_hits=1030))),
    ]
    assert signals(polled).prefix_cache_hit_ratio == 0.25
    assert signals(polled[:1]).prefix_cache_hit_ratio is None


def test_old_releases_tell_the_prefix_hit_ratio_as_a_gauge():
    """Before 0.8 there were no counters of it."""
    text = (
        b'vllm:gpu_prefix_cache_hit_rate{model_name="m"} 0.125\nvllm:num_requests_running{model_name="m"} 1\n'
    )
    assert signals([(0, text), (1, text)]).prefix_cache_hit_ratio == 0.125


# Harm.


def test_nothing_finished_leaves_the_ratio_unknown():
    """Preemptions by no finished request are not infinitely many."""
    polled = [(float(t), body(engine(preemptions=t, finished=7))) for t in range(5)]
    assert signals(polled).preemptions_per_finished_request is None


def storm(cache: Mapping[str, object] | None = None, **more: object) -> Polled:
    """Two polls ten seconds apart: half of the pool in use by four requests, 30 preemptions, 6000 tokens."""
    for t in (0, 10):
        yield (
            float(t),
            body(
                engine(running=4, kv=0.5, preemptions=3 * t, generation_tokens=600 * t, cache=cache, **more)
            ),
        )


OFF = {"enable_prefix_caching": False}


def test_without_a_prefix_cache_a_victim_loses_all_it_held():
    """Each of the four holds 0.5 x 8000 / 4 = 1000 tokens; 30,000 again beside 6000 new."""
    polled = storm({"kv_cache_size_tokens": 8000, **OFF})
    assert signals(polled).recomputed_ratio == pytest.approx(30 / 36)


@pytest.mark.parametrize("cache", [{}, {"enable_prefix_caching": True}], ids=["unknown", "on"])
def test_with_a_prefix_cache_it_loses_what_others_generate_until_the_next_request_ends(cache):
    """6000 tokens between 30 preemptions and 10 finished ones: 150 each, 4500 again; 3000 of new prompts."""
    polled = [
        (
            float(t),
            body(
                engine(
                    running=4,
                    kv=0.5,
                    preemptions=3 * t,
                    finished=t,
                    generation_tokens=600 * t,
                    prompt_tokens=300 * t,
                    cache={"kv_cache_size_tokens": 8000, **cache},
                )
            ),
        )
        for t in (0, 10)
    ]
    assert signals(polled).recomputed_ratio == pytest.approx(4.5 / (4.5 + 6 + 3))


def test_the_recomputed_share_from_lengths_where_the_capacity_is_unknown():
    """A prompt of 200 in the mean, and half of an answer of 200: 300 tokens held, 9000 again."""
    lengths = {
        "prompt_lengths": ({500: 10, math.inf: 10}, 2000),
        "output_lengths": ({500: 10, math.inf: 10}, 2000),
    }
    assert signals(storm(OFF, **lengths)).recomputed_ratio == pytest.approx(9 / 15)


def test_the_recomputed_share_is_unknown_without_either():
    """Nobody knows what a victim held."""
    assert signals(storm()).recomputed_ratio is None


def test_the_recomputed_share_of_nothing_computed_is_unknown():
    """A victim that held nothing yet, and not one token put out."""
    polled = [
        (
            float(t),
            body(
                engine(
                    running=1,
                    kv=0.0,
                    preemptions=t,
                    generation_tokens=9,
                    cache={"kv_cache_size_tokens": 8000},
                )
            ),
        )
        for t in range(3)
    ]
    assert signals(polled).recomputed_ratio is None


def test_without_preemptions_nothing_is_recomputed():
    """Whatever the requests hold."""
    polled = [(float(t), body(engine(preemptions=5, generation_tokens=t))) for t in range(3)]
    assert signals(polled).recomputed_ratio == 0


def test_latencies_are_means_over_the_window():
    """200 ms for 10 tokens, 3 s for 2 first ones; what came before first sight does not count."""
    polled = [
        (0, body(engine(running=1, inter_token=(100.0, 1000), first_token=(50.0, 10)))),
        (1, body(engine(running=1, inter_token=(100.2, 1010), first_token=(53.0, 12)))),
    ]
    known = signals(polled)
    assert known.inter_token_latency_mean_seconds == pytest.approx(0.02)
    assert known.time_to_first_token_mean_seconds == pytest.approx(1.5)


def test_the_time_without_progress_is_counted_from_the_last_sign_of_work():
    """Steps until 3 s, then nothing until 10 s."""
    polled = [(float(t), body(engine(running=1, kv=0.5, steps=min(t, 3)))) for t in range(11)]
    assert signals(polled).progress_idle_seconds == 7


# The time until the cache is full.


def filling(
    usages: Iterable[float], running: Iterable[float] | float = 4, *, seconds: float = 1.0
) -> float | None:
    """The time to full after polls with these usages."""
    counts = itertools.repeat(running) if isinstance(running, int | float) else running
    return signals(
        (number * seconds, body(engine(running=count, kv=usage)))
        for number, (usage, count) in enumerate(zip(usages, counts, strict=False))
    ).kv_seconds_to_full


def test_a_line_reaches_the_top_when_it_does():
    """From 0.2, 0.01 a second: at 0.4 there are 60 seconds left; polled every five seconds just as well."""
    assert filling([0.2 + 0.01 * t for t in range(21)]) == pytest.approx(60)
    assert filling([0.2 + 0.05 * t for t in range(5)], seconds=5) == pytest.approx(60)


def test_a_line_with_some_noise_is_a_line():
    """One percent up and down."""
    noisy = [0.2 + 0.01 * t + (0.01 if t % 2 else -0.01) for t in range(31)]
    assert filling(noisy) == pytest.approx(50, rel=0.1)


def test_a_swinging_cache_has_no_time_to_full_even_where_it_ends_higher():
    """Between 0.7 and 1 in a storm."""
    assert filling([0.7, 0.95, 0.75, 1.0, 0.72, 0.9, 0.8, 0.97] * 4) is None


def test_a_falling_or_flat_cache_has_no_time_to_full():
    """It will not be full."""
    assert filling([0.9 - 0.01 * t for t in range(21)]) is None
    assert filling([0.5] * 21) is None


def test_with_nothing_running_there_is_no_time_to_full():
    """What fills the cache then is no request."""
    assert filling([0.2 + 0.01 * t for t in range(21)], running=0) is None


def test_the_first_prompts_of_a_load_are_no_line():
    """A minute of nothing, then a jump: neither the jump nor its first seconds tell when it will be full."""
    zeros = [0.0] * 55
    for jump in ([0.38], [0.1, 0.38], [0.1, 0.2, 0.3, 0.38], [0.05 * number for number in range(1, 13)]):
        assert filling([*zeros, *jump], [*[0] * 55, *[8] * len(jump)]) is None


def test_a_line_counts_from_when_something_runs():
    """Forty seconds idle, then 0.01 a second for twenty: the idle time does not flatten the slope."""
    usages = [*[0.0] * 40, *[0.2 + 0.01 * t for t in range(21)]]
    assert filling(usages, [*[0] * 40, *[4] * 21]) == pytest.approx(60)


def test_a_line_of_more_than_a_day_is_none():
    """A slope that small is noise."""
    assert filling([0.2 + 1e-6 * t for t in range(61)]) is None


def test_an_unknown_usage_has_no_time_to_full():
    """The last body does not tell how full the cache is; one missing in between does not matter."""
    line = [0.2 + 0.01 * t for t in range(21)]
    assert filling([*line, None]) is None
    assert filling([*line[:10], None, *line[11:]]) == pytest.approx(60)


# Capacity.


def capacity(*, engines: int = 1, facts: Mapping[str, object] | None = None, **cache: object) -> Signals:
    """The signals of one poll with this configuration of the cache."""
    return signals([(0, body(engine(running=1, cache=cache)))], facts=facts, engines=engines)


def test_capacity_is_what_the_server_says():
    """Since 0.24 it says it for each engine, whatever blocks there are in all."""
    known = capacity(kv_cache_size_tokens=3840, num_gpu_blocks=240, block_size=32, engines=2)
    assert (known.kv_capacity_tokens, known.kv_capacity_is_estimate) == (3840, False)


def test_capacity_is_estimated_from_blocks():
    """Without the one that is always reserved."""
    known = capacity(num_gpu_blocks=200, block_size=16)
    assert (known.kv_capacity_tokens, known.kv_capacity_is_estimate) == (199 * 16, True)


def test_blocks_are_shared_by_data_parallel_engines():
    """The label is their sum; each has a block reserved."""
    assert capacity(num_gpu_blocks=400, block_size=16, engines=4).kv_capacity_tokens == 99 * 16


@pytest.mark.parametrize(
    "cache",
    [
        {},
        {"num_gpu_blocks": 200},
        {"block_size": 16},
        {"num_gpu_blocks": "None", "block_size": 16},
        {"num_gpu_blocks": 1, "block_size": 16},
    ],
)
def test_capacity_is_unknown_without_both_numbers(cache):
    """It is not zero, and no estimate either."""
    known = capacity(**cache)
    assert (known.kv_capacity_tokens, known.kv_capacity_is_estimate) == (None, False)


def test_concurrency_is_what_the_server_says_or_follows_from_the_longest_request():
    """Without either it is unknown."""
    assert capacity(kv_cache_size_tokens=6400, kv_cache_max_concurrency=3.125).kv_max_concurrency == 3.125
    assert capacity(kv_cache_size_tokens=6400, facts={"max_model_len": 1600}).kv_max_concurrency == 4
    assert capacity(kv_cache_size_tokens=6400).kv_max_concurrency is None
    assert capacity(facts={"max_model_len": 1600}).kv_max_concurrency is None


# What is left.


def test_stale_signals_are_the_own_counters():
    """All else was measured and does not hold for ever."""
    known = only(at(replayed(EXHAUSTION), 70)).signals
    assert stale(known).known() == {"preemptions_total": 358, "requests_finished_total": 140}


def test_known_signals_are_those_that_are_not_none():
    """Zero is known."""
    assert Signals(preemptions_total=0.0, requests_running=None).known() == {"preemptions_total": 0.0}
    assert set(only(at(replayed(EXHAUSTION), 148)).signals.known()) <= {*NAMES}


# Whatever a server prints.

ANY = st.one_of(
    st.none(),
    st.integers(0, 100).map(float),
    st.floats(0, 1e9),
    st.floats(0, allow_nan=False, allow_infinity=False),
)
CACHES = st.one_of(
    st.none(),
    st.builds(
        CacheConfig,
        block_size=st.one_of(st.none(), st.integers(1, 10**308)),
        num_gpu_blocks=st.one_of(st.none(), st.integers(1, 10**308)),
        kv_cache_size_tokens=st.one_of(st.none(), st.integers(1, 10**308)),
    ),
)
POLL = st.tuples(
    st.one_of(st.floats(0, 100), st.just(0.0), st.floats(0, 1e-300)),
    st.sampled_from([None, 1.0, 2.0]),
    st.fixed_dictionaries(dict.fromkeys((*COUNTERS[:14], "requests_running", "requests_waiting"), ANY)),
    st.one_of(st.none(), st.floats(0, 1)),
    CACHES,
)


def observed(sequence: Iterable[tuple]) -> Iterable[Signals]:
    """The signals after each poll."""
    history, t = History(), 0.0
    for seconds, origin, numbers, usage, cache in sequence:
        t += seconds
        values = {
            name: number for name, number in {**numbers, "kv_usage": usage}.items() if number is not None
        }
        one = replace(Snapshot(EngineKey("m", "0"), values), cache=cache)
        history.observe(t, one, origin)
        yield compute(history, {"max_model_len": 2048})


@settings(deadline=None, max_examples=150)
@given(st.lists(POLL, max_size=12))
def test_every_signal_is_unknown_or_a_number(sequence):
    """Never NaN, infinite or negative; the maximum of the cache's usage is never below its last."""
    for known in observed(sequence):
        assert all(math.isfinite(number) and number >= 0 for number in known.known().values())
        if known.kv_usage_ratio is not None:
            assert known.kv_usage_max_ratio >= known.kv_usage_ratio


@settings(deadline=None, max_examples=50)
@given(st.lists(POLL, max_size=12))
def test_the_same_polls_have_the_same_signals(sequence):
    """No clock and no chance in them."""
    assert list(observed(sequence)) == list(observed(sequence))
