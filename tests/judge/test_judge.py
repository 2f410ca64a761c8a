"""The judge: drawn scenarios are reproducible, and the rules reach what they reached."""

import pytest

from bench.judge.__main__ import outcome
from bench.judge.draw import draw
from bench.judge.recovery import recovery
from bench.judge.summary import summarize

SEEDS = range(1, 41)


def test_a_seed_gives_the_same_scenario():
    """Another seed gives another one."""
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


@pytest.mark.long
def test_the_rules_are_not_worse_than_they_were():
    """Floors a little below what the first forty seeds reached."""
    found = [outcome(seed) for seed in SEEDS]
    summary = summarize(found)
    wrong = [(o.seed, o.family, o.verdict) for o in found if not o.right]
    assert summary.accuracy >= 0.9, wrong
    assert summary.false_pages <= 0.025, [o.seed for o in found if o.false_page]
    assert summary.missed_pages <= 0.025, [o.seed for o in found if o.missed_page]
    assert summary.flaps <= 1


@pytest.mark.long
def test_alarms_end_with_the_trouble():
    """Load or fault is gone: no page for longer than its hold, no warning for longer than a minute."""
    found = {seed: recovery(seed) for seed in range(1, 9)}
    known = {seed: each for seed, each in found.items() if each is not None}
    assert len(known) >= 4
    assert {seed: each for seed, each in known.items() if each.paged > 30 or each.warned > 60} == {}
