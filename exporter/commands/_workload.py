"""Files of requests, as `simulate` and `whatif` read them."""

import json
from pathlib import Path

from exporter.simulation.workload import Request, WorkloadError, parse_trace, parse_workload

__all__ = ["read_workload"]


def read_workload(path: str) -> tuple[Request, ...]:
    """Read a workload file: CSV where its name ends in ``.csv``, else JSON.

    Raises:
        WorkloadError: it is invalid; the text names the file.
        OSError: it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return parse_trace(text.splitlines()) if path.endswith(".csv") else parse_workload(json.loads(text))
    except ValueError as problem:
        raise WorkloadError(f"{path}: {problem}") from problem
