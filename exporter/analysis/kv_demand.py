"""How much of the KV cache the requests want: the numbers behind an advice, from what was seen of an engine.

Pure. The formulas are in `exporter.analysis.kv_formulas`.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from exporter.analysis import kv_formulas
from exporter.analysis.kv_formulas import Moments
from exporter.analysis.lengths import Lengths
from exporter.analysis.situation import Situation

__all__ = ["Held", "held_context", "need", "seats_that_fit"]

_BLOCK: Final = 16.0
# The bucket without a bound is taken to reach this far beyond the last one.
_BEYOND: Final = 1.5


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens that a running request holds.

    Attributes:
        mean: h.
        deviation: its standard deviation.
        source: what it was computed from, in words.
    """

    mean: float
    deviation: float
    source: str


def held_context(s: Situation) -> Held | None:
    """What a running request holds: from the lengths of finished requests, at least what is measured.

    Requests that never finish show in no histogram, but they hold blocks: used tokens by running
    requests is the floor.
    """
    measured = _measured(s)
    told = _told(s)
    if told is None:
        return None if measured is None else Held(measured, measured / 2, "used tokens by running requests")
    if measured is not None and measured > told.mean:
        return Held(measured, told.deviation * measured / told.mean, "used tokens by running requests")
    return told


def _measured(s: Situation) -> float | None:
    start = s.history.start_of(s.t - s.thresholds.window)
    usage, running = s.history.mean("kv_usage", start), s.history.mean("requests_running", start)
    capacity = s.signals.kv_capacity_tokens
    if not usage or not running or capacity is None:
        return None
    return usage * capacity / running


def _told(s: Situation) -> Held | None:
    prompts, outputs = s.history.prompt_lengths.lengths(), s.history.output_lengths.lengths()
    if prompts is None or outputs is None:
        return None
    p, o = _moments(prompts), _moments(outputs)
    if p is None or o is None or o[0] <= 0:
        return None
    return Held(*kv_formulas.held(p, o), "lengths of finished requests")


def _moments(lengths: Lengths) -> Moments | None:
    """First three moments of a length: from the middles of the buckets, scaled to the exact mean.

    Without buckets lengths are taken as exponential, which is wide.
    """
    mean = lengths.mean
    if mean is None:
        return None
    if not lengths.detailed:
        return mean, 2 * mean**2, 6 * mean**3
    bounds = [0.0, *(bound for bound, _ in lengths.buckets)]
    sums = [0.0, 0.0, 0.0]
    for (low, high), (_, inside) in zip(pairwise(bounds), lengths.buckets, strict=True):
        middle = (low + high) / 2 if math.isfinite(high) else low * _BEYOND
        for power in range(3):
            sums[power] += inside * middle ** (power + 1)
    first, second, third = (total / lengths.count for total in sums)
    if first <= 0:
        return None
    scale = mean / first
    return mean, second * scale**2, third * scale**3


def need(s: Situation, held: Held | None) -> float | None:
    """Tokens that all running and waiting requests would hold, by the capacity: an upper bound; 1 is full."""
    capacity = s.signals.kv_capacity_tokens
    if held is None or capacity is None or s.requests is None:
        return None
    return s.requests * held.mean / capacity


def seats_that_fit(s: Situation, held: Held | None) -> int | None:
    """The most requests that run together without preemption, by `kv_formulas.seats`."""
    capacity = s.signals.kv_capacity_tokens
    if held is None or capacity is None:
        return None
    cache = s.history.snapshot.cache if s.history.snapshot else None
    block = float(cache.block_size) if cache is not None and cache.block_size else _BLOCK
    return kv_formulas.seats(capacity, held.mean, held.deviation, block)
