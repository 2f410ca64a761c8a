"""Cuts the history of an engine into slices of its steps, for a fit of the time of a step. Pure."""

import math
from collections.abc import Iterator
from typing import Final

from exporter.analysis.history import History
from exporter.analysis.load_profile import StepSlice

__all__ = ["slices"]

# Neighbours that look most alike are merged until there are at most this many, of at least this length:
# a long calm becomes one slice, a rise keeps many.
_MOST: Final = 48
_LEAST_SECONDS: Final = 2.0
# The history is first cut into this many pieces at most.
_PIECES: Final = 150
# With this many requests in the engine at every poll it was never idle between them.
_BUSY: Final = 3
# A step generates one token for each running request, except for one whose prompt is being computed. With
# several API servers steps are counted more than once: then they seem to generate this many times more.
_COUNTED_TWICE: Final = 1.25
_COUNTERS: Final = (
    "engine_steps", "generation_tokens", "prompt_tokens", "prompt_tokens_computed", "preemptions",
    "inter_token_seconds", "inter_token_count", "prefill_seconds", "prefill_count",
)  # fmt: skip


def slices(history: History) -> tuple[StepSlice, ...]:
    """Return slices of the whole history of this process, oldest first."""
    found = list(_pieces(history))
    context = _context(history)
    while len(found) > 1:
        crowded = len(found) > _MOST
        costs = [
            (_difference(found[i], found[i + 1], context), i)
            for i in range(len(found) - 1)
            if crowded or min(found[i].seconds, found[i + 1].seconds) < _LEAST_SECONDS
        ]
        if not costs:
            break
        _, i = min(costs)
        found[i : i + 2] = [found[i].merged(found[i + 1])]
    return tuple(each for each in found if each.steps > 0 and each.outputs > 0)


def _context(history: History) -> float:
    """Return about how many tokens a running request holds: a victim computes them again."""
    start = history.window_start(-math.inf)
    running, usage = history.mean("requests_running", start), history.mean("kv_usage", start)
    cache = history.snapshot.cache if history.snapshot else None
    if not running or usage is None or cache is None or not cache.num_gpu_blocks or not cache.block_size:
        return 0.0
    return usage * cache.num_gpu_blocks * cache.block_size / running


def _difference(one: StepSlice, other: StepSlice, context: float) -> float:
    """Return how much is lost by merging two slices: the differences of what a step computes."""

    def place(each: StepSlice) -> tuple[float, float]:
        steps = max(each.steps, 1.0)
        prefill = (each.prompt_tokens + context * each.preemptions) / steps
        return math.log1p(each.outputs / steps), math.log1p(prefill)

    (decoding, prefill), (others_decoding, others_prefill) = place(one), place(other)
    weight = one.seconds * other.seconds / ((one.seconds + other.seconds) or 1.0)
    distance = (decoding - others_decoding) ** 2 + 0.5 * (prefill - others_prefill) ** 2
    return weight * distance + 0.2 * (one.busy != other.busy)


def _pieces(history: History) -> Iterator[StepSlice]:
    times = history.times
    begin = history.window_start(-math.inf)
    seconds = max(1.0, history.span(begin) / _PIECES)
    for end in range(begin + 1, len(times)):
        if times[end] - times[begin] >= seconds:
            piece = _piece(history, begin, end)
            if piece is not None:
                yield piece
            begin = end


def _piece(history: History, begin: int, end: int) -> StepSlice | None:
    """Return the steps between two polls; None if they cannot be counted."""
    columns = history.columns

    def grown(name: str) -> float:
        change = columns[name][end] - columns[name][begin]
        return 0.0 if math.isnan(change) else change

    sums = {name: grown(name) for name in _COUNTERS}
    polls = slice(begin, end + 1)
    running = columns["requests_running"][polls]
    in_flight = map(sum, zip(running, columns["requests_waiting"][polls], strict=True))
    steps, outputs = sums["engine_steps"], sums["generation_tokens"]
    prompts = sums["prompt_tokens_computed"]
    if math.isnan(columns["prompt_tokens_computed"][end]):
        found = sums["prompt_tokens"] * grown("prefix_hits") / (grown("prefix_queries") or 1.0)
        prompts = max(0.0, sums["prompt_tokens"] - found)
    at_once = sum(running) / len(running)
    if at_once > 0 and steps * at_once > _COUNTED_TWICE * outputs > 0:
        steps = outputs / at_once
    if min(steps, outputs, prompts) < 0 or math.isnan(at_once):
        return None
    return StepSlice(
        age=history.times[-1] - (history.times[begin] + history.times[end]) / 2,
        seconds=history.times[end] - history.times[begin],
        steps=steps,
        prompt_tokens=prompts,
        outputs=outputs,
        preemptions=sums["preemptions"],
        inter_token_seconds=sums["inter_token_seconds"],
        gaps=sums["inter_token_count"],
        prefill_seconds=sums["prefill_seconds"],
        prefills=sums["prefill_count"],
        busy=float(min(in_flight) >= _BUSY),
    )
