"""The search finds the best seats, watermark and pair of changes with few runs."""

import pytest

from exporter.simulation.candidates import ASSUMED_POOLS
from exporter.simulation.load import Load
from exporter.simulation.search import RUNS, search
from exporter.simulation.settings import Engine
from exporter.simulation.workload import Lengths

LOOP = Load(Lengths.between(50, 400), Lengths.between(200, 800), clients=64)
ENGINE = Engine(num_gpu_blocks=300, block_size=32, max_num_seqs=48)


class Screen:
    """Scores changes by a function of the engine, and counts them."""

    def __init__(self, score):
        self.score = score
        self.runs = 0

    def __call__(self, changes):
        """The score of each."""
        self.runs += len(changes)
        return [self.score(change.engine) for change in changes]


def found(score, engine=ENGINE, load=LOOP):
    """Values of the chosen changes by fix, their labels, and the number of runs."""
    screen = Screen(score)
    chosen = search(load, engine, ASSUMED_POOLS, screen)
    values = {fix: change.value for change in chosen for fix in change.fixes}
    return values, [change.label for change in chosen], screen.runs


@pytest.mark.parametrize("best", [6, 13, 20, 31, 40])
def test_the_best_number_of_seats_is_found_nearly_wherever_it_is(best):
    """Within a fifth, and with few runs."""
    values, _, runs = found(lambda engine: 1.5 - abs(engine.max_num_seqs - best) / 48)
    assert values["lower_max_num_seqs"] == pytest.approx(best, rel=0.2, abs=1)
    assert runs <= RUNS + 8


@pytest.mark.parametrize("best", [0.03, 0.07, 0.15])
def test_the_best_watermark_is_found(best):
    """Between the shares that are tried first."""
    values, _, _ = found(lambda engine: 1.2 - abs(engine.watermark - best))
    assert values["set_watermark"] == pytest.approx(best, abs=0.02)


def test_more_seats_are_searched_up_to_the_number_of_clients():
    """Each client sends one request at a time, so more of them are never taken."""
    engine = Engine(num_gpu_blocks=9000, block_size=32, max_num_seqs=8)
    values, _, _ = found(lambda one: min(one.max_num_seqs, 30), engine)
    assert values["raise_max_num_seqs"] in range(28, 33)


def test_more_seats_are_no_more_than_the_tokens_of_a_step():
    """With more vLLM does not start."""
    engine = Engine(num_gpu_blocks=9000, block_size=32, max_num_seqs=8, max_num_batched_tokens=12)
    values, _, _ = found(lambda one: one.max_num_seqs, engine)
    assert values["raise_max_num_seqs"] == 12
    engine = Engine(num_gpu_blocks=9000, block_size=32, max_num_seqs=8, max_num_batched_tokens=8)
    assert "raise_max_num_seqs" not in found(lambda one: one.max_num_seqs, engine)[0]


def test_two_changes_that_help_more_together_are_proposed_as_a_pair():
    """A larger pool, and the seats that fill it; not where one of them is as good."""

    def both(engine):
        return (1.3 if engine.num_gpu_blocks > 500 else 1.0) * (1.2 if engine.max_num_seqs <= 20 else 1.0)

    def either(engine):
        return 1.3 if engine.num_gpu_blocks > 500 or engine.max_num_seqs <= 20 else 1.0

    (pair,) = (one for one in search(LOOP, ENGINE, ASSUMED_POOLS, Screen(both)) if one.parts)
    assert "pool x2" in pair.label
    assert [part.value for part in pair.parts] == [None, pair.engine.max_num_seqs]
    assert pair.parts[1].fixes == ("lower_max_num_seqs",)
    assert not [label for label in found(either)[1] if " + " in label]


def test_the_first_value_is_no_change():
    """A watermark below the present one, and seats that nothing fills, are not tried."""
    engine = Engine(num_gpu_blocks=300, block_size=32, max_num_seqs=1, watermark=0.1)
    values, _, _ = found(lambda _engine: 1.0, engine)
    assert values["set_watermark"] > 0.1
    assert "lower_max_num_seqs" not in values


def test_a_limit_that_is_never_reached_is_no_fewer_seats():
    """Above 20 nothing changes; below it each seat costs a hundredth."""
    values, _, _ = found(lambda engine: min(1.0, 0.79 + engine.max_num_seqs / 100))
    assert 14 <= values["lower_max_num_seqs"] <= 20


def test_of_numbers_of_seats_that_cost_the_same_the_fewest_are_chosen():
    """From 12 to 24 all is the same; the fewest preempt least."""
    values, _, _ = found(lambda engine: 1.1 if 12 <= engine.max_num_seqs <= 24 else 0.9)
    assert values["lower_max_num_seqs"] == pytest.approx(12, abs=2)
