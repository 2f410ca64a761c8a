"""Forecasts the effect of each change on an engine, for all commands and the sidecar.

The sidecar starts ``python -m exporter.simulation.worker`` as a process for one forecast. It reads a request
as JSON on standard input and writes the forecast as JSON on standard output.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final

from exporter.config import WhatIfConfig
from exporter.simulation.candidates import parse_candidate
from exporter.simulation.engine_forecast import bounded, simulate_engine
from exporter.simulation.from_status import Present, PresentError, present_from_status
from exporter.simulation.report import render
from exporter.simulation.report import to_dict as forecast_to_dict
from exporter.simulation.whatif import Forecast

__all__ = ["answer", "forecast_engine", "to_dict", "to_text"]

_NICE: Final = 19  # the sidecar shares its machine with vLLM


def forecast_engine(
    present: Present,
    thresholds: WhatIfConfig,
    *,
    tried: Sequence[str] = (),
    span: tuple[float, float] | None = None,
    jobs: int | None = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Simulate an engine as it is and with every change, within a bounded number of simulated steps.

    This is the forecast of every command and of the sidecar: the same readings give the same numbers.

    Args:
        present: the engine.
        thresholds: how much to simulate, and the thresholds of the verdicts.
        tried: combinations to try besides the single changes, as `parse_candidate` reads them.
        span: seconds to warm up and to measure.
        jobs: processes; None for all cores.
        progress: called with the number of finished runs and of all runs.

    Raises:
        ValueError: a combination cannot be read.
    """
    combinations = [parse_candidate(text, present.engine) for text in tried]
    if not jobs:  # the cores that this process may use; in a container fewer than the machine has
        jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    simulate = partial(simulate_engine, bounded(present), thresholds, combinations, span, progress)
    if jobs == 1:
        return simulate(map)
    # Do not fork: the program may have threads.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            return simulate(pool.map)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def to_dict(name: str, present: Present, result: Forecast) -> dict[str, Any]:
    """Return a forecast as a dict for JSON."""
    return {
        "engine": name or None,
        "present": present.sentence,
        "known": list(present.known),
        "assumed": list(present.assumed),
        **forecast_to_dict(result),
    }


def to_text(name: str, present: Present, result: Forecast) -> str:
    """Return a forecast as text."""
    lines = [f"engine {name}: {present.sentence}" if name else present.sentence]
    lines += [f"known: {', '.join(present.known)}"] if present.known else []
    lines += [f"assumed: {assumption}" for assumption in present.assumed]
    return "\n".join([*lines, render(result)])


def answer(
    name: str,
    status: Mapping[str, Any],
    thresholds: WhatIfConfig,
    jobs: int | None = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the forecast of an engine for JSON, by its status document; or why there is none.

    Args:
        name: of the engine.
        status: its document, with ``load``, ``limits`` and the advised ``fixes``.
        thresholds: how much to simulate, and the thresholds of the verdicts.
        jobs: see `forecast_engine`.
        progress: see `forecast_engine`.
    """
    try:
        present = present_from_status(status)
        result = forecast_engine(present, thresholds, jobs=jobs, progress=progress)
    except PresentError as problem:
        return {"error": str(problem)}
    return to_dict(name, present, result)


def _main() -> None:
    os.nice(_NICE)
    request = json.load(sys.stdin)
    document = answer(request["engine"], request["status"], WhatIfConfig(**request["limits"]))
    json.dump(document, sys.stdout, allow_nan=False)


if __name__ == "__main__":
    _main()
