"""The documentation says what the program does."""

import re
from pathlib import Path

import pytest

from docs.generator.reference import current, rewritten

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


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    hidden = (".venv", "node_modules")
    return [
        path
        for path in ROOT.glob("**/*.md")
        if not any(part in hidden or part[0] == "." for part in path.relative_to(ROOT).parts)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page):
    """A visitor who follows a link finds a file."""
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
