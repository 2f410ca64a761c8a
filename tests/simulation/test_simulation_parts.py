"""The small parts: dice, step times, spreads, the pool's queue, workloads and arrivals."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler_cases import check_pool

from exporter.simulation.arrivals import Burst, ClosedLoop, Poisson, Trace
from exporter.simulation.counters import LatencyHistogram
from exporter.simulation.pool import Pool, SharedBlock
from exporter.simulation.rng import Rng
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import (
    Lengths,
    Request,
    WorkloadError,
    parse_trace,
    parse_workload,
    random_requests,
)


def test_dice_fall_as_published():
    """The first numbers of SplitMix64 for seed 1234567, from its reference implementation."""
    dice = Rng(1234567)
    assert [dice.bits() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.integers(0, 2**64), st.integers(1, 10**12))
def test_dice_stay_below_their_bound(seed, bound):
    """Every number from 0 to the bound less one, none beyond."""
    assert 0 <= Rng(seed).below(bound) < bound


def test_exponential_gaps_have_the_mean_and_the_spread_they_should():
    """Mean 1, variance 1, and a share exp(-1) above the mean."""
    dice = Rng(7)
    gaps = [dice.exponential(10**6) / 10**6 for _ in range(40_000)]
    assert sum(gaps) / len(gaps) == pytest.approx(1.0, abs=0.02)
    assert sum((g - 1) ** 2 for g in gaps) / len(gaps) == pytest.approx(1.0, abs=0.05)
    assert sum(g > 1 for g in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)


def test_a_step_costs_a_fixed_part_and_parts_for_what_it_schedules():
    """Whole nanoseconds, swapped blocks included."""
    assert StepTime(1000, 10, 100, 7).of(5, 2, 3) == 1000 + 50 + 200 + 21


@given(st.lists(st.integers(0, 10**13), min_size=1), st.sampled_from([0.05, 0.5, 0.95, 1.0]))
def test_a_quantile_is_right_to_one_percent(values, share):
    """Of what was added, as far as the buckets can tell."""
    spread = LatencyHistogram()
    for value in values:
        spread.add(value)
    rank = max(1, -(-Fraction(share).limit_denominator(100) * len(values) // 1))
    assert spread.quantile(share) == pytest.approx(sorted(values)[int(rank) - 1], rel=0.01)
    assert spread.mean == sum(values) / len(values)


def test_an_empty_spread_knows_nothing():
    """Unknown, not zero."""
    assert LatencyHistogram().mean is None
    assert LatencyHistogram().quantile(0.5) is None


def test_a_spread_stays_small():
    """A hundred thousand latencies over nine decades take a few thousand counts."""
    spread, dice = LatencyHistogram(), Rng(1)
    for power in itertools.islice(itertools.cycle(range(10)), 100_000):
        spread.add(dice.below(10 ** (power + 1)))
    assert len(spread._buckets) < 4000


def test_blank_blocks_are_used_before_cached_ones():
    """What nobody can find goes first."""
    pool = Pool(10, caching=True)
    pool.take(4)
    remnant = pool.release(1, 3)
    pool.take(7)
    assert remnant.blocks == 3
    pool.take(1)
    assert remnant.blocks == 2
    check_pool(pool)


def test_the_longest_unused_is_given_up_first():
    """The first released loses its blocks before the second."""
    pool = Pool(4, caching=True)
    pool.take(4)
    first, second = pool.release(0, 2), pool.release(0, 2)
    pool.take(3)
    assert (first.blocks, second.blocks) == (0, 1)


def test_claimed_blocks_leave_the_queue():
    """They are in use again and cannot be taken."""
    pool = Pool(4, caching=True)
    pool.take(4)
    first, second = pool.release(0, 2), pool.release(0, 2)
    pool.claim(first)
    pool.take(2)
    assert (pool.free, second.blocks) == (0, 0)
    check_pool(pool)


def test_without_caching_nothing_is_kept():
    """Released blocks are blank."""
    pool = Pool(4, caching=False)
    pool.take(3)
    assert pool.release(0, 3) is None
    assert (pool.free, pool._blank) == (4, 4)
    check_pool(pool)


def test_a_shared_text_is_found_up_to_its_first_gap():
    """Blocks 0, 1 and 3 are cached: two can be used."""
    pool = Pool(9, caching=True)
    text = pool.text("system")
    for index in (0, 1, 3):
        text.register(SharedBlock(text, index))
    assert [block.index for block in text.find(9)] == [0, 1]
    assert len(text.find(1)) == 1


def test_names_of_texts_long_gone_are_forgotten():
    """A million conversations leave no trace beyond what the pool can hold."""
    pool = Pool(10, caching=True)
    for number in range(1000):
        pool.leave(pool.text(f"conversation {number}"))
    assert len(pool._texts) <= 2 * pool.size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_gpu_blocks": 1}, "num_gpu_blocks: expected at least 2"),
        ({"num_gpu_blocks": 9, "block_size": 0}, "block_size: expected at least 1"),
        ({"num_gpu_blocks": 9, "max_num_seqs": 300, "max_num_batched_tokens": 256}, "at least max_num_seqs"),
        ({"num_gpu_blocks": 9, "watermark": 1.0}, "watermark: expected a share"),
    ],
)
def test_settings_that_vllm_refuses_are_refused(settings, message):
    """With what was wanted and what was got."""
    with pytest.raises(ValueError, match=message):
        Engine(**settings)


def test_a_workload_file_is_read():
    """The fields of the real runs' file, and the further ones."""
    assert parse_workload(
        {
            "seed": 42,
            "requests": [
                {"i": 0, "arrival": None, "prompt_tokens": 377, "output_tokens": 314},
                {
                    "prompt_tokens": 9, "output_tokens": 8, "arrival": 1.5, "priority": -1,
                    "prefix": "s", "prefix_tokens": 4, "abort_after": 30,
                },
            ],
        }
    ) == (
        Request(0, 377, 314),
        Request(1, 9, 8, 1_500_000_000, -1, "s", 4, 30_000_000_000),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected"),
        ({"requests": []}, "at least one request"),
        ({"requests": [1]}, "request 0: expected an object, got int"),
        (
            {"requests": [{"prompt_tokens": 0, "output_tokens": 1}]},
            "request 0: prompt_tokens: expected a whole",
        ),
        ({"requests": [{"prompt_tokens": 5}]}, "request 0: output_tokens: .*got None"),
        ({"requests": [{"prompt_tokens": 5, "output_tokens": True}]}, "output_tokens: .*got True"),
        (
            {"requests": [{"prompt_tokens": 5, "output_tokens": 5, "arrival": "x"}]},
            "arrival: expected seconds",
        ),
        (
            {"requests": [{"prompt_tokens": 5, "output_tokens": 5, "prefix_tokens": 6}]},
            "at most the prompt's 5",
        ),
    ],
)
def test_a_broken_workload_says_what_is_wrong(document, message):
    """The request, the field, what was wanted and what was got."""
    with pytest.raises(WorkloadError, match=message):
        parse_workload(document)


