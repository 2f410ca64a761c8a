"""Estimates how much of the KV cache the requests need, from what was seen of an engine.

Pure. The formulas are in `exporter.analysis.kv_formulas`.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from exporter.analysis import kv_formulas
from exporter.analysis.kv_formulas import Moments
from exporter.analysis.lengths import LengthHistogram
from exporter.analysis.situation import Situation

__all__ = ["KvContext", "context_per_request", "need", "seats_that_fit"]

_BLOCK: Final = 16.0
# The bucket without an upper bound is assumed to reach this far beyond the last one.
_BEYOND: Final = 1.5
_FROM_USAGE: Final = "used tokens / running requests"
_FROM_LENGTHS: Final = "lengths of finished requests"


@dataclass(frozen=True, slots=True)
class KvContext:
    """Tokens of KV cache per running request."""

    mean: float  # h of the formulas
    deviation: float  # its standard deviation
    source: str  # the data it was computed from, in words


def context_per_request(s: Situation) -> KvContext | None:
    """Estimate the context of a running request from finished lengths, at least what is measured.

    Requests that never finish are in no histogram, but they hold blocks: used tokens divided by running
    requests is the lower bound.
    """
    measured, expected = _measured(s), _expected(s)
    if expected is None:
        return None if measured is None else KvContext(measured, measured / 2, _FROM_USAGE)
    if measured is not None and measured > expected.mean:
        return KvContext(measured, expected.deviation * measured / expected.mean, _FROM_USAGE)
    return expected


def _measured(s: Situation) -> float | None:
    start = s.history.recent_start(s.thresholds.window)
    usage, running = s.history.mean("kv_usage", start), s.history.mean("requests_running", start)
    capacity = s.signals.kv_capacity_tokens
    if not usage or not running or capacity is None:
        return None
    return usage * capacity / running


def _expected(s: Situation) -> KvContext | None:
    prompts, outputs = s.history.prompt_lengths.lengths(), s.history.output_lengths.lengths()
    if prompts is None or outputs is None:
        return None
    p, o = _moments(prompts), _moments(outputs)
    if p is None or o is None or o[0] <= 0:
        return None
    return KvContext(*kv_formulas.context_per_request(p, o), _FROM_LENGTHS)


def _moments(lengths: LengthHistogram) -> Moments | None:
    """Return three moments of a length: from the middles of the buckets, scaled to the exact mean.

    Without buckets the lengths are assumed to be exponential, which is wide.
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


def need(s: Situation, context: KvContext | None) -> float | None:
    """Return the tokens that all requests would hold, refused ones too / capacity: an upper bound."""
    capacity = s.signals.kv_capacity_tokens
    if context is None or capacity is None or s.demand is None:
        return None
    return s.demand * context.mean / capacity


def seats_that_fit(s: Situation, context: KvContext | None) -> int | None:
    """Return the most requests that run together without preemption, by `kv_formulas.seats`."""
    capacity = s.signals.kv_capacity_tokens
    if context is None or capacity is None:
        return None
    cache = s.history.snapshot.cache if s.history.snapshot else None
    block = float((cache and cache.block_size) or _BLOCK)
    return kv_formulas.seats(capacity, context.mean, context.deviation, block)
