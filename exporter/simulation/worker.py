"""Forecasts the effect of each change on an engine, for `whatif`, `check --what-if` and the status API.

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
from exporter.simulation.candidates import candidates, parse_candidate
from exporter.simulation.from_status import Present, PresentError, present_from_status
from exporter.simulation.report import render
from exporter.simulation.report import to_dict as forecast_to_dict
from exporter.simulation.whatif import Forecast, forecast, horizon

__all__ = ["forecast_engine", "to_dict", "to_text"]

# The sidecar shares its machine with vLLM: it simulates at most this long, on one core, at low priority.
_SERVED_SPAN: Final = (300.0, 900.0)
_NICE: Final = 10


def forecast_engine(
    present: Present,
    thresholds: WhatIfConfig,
    *,
    tried: Sequence[str] = (),
    span: tuple[float, float] | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Simulate an engine as it is and with every change.

    Args:
        present: the engine.
        thresholds: how much to simulate, and the thresholds of the verdicts.
        tried: combinations to try besides the single changes, as `parse_candidate` reads them.
        span: seconds to warm up and to measure.
        jobs: processes, all cores by default.
        progress: called with the number of finished runs and of all runs.

    Raises:
        ValueError: a combination cannot be read.
    """
    changes = [*candidates(present.load, present.engine)]
    changes += [parse_candidate(text, present.engine) for text in tried]
    if not jobs:  # the cores that this process may use; in a container fewer than the machine has
        jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    simulate = partial(
        forecast,
        present.load,
        changes,
        step_times=present.step_times,
        span=span,
        observed=present.observed,
        thresholds=thresholds,
        progress=progress,
    )
    if jobs == 1:
        return simulate()
    # Do not fork: the program may have threads.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            return simulate(mapper=pool.map)
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


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        present = present_from_status(request["status"])
    except PresentError as problem:
        return {"error": str(problem)}
    warm_up, measured = horizon(present.load, present.engine)
    span = min(warm_up, _SERVED_SPAN[0]), min(measured, _SERVED_SPAN[1])
    result = forecast_engine(present, WhatIfConfig(**request["limits"]), span=span, jobs=1)
    return to_dict(request["engine"], present, result)


if __name__ == "__main__":
    os.nice(_NICE)
    json.dump(_answer(json.load(sys.stdin)), sys.stdout, allow_nan=False)
