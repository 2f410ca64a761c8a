"""What the documents show is what the commands print, and what they say of it is among that.

``pytest tests/simulation/test_documents.py --rewrite-golden`` writes the outputs anew.
"""

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest

from exporter import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("docs/preemption.md", "docs/simulator.md")
PROGRAM = "vllm-preemption-exporter"
BLOCK = re.compile(r"```console\n(.*?)```\n", re.DOTALL)
TABLE = re.compile(r"(<!-- \$ (.*?) -->\n).*?(<!-- end -->\n)", re.DOTALL)
NUMBER = re.compile(r"\*\*([\d.,]+)\*\*")

pytestmark = pytest.mark.usefixtures("own_logging")


@functools.cache
def output(command: str) -> str:
    """What a command prints."""
    program, *arguments = shlex.split(command)
    assert program == PROGRAM
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), contextlib.chdir(ROOT):
        assert cli.main(arguments) == 0
    return out.getvalue()


def commands(block: str) -> list[tuple[str, str]]:
    """The commands of a block, as written and on one line each."""
    found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n", block, re.MULTILINE)
    return [(written, " ".join(written.replace("\\\n", " ").split())) for written in found]


def current(text: str) -> str:
    """A document with the outputs as they are now."""

    def block(found: re.Match[str]) -> str:
        shown = "".join(f"$ {written}\n{output(command)}" for written, command in commands(found[1]))
        return f"```console\n{shown}```\n"

    text = BLOCK.sub(block, text)
    return TABLE.sub(lambda found: f"{found[1]}\n{output(found[2])}\n{found[3]}", text)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_outputs_are_what_the_commands_print(name, request):
    """Every block and table that shows a command."""
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    now = current(text)
    if request.config.getoption("rewrite_golden"):
        path.write_text(now, encoding="utf-8")
        text = now
    assert len(BLOCK.findall(text)) + len(TABLE.findall(text)) >= 3
    assert text == now


@pytest.mark.parametrize("name", DOCUMENTS)
def test_figures_in_the_text_are_those_of_the_runs_beside_it(name):
    """A figure in bold type stands in the output of a command of its section."""
    for section in (ROOT / name).read_text(encoding="utf-8").split("\n## ")[1:]:
        outputs = " ".join(output(one) for block in BLOCK.findall(section) for _, one in commands(block))
        shown = set(re.findall(r"(?<![\d.])\d[\d.]*\d|\d", outputs))
        told = [number.rstrip(".,") for number in NUMBER.findall(BLOCK.sub("", section))]
        assert [number for number in told if number not in shown] == [], section.partition("\n")[0]


def test_every_claim_of_preemption_has_figures():
    """No section of the document goes without a run, and a figure of it in the text."""
    text = (ROOT / DOCUMENTS[0]).read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        assert BLOCK.search(section), section.partition("\n")[0]
        assert NUMBER.search(section), section.partition("\n")[0]
