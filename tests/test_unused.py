"""Nothing is kept that nothing uses: neither code nor dependencies."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What is used by its name, where a reader of code cannot see it. A name that is used again, or is gone, must
# leave this list.
BY_NAME = {
    "_split_lines": "argparse calls it",
    "allow_abbrev": "argparse reads it",
    "cancel_futures": "a parameter that the executor's interface has",
    "engine_steps_per_second": "a signal: the API and the table of metrics take it by name",
    "generation_tokens_per_second_recent": "a signal, as above",
    "prompt_tokens_per_second": "a signal, as above",
    "http2": "a key of the web configuration without effect here",
    "kv_mean_ratio": "a result of a simulation, which prints all of them",
    "queue_p95": "as above",
    "ttft_p95": "as above",
}


def run(*command: str) -> str:
    """What a tool says of the repository."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


def test_no_code_is_unused():
    """What only tests use counts as used; what is used by its name is listed with the reason."""
    said = run("vulture", "exporter", "bench", "dashboards", "tests", "--min-confidence", "60")
    found = set()
    for line in said.splitlines():
        match = re.fullmatch(r"(exporter/\S+): unused \w+(?: \w+)? '(\w+)' .*", line)
        if match:
            found.add(match[2])
    assert found - BY_NAME.keys() == set(), said
    assert BY_NAME.keys() - found == set(), "names that need not be listed any more"


def test_no_dependency_is_unused_or_undeclared():
    """What the package imports is declared, and what is declared is imported."""
    assert "Success! No dependency issues found." in run("deptry", ".")
