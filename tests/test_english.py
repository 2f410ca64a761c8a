"""Public texts are in plain English: none has a word that reads as if thought in another language."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter import cli

ROOT = Path(__file__).parents[1]

# Each with a plain wording: again; forever; soon; expensive; worst case; also or next to; ...
WORDS = re.compile(
    r"\b(anew|for ever|by and by|dear(?:er|est)?|at the worst|beside|so many|puts? out|as ever|of itself"
    r"|whoever|one more(?! replica| often)|spoken of|told|tells? apart|taken (?:for granted|that)|it is said"
    r"|(?:is|are) (?:not |no )?good)\b",
    re.IGNORECASE,
)
# Files that a user reads, by where they are.
FILES = (
    "*.md",
    "docs/*.md",
    "docs/runbooks/*.md",
    "deploy/**/*.md",
    "deploy/**/*.y*ml",
    "dashboards/*.md",
    "dashboards/*.json",
    "dashboards/provisioning/*.yaml",
    "bench/*.md",
    "rules/*",
    "exporter/analysis/catalogue.yaml",
    "exporter/publish/page/**/*.html",
    "exporter/publish/page/**/*.js",
    "tests/README.md",
    "Makefile",
)
CONFIGURED = ("serve", "check", "record", "replay", "demo", "whatif")
COMMANDS = ("", *CONFIGURED, "rules", "dashboards", "simulate run")


def problems(name: str, text: str) -> list[str]:
    """List the words to replace, each with its place; code is no text, in pages as in programs."""
    if name.endswith(".html"):
        text = re.sub(r"\{[{%].*?[%}]\}|<[^>]*>", "", text)
    if name.endswith((".js", ".py")):
        text = re.sub(r"\$\{[^}]*\}", "", text)
        text = "\n".join(" ".join(re.findall(r'"[^"]*"|`[^`]*`', line)) for line in text.splitlines())
    return [
        f"{name}:{number}: {found[0]!r} in: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        for found in WORDS.finditer(line)
    ]


def public_files() -> Iterator[Path]:
    """Yield every file that a user reads."""
    for pattern in FILES:
        yield from sorted(path for path in ROOT.glob(pattern) if path.is_file())


def test_public_files_are_in_plain_english():
    """Pages, rules, dashboards, the catalogue and the status page."""
    paths = list(public_files())
    assert len(paths) > 60
    found = [
        problem
        for path in paths
        for problem in problems(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.usefixtures("own_logging")
def test_help_is_in_plain_english():
    """The help of every command, with that of all options."""
    found = []
    for command in COMMANDS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            whole = "--help-all" if command in CONFIGURED else "--help"
            assert cli.main([*command.split(), whole]) == 0
        # A line break of the help may be inside of a phrase.
        found += problems(f"{command} --help", " ".join(out.getvalue().split()))
    assert found == [], "\n".join(found)


def test_a_word_is_found():
    """With its file, line and word."""
    assert problems("a.md", "x\nstarts anew\n") == ["a.md:2: 'anew' in: starts anew"]
