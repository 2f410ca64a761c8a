"""What was asked of an engine lately, and how fast it worked: all that a simulation of it needs.

Pure, and computed only when somebody asks: no poll pays for it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from exporter.analysis.history import History
from exporter.analysis.lengths import Lengths
from exporter.config import AnalysisConfig

__all__ = ["Observed", "StepsSeen", "observe"]

# The shortest window with this many finished requests is the present; a longer one tells of the past too.
_ENOUGH: Final = 50
# Steps are counted in slices of the past: long enough for a count, short enough to differ.
_SLICE_SECONDS: Final = (1.0, 5.0)
_SLICES: Final = 60
_LEAST_SLICES: Final = 6
# A step puts out one token for each running request, but for one whose prompt is being computed. Steps that
# would have put out so many times more are counted more than once, as with several API servers.
_COUNTED_TWICE: Final = 1.25


@dataclass(frozen=True, slots=True)
class StepsSeen:
    """Some engine steps in a row, with requests running in every poll of that time.

    Attributes:
        seconds: how long they took.
        steps: those that put out a token.
        tokens: computed in them, prompt and output.
        sequences: sum over the steps of the requests running in each.
    """

    seconds: float
    steps: float
    tokens: float
    sequences: float


@dataclass(frozen=True, slots=True)
class Observed:
    """Means over a window; None is unknown.

    Attributes:
        seconds: the window.
        arrivals_per_second: finished requests and what the engine holds more than before, by the time.
        preemptions_per_minute: counted by the server.
        prompts, outputs: lengths in tokens of finished requests.
        steps: slices of the window.
        num_gpu_blocks: as the server tells it: of all its data-parallel engines together.
        block_size: tokens of a block.
    """

    seconds: float
    arrivals_per_second: float
    running: float
    running_most: float
    waiting: float
    preemptions_per_minute: float | None
    prefix_cache_hit_ratio: float | None
    prompts: Lengths | None
    outputs: Lengths | None
    steps: tuple[StepsSeen, ...]
    kv_capacity_tokens: float | None
    num_gpu_blocks: int | None
    block_size: int | None

    def as_object(self) -> dict[str, Any]:
        """The same in the form in which it leaves the program; the bound of the last bucket is null."""
        return {
            "window_seconds": round(self.seconds, 3),
            "arrivals_per_second": round(self.arrivals_per_second, 6),
            "requests_running_mean": round(self.running, 3),
            "requests_running_max": self.running_most,
            "requests_waiting_mean": round(self.waiting, 3),
            "preemptions_per_minute": _rounded(self.preemptions_per_minute),
            "prefix_cache_hit_ratio": _rounded(self.prefix_cache_hit_ratio),
            "prompt_tokens": _lengths(self.prompts),
            "output_tokens": _lengths(self.outputs),
            "steps": [[round(s.seconds, 3), s.steps, s.tokens, round(s.sequences, 1)] for s in self.steps],
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "num_gpu_blocks": self.num_gpu_blocks,
            "block_size": self.block_size,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _lengths(lengths: Lengths | None) -> dict[str, Any] | None:
    if lengths is None or not lengths.count:
        return None
    buckets = [[bound if math.isfinite(bound) else None, inside] for bound, inside in lengths.buckets]
    return {"mean": _rounded(lengths.mean), "buckets": buckets}


def observe(history: History, capacity: float | None, limits: AnalysisConfig) -> Observed | None:
    """What was asked of an engine in the shortest of the windows that tells enough.

    Args:
        history: its past.
        capacity: tokens that its pool holds, where known.
        limits: whose windows count.

    Returns:
        None while the gauges or the counter of finished requests are unknown.
    """
    t = history.times[-1]
    start = history.start_of(t - limits.window)
    if (history.increase("requests_finished", start) or 0.0) < _ENOUGH:
        start = history.start_of(t - limits.long_window)
    seconds = history.span(start)
    running, waiting = history.mean("requests_running", start), history.mean("requests_waiting", start)
    finished = history.increase("requests_finished", start)
    if running is None or waiting is None or finished is None or seconds <= 0:
        return None
    preempted = history.increase("preemptions", start)
    cache = history.snapshot.cache if history.snapshot else None
    return Observed(
        seconds=seconds,
        arrivals_per_second=max(0.0, finished + _gained(history, start)) / seconds,
        running=running,
        running_most=history.highest("requests_running", start) or 0.0,
        waiting=waiting,
        preemptions_per_minute=None if preempted is None else preempted * 60 / seconds,
        prefix_cache_hit_ratio=history.ratio("prefix_hits", "prefix_queries", start),
        prompts=history.prompt_lengths.lengths(),
        outputs=history.output_lengths.lengths(),
        steps=tuple(_slices(history, start))[-_SLICES:],
        kv_capacity_tokens=capacity,
        num_gpu_blocks=cache.num_gpu_blocks if cache is not None else None,
        block_size=cache.block_size if cache is not None else None,
    )


def _gained(history: History, start: int) -> float:
    """How many requests more the engine holds than at the window's start."""
    columns = history.columns
    gained = sum(
        columns[name][-1] - columns[name][start] for name in ("requests_running", "requests_waiting")
    )
    return 0.0 if math.isnan(gained) else gained


def _slices(history: History, start: int) -> Iterator[StepsSeen]:
    times, columns = history.times, history.columns
    least, most = _SLICE_SECONDS
    seconds = min(most, max(least, history.span(start) / _LEAST_SLICES))
    begin = start
    for end in range(start + 1, len(times)):
        if columns["requests_running"][end] > 0:
            if times[end] - times[begin] >= seconds:
                seen = _steps(history, begin, end)
                if seen is not None:
                    yield seen
                begin = end
        else:  # idle, or unknown
            begin = end


def _steps(history: History, begin: int, end: int) -> StepsSeen | None:
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
    return StepsSeen(history.times[end] - history.times[begin], steps, tokens, sequences)
