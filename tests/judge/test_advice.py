"""The judge of advice: the first advised change, with the true parameters."""

import pytest

from bench.judge.advice import Advised, advised, summary


def test_a_change_is_worse_by_throughput_or_by_latency_without_more_throughput():
    """As an operator sees it: 5 % fewer tokens, or answers a tenth slower for nothing."""

    def one(tokens, latency):
        return Advised(1, "overload", "kv_bound", True, "watermark 0.05", tokens, latency)

    assert [one(*each).worse for each in ((0.94, 0.5), (0.96, 1.05), (1.0, 1.2), (1.3, 1.2))] == [
        True, False, True, False,
    ]  # fmt: skip


def test_the_figures_name_the_share_that_makes_it_worse():
    """One of two, and the middle of the regrets."""
    found = [
        Advised(1, "overload", "kv_bound", True, "a", 0.5, 1.0, "b", 0.5),
        Advised(2, "overload", "kv_bound", True, "a", 1.5, 0.8, "a", 0.0),
        Advised(3, "overload", "kv_bound", False, ""),
    ]
    lines = summary(found)
    assert lines[0] == "3 servers short of capacity"
    assert "2 first changes; 50.0% make it worse; regret 25.0% (median)" in lines[1]


@pytest.mark.long
@pytest.mark.parametrize("seed", [82001, 82053])
def test_the_advice_of_a_trusted_forecast_helps(seed):
    """A closed load, and one that is short of seats."""
    found = advised(seed)
    assert found is not None
    assert found.trusted
    assert not found.worse
    assert found.regret <= 0.15
