"""Its place makes pytest put this directory on the path: tests of all rooms share the helpers in it."""

import logging
import os
import re
from pathlib import Path

import pytest
from hypothesis import settings
from support import PROGRAMS_ONLY

from exporter import cli

# An example takes as long as the machine's other work lets it.
# The same examples at every run; `--hypothesis-profile random` looks for others.
settings.register_profile("random", deadline=None)
settings.register_profile("any machine", deadline=None, derandomize=True)
settings.load_profile("any machine")


def pytest_addoption(parser):
    """``pytest --rewrite-golden`` writes the golden files anew; look at the difference before keeping it."""
    parser.addoption("--rewrite-golden", action="store_true", help="write golden files in place of comparing")


def pytest_ignore_collect(collection_path, config):
    """Leave out folders whose tests all need programs, in a run without programs."""
    without = "not programs" in config.option.markexpr
    return True if without and collection_path.name in PROGRAMS_ONLY else None


@pytest.fixture
def golden(request):
    """A function that compares a whole text with a golden file beside the test."""
    folder = Path(request.path).parent / "golden"

    def compare(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("rewrite_golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert _rounded(text) == _rounded(path.read_text(encoding="utf-8"))

    return compare


def _rounded(text: str) -> str:
    """Without the last digits of floats: since Python 3.12 `sum` rounds better."""
    return re.sub(r"\d+\.\d{9,}", lambda number: f"{float(number[0]):.9g}", text)


@pytest.fixture
def own_logging():
    """For a test that lets a command set up logging: it is as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def run(capfd, monkeypatch):
    """A function that runs a command in this process; returns its status, output and errors."""
    for name in list(os.environ):
        if name.startswith("VLLM_PRESSURE_"):
            monkeypatch.delenv(name)

    def command(*words: object):
        status = cli.main([str(word) for word in words])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return status, out, err

    return command
