"""Files of requests, as `simulate` and `whatif` read them."""

import json
from pathlib import Path

from exporter.commands._outcome import reason
from exporter.simulation.workload import Request, WorkloadError, parse_trace, parse_workload

__all__ = ["read_text", "read_workload"]


def read_workload(path: str) -> tuple[Request, ...]:
    """Read a workload file: CSV where its name ends in ``.csv``, else JSON.

    Raises:
        WorkloadError: it cannot be read, or is invalid; the text names the file.
    """
    text = read_text(path)
    try:
        if path.endswith(".csv"):
            return parse_trace(text.splitlines())
        return parse_workload(json.loads(text))
    except (WorkloadError, json.JSONDecodeError) as problem:
        raise WorkloadError(f"{path}: {problem}") from problem


def read_text(path: str) -> str:
    """Read a file of text.

    Raises:
        WorkloadError: it cannot be read; the text names the file.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise WorkloadError(f"{path}: {problem}") from problem
    except OSError as problem:
        raise WorkloadError(f"{path}: {reason(problem, with_file=False)}") from problem
