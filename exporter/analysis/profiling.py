"""Computes the load profile of an engine from its history.

Pure, and computed only on demand: no poll pays for it.
"""

import math
from collections.abc import Iterator
from typing import Final

from exporter.analysis.history import History
from exporter.analysis.load_profile import LoadProfile, StepSlice
from exporter.config import AnalysisConfig

__all__ = ["profile"]

# The shortest window with this many finished requests describes the present best.
_ENOUGH: Final = 50
# Steps are counted in slices of the window: long enough for a count, short enough to differ.
_SLICE_SECONDS: Final = (1.0, 5.0)
_SLICES: Final = 60
_LEAST_SLICES: Final = 6
# A step generates one token for each running request, except for one whose prompt is being computed. With
# several API servers steps are counted more than once: then they seem to generate this many times more.
_COUNTED_TWICE: Final = 1.25


def profile(history: History, capacity: float | None, thresholds: AnalysisConfig) -> LoadProfile | None:
    """Compute the load profile over the shortest window with enough finished requests.

    `capacity`: tokens of the engine's KV pool, where known. Returns None while the gauges or the counter of
    finished requests are unknown.
    """
    start = history.recent_start(thresholds.window)
    if (history.increase("requests_finished", start) or 0.0) < _ENOUGH:
        start = history.recent_start(thresholds.long_window)
    seconds = history.span(start)
    running, waiting = history.mean("requests_running", start), history.mean("requests_waiting", start)
    finished = history.increase("requests_finished", start)
    if running is None or waiting is None or finished is None or seconds <= 0:
        return None
    preempted = history.increase("preemptions", start)
    cache = history.snapshot.cache if history.snapshot else None
    return LoadProfile(
        window_seconds=seconds,
        arrivals_per_second=max(0.0, finished + _gained(history, start)) / seconds,
        requests_running_mean=running,
        requests_running_max=history.highest("requests_running", start) or 0.0,
        requests_waiting_mean=waiting,
        preemptions_per_minute=None if preempted is None else preempted * 60 / seconds,
        requests_finished=finished,
        generation_tokens_per_second=history.rate("generation_tokens", start),
        inter_token_seconds=history.ratio("inter_token_seconds", "inter_token_count", start),
        prefix_cache_hit_ratio=history.ratio("prefix_hits", "prefix_queries", start),
        prompt_tokens=history.prompt_lengths.lengths(),
        output_tokens=history.output_lengths.lengths(),
        steps=tuple(_slices(history, start))[-_SLICES:],
        kv_capacity_tokens=capacity,
        num_gpu_blocks=cache.num_gpu_blocks if cache is not None else None,
        block_size=cache.block_size if cache is not None else None,
    )


def _gained(history: History, start: int) -> float:
    """Return by how many requests the engine has grown since the window's start."""
    columns = history.columns
    gained = sum(
        columns[name][-1] - columns[name][start] for name in ("requests_running", "requests_waiting")
    )
    return 0.0 if math.isnan(gained) else gained


def _slices(history: History, start: int) -> Iterator[StepSlice]:
    times, columns = history.times, history.columns
    least, most = _SLICE_SECONDS
    seconds = min(most, max(least, history.span(start) / _LEAST_SLICES))
    begin = start
    for end in range(start + 1, len(times)):
        if columns["requests_running"][end] > 0:
            if times[end] - times[begin] >= seconds:
                steps = _steps(history, begin, end)
                if steps is not None:
                    yield steps
                begin = end
        else:  # idle, or unknown
            begin = end


def _steps(history: History, begin: int, end: int) -> StepSlice | None:
    columns = history.columns
    steps = columns["engine_steps"][end] - columns["engine_steps"][begin]
    tokens = columns["step_tokens"][end] - columns["step_tokens"][begin]
    outputs = columns["generation_tokens"][end] - columns["generation_tokens"][begin]
    polled = columns["requests_running"][begin + 1 : end + 1]
    running = sum(polled) / len(polled)
    if not (steps > 0 and tokens >= 0 and outputs > 0 and running > 0):  # NaN fails too
        return None
    sequences = steps * running
    if sequences > _COUNTED_TWICE * outputs:
        steps, sequences = outputs / running, outputs
    return StepSlice(history.times[end] - history.times[begin], steps, tokens, sequences)
