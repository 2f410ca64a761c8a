"""Waits after failures."""

import pytest

from exporter.net.backoff import backoff


def test_the_wait_doubles_up_to_a_bound():
    """However often it fails, and without overflow."""
    waits = [backoff(1.0, 30.0, failures, 0.0) for failures in (0, 1, 2, 5, 100_000)]
    assert waits == [1.0, 2.0, 4.0, 30.0, 30.0]


def test_chance_shortens_the_wait_by_a_fifth_at_most():
    """Exporters that fail together do not try again together."""
    assert backoff(1.0, 30.0, 1, 1.0) == pytest.approx(1.6)
