"""Forecasts the effect of each change on an engine, for all commands and the sidecar.

The sidecar starts ``python -m exporter.simulation.worker`` as a process for one forecast. It reads a request
as JSON on standard input and writes the forecast as JSON on standard output.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
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
# It sleeps after each of these slices of CPU time, in seconds. Its memory is bounded, whatever a server says.
_SLICE: Final = 0.002
_DUTY: Final = 0.5
_MOST_MEMORY: Final = 48 << 20


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
    # The sidecar's process has no use for these, and little memory.
    import multiprocessing  # noqa: PLC0415
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415

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


def _allowed_cores() -> float:
    """Return how many cores the container may use, at most one: by cgroup version 2, else version 1."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return 1.0 if quota == "max" else min(1.0, int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (
            Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").read_text(encoding="ascii")
            for name in ("quota", "period")
        )
        return min(1.0, int(quota) / int(period)) if int(quota) > 0 else 1.0
    return 1.0


def _rest_often(cores: float) -> None:
    """Sleep after each short slice of work, so that half of the CPU time is left to the poller."""
    last = time.process_time()

    def rest(_number: int, _frame: object) -> None:
        nonlocal last
        worked = time.process_time() - last  # below 0 where a second signal came in the midst of this line
        time.sleep(max(0.0, worked) * (1 / (_DUTY * cores) - 1))
        last = time.process_time()

    signal.signal(signal.SIGPROF, rest)
    signal.setitimer(signal.ITIMER_PROF, _SLICE, _SLICE)


def _main() -> None:
    os.nice(_NICE)
    _rest_often(_allowed_cores())
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    request = json.load(sys.stdin)
    document = answer(request["engine"], request["status"], WhatIfConfig(**request["limits"]))
    signal.setitimer(signal.ITIMER_PROF, 0)  # the end of the interpreter takes the handler away
    json.dump(document, sys.stdout, allow_nan=False)


if __name__ == "__main__":
    _main()
