"""Figures over outcomes made by hand."""

import pytest

from bench.judge.recovery import Recovery
from bench.judge.summary import Outcome, document, summarize

RIGHT = Outcome(1, "overload", "seats", "seat_bound", True, False, False, False, 20.0, 0, "", 0.4)
OUTCOMES = [
    RIGHT,
    RIGHT._replace(seed=2, seconds=40.0, flaps=2, warned="queue_not_kv"),
    RIGHT._replace(seed=3, family="none", verdict="healthy", seconds=None),
    RIGHT._replace(seed=4, verdict="kv_bound", right=False, seconds=None, false_page=True, missed_page=True),
]


def test_figures():
    """Three of four are right; the medians leave out what is not known."""
    summary = summarize(OUTCOMES)
    assert (summary.scenarios, summary.accuracy, summary.false_pages, summary.missed_pages) == (
        4,
        0.75,
        0.25,
        0.25,
    )
    assert (summary.seconds, summary.flaps) == (30.0, 0.0)
    assert summary.cpu == pytest.approx(0.4)


def test_alarms_after_the_trouble():
    """Of the three whose end was seen, one warned and paged for too long."""
    ends = [Recovery(0.0, 0.0, 0), Recovery(61.0, 31.0, 2), Recovery(60.0, 30.0, 1), None]
    outcomes = [o._replace(recovery=end) for o, end in zip(OUTCOMES, ends, strict=True)]
    assert summarize(outcomes).warned_late == summarize(outcomes).paged_late == pytest.approx(1 / 3)
    text = document(outcomes, "1 to 4")
    assert "| scenarios whose end was seen | 3 | |" in text
    assert "to that of the warnings, median | 60 s |" in text
    assert "* paged long after the trouble: 2" in text
    assert "whose end was seen" not in document(OUTCOMES, "1 to 4")


def test_the_document_names_the_seeds_that_fail():
    """By truth and verdict, and by page."""
    text = document(OUTCOMES, "1 to 4")
    assert "| seats | 2 |  | 1 (1) | 67% |" in text
    assert "* false page: 4" in text
    assert "* seats read as `kv_bound`: 4" in text
    assert "* warned in the calm by `queue_not_kv`: 2" in text
