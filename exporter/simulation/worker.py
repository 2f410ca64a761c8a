"""What each fix would do to an engine: asked by `whatif`, by `check --what-if` and by the status API.

``python -m exporter.simulation.worker`` is the process that the sidecar starts for one forecast. It reads a
question as JSON on standard input and writes the answer as JSON on standard output.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

from exporter.config import WhatIfConfig
from exporter.simulation.candidates import candidates, parse_candidate
from exporter.simulation.from_status import Present, PresentError, present_of
from exporter.simulation.report import as_json, render
from exporter.simulation.whatif import Forecast, forecast, horizon

__all__ = ["as_object", "as_text", "foretell"]

Progress = Callable[[int, int], None]

# The sidecar shares its machine with vLLM: it simulates no longer than this, on one core, at low priority.
_SERVED_SPAN: Final = (300.0, 900.0)
_NICE: Final = 10


def foretell(
    present: Present,
    limits: WhatIfConfig,
    *,
    tried: Sequence[str] = (),
    span: tuple[float, float] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Forecast:
    """Simulate an engine as it is and with every change.

    Args:
        present: the engine.
        limits: how much to simulate, and where the words begin.
        tried: combinations to try beside the single changes, as `parse_candidate` reads them.
        span: seconds to warm up and to measure.
        jobs: processes, all cores by default.
        progress: told how many runs of all are done.

    Raises:
        ValueError: a combination cannot be read.
    """
    changes = [*candidates(present.load, present.engine)]
    changes += [parse_candidate(text, present.engine) for text in tried]
    jobs = jobs or _cores()

    def simulate(mapper: Any) -> Forecast:
        return forecast(
            present.load,
            changes,
            seeds=limits.seeds,
            span=span,
            observed=present.per_minute,
            limits=limits,
            mapper=mapper,
            progress=progress,
        )

    if jobs == 1:
        return simulate(map)
    # Not by forking: the program may have threads.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            return simulate(pool.map)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _cores() -> int:
    """Cores that this process may use: in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_object(name: str, present: Present, result: Forecast) -> dict[str, Any]:
    """A forecast as it leaves the program."""
    return {
        "engine": name or None,
        "present": present.sentence,
        "assumed": list(present.assumed),
        **as_json(result),
    }


def as_text(name: str, present: Present, result: Forecast) -> str:
    """A forecast for people."""
    lines = [f"engine {name}: {present.sentence}" if name else present.sentence]
    lines += [f"assumed: {each}" for each in present.assumed]
    return "\n".join([*lines, render(result)])


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        present = present_of(asked["status"])
    except PresentError as problem:
        return {"error": str(problem)}
    warm_up, measured = horizon(present.load, present.engine)
    span = min(warm_up, _SERVED_SPAN[0]), min(measured, _SERVED_SPAN[1])
    result = foretell(present, WhatIfConfig(**asked["limits"]), span=span, jobs=1)
    return as_object(asked["engine"], present, result)


if __name__ == "__main__":
    os.nice(_NICE)
    json.dump(_answer(json.load(sys.stdin)), sys.stdout, allow_nan=False)
