"""The documentation says what the program does."""

from pathlib import Path

import pytest

from exporter.publish.reference import current, rewritten

ROOT = Path(__file__).parents[1]


def test_the_generated_tables_are_current():
    """`make docs` would change nothing."""
    assert current(ROOT) == []


def test_an_unknown_table_is_an_error():
    """A misspelt marker does not leave an old table behind."""
    with pytest.raises(ValueError, match="verdict"):
        rewritten("<!-- begin verdict (generated) -->\n<!-- end verdict -->\n")


def test_a_table_is_replaced_whole():
    """What stood between the markers is gone; what stands around them stays."""
    text = "before\n<!-- begin findings (generated) -->\nold\n<!-- end findings -->\nafter\n"
    new = rewritten(text)
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
    assert "`dp_imbalance`" in new