def test_a_trace_is_put_in_order_of_arrival():
    """Columns in any order, unknown ones left alone, empty cells as if they were not there."""
    trace = ["output_tokens,arrival,prompt_tokens,model,priority", "8,2.5,90,m,", "7,0,80,m,1"]
    assert parse_trace(trace) == (
        Request(1, 80, 7, 0, 1),
        Request(0, 90, 8, 2_500_000_000),
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "lacks arrival, prompt_tokens, output_tokens; got nothing"),
        (["arrival,prompt_tokens", "1,2"], "lacks output_tokens"),
        (["arrival,prompt_tokens,output_tokens"], "no rows"),
        (["arrival,prompt_tokens,output_tokens", "1,2,many"], "line 2: output_tokens: .*got 'many'"),
    ],
)
def test_a_broken_trace_says_what_is_wrong(lines, message):
    """The line or the column."""
    with pytest.raises(WorkloadError, match=message):
        parse_trace(lines)


def test_buckets_become_ranges():
    """Cumulative counts of a histogram; empty buckets are left out, the last one ends at the model length."""
    buckets = [(1.0, 0), (50.0, 3), (100.0, 3), (200.0, 9), (float("inf"), 10)]
    assert Lengths.from_buckets(buckets, 2048).ranges == ((2, 50, 3), (101, 200, 6), (201, 2048, 1))


