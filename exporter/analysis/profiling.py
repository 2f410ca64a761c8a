"""Computes the load profile of an engine from its history.

Pure, and computed only on demand: no poll pays for it.
"""

import math
from typing import Final

from exporter.analysis.history import History
from exporter.analysis.load_profile import LoadProfile
from exporter.analysis.median import median
from exporter.analysis.step_slices import slices
from exporter.config import AnalysisConfig

__all__ = ["profile"]

# The shortest window with this many finished requests describes the present best.
_ENOUGH: Final = 50
# The window is the longest of these shares of it in which the load is steady, so that the calm before a storm
# is no part of it; soon after a change it is too short for a forecast.
_SHARES: Final = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25, 0.15, 0.1)
_SAME_RUNNING: Final = 0.2
_SAME_IN_FLIGHT: Final = 0.12
_SAME_REQUESTS: Final = 2.0


def profile(history: History, capacity: float | None, thresholds: AnalysisConfig) -> LoadProfile | None:
    """Compute the load profile over the shortest window with enough finished requests.

    `capacity`: tokens of the engine's KV pool, where known. Returns None while the gauges or the counter of
    finished requests are unknown.
    """
    start = history.recent_start(thresholds.window)
    if (history.increase("requests_finished", start) or 0.0) < _ENOUGH:
        start = history.recent_start(thresholds.long_window)
    start = _steady(history, start)
    seconds = history.span(start)
    running, waiting = history.mean("requests_running", start), history.mean("requests_waiting", start)
    finished = history.increase("requests_finished", start)
    if running is None or waiting is None or finished is None or seconds <= 0:
        return None
    in_flight = _in_flight(history, start) or [running + waiting]
    middle = median(in_flight)
    preempted = history.increase("preemptions", start)
    cache = history.snapshot.cache if history.snapshot else None
    return LoadProfile(
        window_seconds=seconds,
        arrivals_per_second=max(0.0, finished + _gained(history, start)) / seconds,
        requests_running_mean=running,
        requests_running_max=history.highest("requests_running", start) or 0.0,
        requests_waiting_mean=waiting,
        in_flight_median=middle,
        in_flight_deviation=median(abs(each - middle) for each in in_flight),
        preemptions_per_minute=None if preempted is None else preempted * 60 / seconds,
        requests_finished=finished,
        generation_tokens_per_second=history.rate("generation_tokens", start),
        inter_token_seconds=history.ratio("inter_token_seconds", "inter_token_count", start),
        prefix_cache_hit_ratio=_share(history.ratio("prefix_hits", "prefix_queries", start)),
        prompt_tokens=history.prompt_lengths.lengths(),
        output_tokens=history.output_lengths.lengths(),
        steps=slices(history),
        kv_capacity_tokens=capacity,
        num_gpu_blocks=cache.num_gpu_blocks if cache is not None else None,
        block_size=cache.block_size if cache is not None else None,
    )


def _share(hits_per_query: float | None) -> float | None:
    """Return a share, None for more than all: the counters are not what they are taken for."""
    return None if hits_per_query is None or hits_per_query > 1 else hits_per_query


def _steady(history: History, start: int) -> int:
    """Return the start of the longest part of a window, up to now, in which the load is steady.

    As many requests run in both halves, and what is in flight has not jumped. It may grow evenly: an overload
    is steady as well.
    """
    t, seconds = history.times[-1], history.span(start)
    for share in _SHARES:
        begin = history.window_start(t - share * seconds)
        in_flight = _in_flight(history, begin)
        early, late = _means([each for each in history.columns["requests_running"][begin:] if each >= 0], 2)
        first, middle, last = _means(in_flight, 3)
        runs_alike = abs(late - early) <= max(_SAME_REQUESTS, _SAME_RUNNING * max(early, late))
        jump, least = abs(middle - (first + last) / 2), _SAME_IN_FLIGHT * max(first, middle, last)
        if runs_alike and jump <= max(_SAME_REQUESTS, least):
            break
    return begin


def _means(values: list[float], parts: int) -> list[float]:
    """Return the means of equal parts in a row; 0 for each where there are fewer values than parts."""
    size = len(values) // parts
    if not size:
        return [0.0] * parts
    return [sum(values[i * size : (i + 1) * size]) / size for i in range(parts)]


def _in_flight(history: History, start: int) -> list[float]:
    """Return the running and waiting requests at the polls of a window where both are known."""
    pairs = zip(
        history.columns["requests_running"][start:], history.columns["requests_waiting"][start:], strict=True
    )
    return [both for pair in pairs if not math.isnan(both := sum(pair))]


def _gained(history: History, start: int) -> float:
    """Return by how many requests the engine has grown since the window's start."""
    columns = history.columns
    gained = sum(
        columns[name][-1] - columns[name][start] for name in ("requests_running", "requests_waiting")
    )
    return 0.0 if math.isnan(gained) else gained
