"""The judge: drawn scenarios are reproducible, and the rules reach what they reached."""

import itertools

import pytest

from bench.judge.__main__ import outcome
from bench.judge.draw import draw
from bench.judge.machine import Said
from bench.judge.recovery import Recovery, recovery_of, with_recovery
from bench.judge.summary import summarize
from bench.judge.trial import play

SEEDS = range(1, 21)


def test_a_seed_gives_the_same_scenario():
    """Another seed gives another one."""
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


@pytest.fixture(scope="module")
def found():
    """The first seeds, judged."""
    return [outcome(seed) for seed in SEEDS]


@pytest.mark.long
def test_the_rules_are_not_worse_than_they_were(found):
    """Floors a little below what the first twenty seeds reached."""
    summary = summarize(found)
    wrong = [(o.seed, o.family, o.verdict) for o in found if not o.right]
    assert summary.accuracy >= 0.9, wrong
    assert summary.false_pages <= 0.05, [o.seed for o in found if o.false_page]
    assert summary.missed_pages <= 0.05, [o.seed for o in found if o.missed_page]
    assert summary.flaps <= 1


@pytest.mark.long
def test_alarms_end_with_the_trouble(found):
    """Load or fault is gone: no page for longer than its hold, no warning for longer than a minute."""
    known = {one.seed: one.recovery for one in found if one.recovery is not None}
    assert len(known) >= 4
    assert {seed: each for seed, each in known.items() if each.paged > 30 or each.warned > 60} == {}


@pytest.mark.parametrize(
    ("kind", "seed"), [("slow", 6), ("down", 6), ("restart", 6), ("steady", 6), ("busy", 60046)]
)
def test_what_follows_the_trouble_changes_nothing_before_it(kind, seed):
    """The same requests, states and verdicts; afterwards the fault is gone and work is done."""
    scenario = draw(seed, kind)
    whole = with_recovery(scenario)
    (said,), (samples,) = play(scenario)
    (more_said,), (more,) = play(whole)
    assert (more_said[: len(said)], more[: len(samples)]) == (said, samples)
    assert whole.end == scenario.end + 300
    assert more[-1].finished > samples[-1].finished
    # What came while the server was down is lost, not done at once.
    rates = [b.output_tokens - a.output_tokens for a, b in itertools.pairwise(more)]
    assert max(rates[len(samples) - 1 :]) <= 3 * max(rates[: int(scenario.calm)])


def test_a_recovery_begins_with_the_last_queue():
    """What is said before it is no late alarm; without a calm time after it nothing is known."""
    state = play(draw(6, "steady"))[1][0][0]
    samples = [state._replace(t=float(t), waiting=int(t < 130), preemptions=0) for t in range(300)]
    said = [
        Said(float(t), "kv_bound" if t < 140 else "healthy", "warning" if t < 140 else "none", ())
        for t in range(300)
    ]
    assert recovery_of(100.0, said, samples) == Recovery(10.0, 0.0, 0)
    assert recovery_of(100.0, said[:200], samples[:200]) is None
