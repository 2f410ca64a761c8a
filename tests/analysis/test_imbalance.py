"""When engines of one model share their load badly."""

import pytest
from support.loads import BUSY, FULL, NO_PAGE, POOL
from support.scenes import (
    Stage,
    engine_of,
    fixes,
    model_of,
    severities,
    verdicts,
)


def shared(*loads, seconds=60, kv=None):
    """The model's findings after engines had these numbers of requests for a while."""
    stage = Stage(engines=[str(number) for number in range(len(loads))])
    usages = kv or [0.3] * len(loads)
    parts = {
        name: {"running": load, "kv": usage, "tokens": 100, "finished": 1}
        for name, load, usage in zip(stage.players, loads, usages, strict=True)
    }
    return model_of(stage.play(seconds, parts)[-1]).findings


@pytest.mark.parametrize(
    ("loads", "unbalanced"),
    [
        ((20, 0), True),
        ((20, 16), False),
        ((20, 5), True),  # 1.6 times the mean of 12.5
        ((19, 6), False),
        ((4, 0), False),  # too few to be shared
        ((20,), False),
        ((30, 10, 10, 10), True),
        ((0, 0), False),
    ],
)
def test_one_engine_with_far_more_than_the_mean_is_an_imbalance(loads, unbalanced):
    """Where there are enough requests, and another engine to take them."""
    assert shared(*loads) == (("dp_imbalance",) if unbalanced else ())


def test_memory_that_is_full_on_one_engine_only_is_an_imbalance_too():
    """With equal numbers of requests."""
    assert shared(10, 10, kv=[0.95, 0.1]) == ("dp_imbalance",)
    assert shared(10, 10, kv=[0.95, 0.6]) == ()
    assert shared(10, 10, kv=[0.6, 0.1]) == ()


def test_an_imbalance_has_to_last():
    """A burst on one engine is none."""
    assert shared(20, 0, seconds=25) == ()


def test_an_imbalance_ends_with_a_margin():
    """From 2 times the mean to 1.4 is still one; 1.2 is not."""
    stage = Stage(engines=("0", "1"))

    def play(one, other):
        parts = {
            name: {"running": load, "kv": 0.3, "tokens": 100, "finished": 1}
            for name, load in (("0", one), ("1", other))
        }
        return model_of(stage.play(60, parts)[-1]).findings

    assert play(20, 0) == ("dp_imbalance",)
    assert play(14, 6) == ("dp_imbalance",)
    assert play(12, 8) == ()
    assert play(14, 6) == ()
    assert severities(stage.readings) == {"none", "warning"}


def test_an_engine_that_is_gone_is_no_idle_one():
    """What remains is judged by itself."""
    stage = Stage(engines=("0", "1"))
    part = {"running": 20, "kv": 0.3, "tokens": 100, "finished": 1}
    stage.play(60, {"0": part, "1": part})
    assert model_of(stage.play(60, {"0": part})[-1]).findings == ()


# Several engines.


def test_an_engine_that_is_scaled_in_is_missing_and_its_sister_is_not_touched():
    """The server answers without it: no values, a finding of the target, no page."""
    stage = Stage(cache=POOL, engines=("0", "1"))
    stage.play(60, {"0": BUSY, "1": BUSY})
    scene = stage.play(60, {"0": BUSY})
    assert verdicts(scene) == {"healthy"}
    assert scene[-1].judgement.findings == ("engine_missing",)
    assert engine_of(scene[-1], "1").signals.requests_running is None
    assert severities(scene) <= NO_PAGE


def test_an_imbalance_of_memory_with_equal_requests_is_one():
    """Ten requests each, but all the long contexts sit on one engine."""
    stage = Stage(cache=POOL, engines=("0", "1"))
    scene = stage.play(90, {"0": FULL, "1": BUSY | {"kv": 0.1}})
    assert model_of(scene[-1]).findings == ("dp_imbalance",)
    assert fixes(scene[-1], "0")[0] == "balance_routing"


@pytest.mark.parametrize(
    ("most", "others", "unbalanced"), [(20, 2, True), (3, 2, False), (7, 0, False), (30, 28, False)]
)
def test_one_engine_of_eight_is_unbalanced_only_with_enough_requests_to_share(most, others, unbalanced):
    """And a little more than the others have is no imbalance."""
    stage = Stage(cache=POOL, engines=[str(number) for number in range(8)])
    part = {name: BUSY | {"running": most if name == "3" else others, "kv": 0.3} for name in stage.players}
    scene = stage.play(90, part)
    assert (model_of(scene[-1]).findings == ("dp_imbalance",)) == unbalanced
