"""Nothing is kept that nothing uses: neither code nor dependencies."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Names that are used where a reader of code cannot see it. A name that is used again, or is gone, must leave
# this list.
BY_NAME = {
    "_split_lines": "argparse calls it",
    "allow_abbrev": "argparse reads it",
    "Template": "a type, named in quotes",
    "confirm": "a template of the page takes it by name",
    "promql": "as above",
    "submit": "the event loop calls it",
    "cancel_futures": "a parameter of the executor's interface",
    "http2": "a key of the web configuration without effect here",
    **dict.fromkeys(
        (
            "preemptions_inferred_per_second",
            "prompt_tokens_per_second", "engine_steps_per_second",
            "time_to_first_token_mean_seconds", "progress_idle_seconds",
        ),
        "a signal: the API, the page and the table of metrics take it by name",
    ),
    **dict.fromkeys(
        (
            "kv_mean_ratio", "busy_seconds", "queue_p95", "ttft_mean",
            "ttft_p95",
        ),
        "a result of a simulation, which prints all of them",
    ),
}  # fmt: skip


def run(*command: str) -> str:
    """What a tool says of the repository."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    return done.stdout + done.stderr


def test_no_code_is_unused():
    """Code that only tests use counts as unused; names that are used unseen are listed with the reason."""
    said = run("vulture", "exporter", "bench", "dashboards", "docs", "--min-confidence", "60")
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
