"""How much KV the requests want: the numbers by hand, and what is unknown without them."""

import math

import pytest
from support.scenes import Stage, situation

from exporter.analysis.kv_demand import context_per_request, need, seats_that_fit

# 64 requests on a real server of 300 blocks of 32 tokens, one of them reserved: prompts of 50 to 400
# tokens, answers of 200 to 800. Sixteen seats ended its preemptions, and four or eight would have cost
# throughput.
BLOCKS_300 = {"kv_cache_size_tokens": 299 * 32, "block_size": 32}
WORKLOAD = {
    "prompt_lengths": ({50: 0, 100: 11, 200: 28, 500: 64, math.inf: 64}, 14_913),
    "output_lengths": ({200: 0, 500: 40, 1000: 64, math.inf: 64}, 30_589),
}
UNKNOWN = {"prompt_lengths": ({math.inf: 0}, 0), "output_lengths": ({math.inf: 0}, 0)}


def after(cache, seconds=60, **part):
    """The situation after a minute of one scene."""
    stage = Stage(cache=cache)
    stage.play(seconds, **part)
    return situation(stage)


def test_a_running_request_holds_its_prompt_and_half_of_a_long_answer():
    """Exactly 498 tokens with a deviation of 210 by the single lengths; buckets come near."""
    held = context_per_request(after(BLOCKS_300, running=10, kv=0.3, tokens=1000, finished=2, **WORKLOAD))
    assert held.mean == pytest.approx(498, rel=0.02)
    assert held.deviation == pytest.approx(210, rel=0.15)
    assert "finished" in held.source


def test_about_fifteen_of_them_fit_into_300_blocks():
    """Nearly as many as the real runs showed to be best, sixteen; 15 by the single lengths."""
    s = after(BLOCKS_300, running=10, kv=0.3, tokens=1000, finished=2, **WORKLOAD)
    assert seats_that_fit(s, context_per_request(s)) in (14, 15, 16)


def test_seats_are_the_largest_number_that_keeps_two_deviations_of_room():
    """N (h + block/2) + 2 s sqrt(N) <= capacity, and not for one more."""
    s = after(BLOCKS_300, running=10, kv=0.3, tokens=1000, finished=2, **WORKLOAD)
    held = context_per_request(s)
    seats = seats_that_fit(s, held)

    def tokens(n: int) -> float:
        return n * (held.mean + 16) + 2 * held.deviation * math.sqrt(n)

    assert tokens(seats) <= 299 * 32 < tokens(seats + 1)


def test_what_requests_hold_now_is_the_least_that_they_hold():
    """Four that never finish hold 90 % of 10,000 tokens: 2,250 each, whatever short ones finished before."""
    pool = {"kv_cache_size_tokens": 10_000, "block_size": 16}
    s = after(pool, running=4, kv=0.9, tokens=10, **WORKLOAD)
    held = context_per_request(s)
    assert held.mean == pytest.approx(2250)
    assert held.source == "used tokens / running requests"


def test_without_lengths_what_is_held_is_what_is_used():
    """Five hold half of 10,000 tokens."""
    s = after({"kv_cache_size_tokens": 10_000}, running=5, kv=0.5, tokens=10)
    assert context_per_request(s).mean == pytest.approx(1000)


def test_need_is_all_that_runs_and_waits_by_the_capacity():
    """Ten and thirty times 498 tokens by 9,568."""
    s = after(BLOCKS_300, running=10, waiting=30, kv=0.3, tokens=1000, finished=2, **WORKLOAD)
    assert need(s, context_per_request(s)) == pytest.approx(40 * 498 / 9568, rel=0.02)


def test_an_engine_that_is_full_and_fine_reads_at_most_one():
    """What runs fits by definition."""
    s = after({"kv_cache_size_tokens": 10_000}, running=5, kv=0.97, tokens=10)
    assert need(s, context_per_request(s)) == pytest.approx(0.97)


@pytest.mark.parametrize("cache", [{}, {"num_gpu_blocks": "None", "block_size": 16}])
def test_a_pool_of_unknown_size_has_no_need_and_no_seats(cache):
    """Even where the lengths are known."""
    s = after(cache, running=10, waiting=30, kv=0.3, tokens=1000, finished=2, **WORKLOAD)
    held = context_per_request(s)
    assert (need(s, held), seats_that_fit(s, held)) == (None, None)


def test_nothing_seen_is_nothing_known():
    """Idle since the start: no request, no length."""
    s = after(BLOCKS_300, **UNKNOWN)
    assert context_per_request(s) is None
    assert (need(s, None), seats_that_fit(s, None)) == (None, None)