def test_the_mean_draws_in_the_end_of_the_last_bucket():
    """Lengths of 101 to 300 in buckets up to 500: the mean of 200 says that none is near 500."""
    buckets = [(100.0, 0), (200.0, 50), (500.0, 100)]
    lengths = Lengths.from_buckets(buckets, 2048, mean=200.5)
    assert lengths.ranges == ((101, 200, 50), (201, 300, 50))
    assert lengths.mean == 200.5


def test_a_mean_that_cannot_be_met_is_met_as_far_as_possible():
    """The last bucket keeps at least its lower end, and at most its upper."""
    buckets = [(100.0, 1), (200.0, 2)]
    assert Lengths.from_buckets(buckets, 2048, mean=1.0).ranges[-1] == (101, 101, 1)
    assert Lengths.from_buckets(buckets, 2048, mean=9e9).ranges[-1] == (101, 200, 1)


@given(st.integers(0, 2**32))
def test_lengths_are_drawn_from_their_ranges(seed):
    """Never between two ranges, never one without weight."""
    lengths = Lengths(((5, 7, 1), (10, 10, 0), (20, 22, 3)))
    assert lengths.draw(Rng(seed)) in {5, 6, 7, 20, 21, 22}


def test_lengths_want_ranges():
    """Empty ones, and ones upside down, are refused."""
    for ranges in ((), ((3, 2, 1),), ((0, 2, 1),), ((1, 2, 0),)):
        with pytest.raises(ValueError, match="expected"):
            Lengths(ranges)


def test_made_up_requests_share_their_texts():
    """Each begins with one of the shared texts, within its own length."""
    prompts, outputs = Lengths.between(4, 40), Lengths.between(1, 9)
    requests = itertools.islice(random_requests(prompts, outputs, Rng(3), prefixes=2, prefix_tokens=16), 200)
    assert {(r.prefix, r.prefix_tokens == min(16, r.prompt_tokens)) for r in requests} == {
        ("text-0", True),
        ("text-1", True),
    }


REQUESTS = tuple(Request(i, 10, 10, arrival=i * 100) for i in range(3))


def test_a_burst_comes_all_at_once():
    """Whatever times the requests have."""
    burst = Burst(REQUESTS)
    assert [(burst.next_at(), burst.take().id) for _ in REQUESTS] == [(0, 0), (0, 1), (0, 2)]
    assert burst.next_at() is None


def test_a_trace_comes_at_its_times():
    """Until the end, if one is set."""
    timed = Trace(REQUESTS, end=150)
    assert [(timed.next_at(), timed.take().id) for _ in range(2)] == [(0, 0), (100, 1)]
    assert timed.next_at() is None


def test_a_closed_loop_sends_when_an_answer_came():
    """Two clients: the third request waits for one of them, and for its pause."""
    closed = ClosedLoop(REQUESTS, clients=2, pause=5)
    assert [(closed.next_at(), closed.take().id) for _ in range(2)] == [(0, 0), (0, 1)]
    assert closed.next_at() is None
    closed.left(70)
    assert (closed.next_at(), closed.take().id) == (75, 2)


def test_poisson_arrivals_keep_their_rate():
    """Ten a second for a thousand seconds, to within chance."""
    one = Lengths.between(1, 1)
    poisson = Poisson(random_requests(one, one, Rng(1)), 10.0, Rng(2), 10**12)
    count = 0
    while poisson.next_at() is not None:
        poisson.take()
        count += 1
    assert count == pytest.approx(10_000, rel=0.03)


@pytest.mark.parametrize("arrivals", [Burst(()), ClosedLoop((), 1)])
def test_nothing_can_be_taken_from_an_empty_source(arrivals):
    """It says so, and has no next request."""
    assert arrivals.next_at() is None
    with pytest.raises(ValueError, match="no request is left"):
        arrivals.take()


def test_arrivals_refuse_what_makes_no_sense():
    """No clients, no rate."""
    with pytest.raises(ValueError, match="at least 1 client"):
        ClosedLoop(REQUESTS, 0)
    with pytest.raises(ValueError, match="above 0 requests per second"):
        Poisson(REQUESTS, 0.0, Rng(1))
