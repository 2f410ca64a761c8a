"""Formulas for the KV cache that a running request holds, and for how many requests fit.

Pure. For prompts P and outputs O, assumed independent, a running request holds on average
``h = E[P] + E[O^2] / (2 E[O])`` tokens (an output is seen while it is generated, half of it on average,
and long outputs are seen longer), with the variance
``E[P^2] + E[P] E[O^2] / E[O] + E[O^3] / (3 E[O]) - h^2``.
"""

import math
from typing import TypeAlias

__all__ = ["Moments", "context_per_request", "seats"]

Moments: TypeAlias = tuple[float, float, float]
"""E[X], E[X^2], E[X^3] of a length in tokens."""


def context_per_request(prompts: Moments, outputs: Moments) -> tuple[float, float]:
    """Return mean and deviation of the tokens that a request holds; the outputs' mean is above 0."""
    p, o = prompts, outputs
    mean = p[0] + o[1] / (2 * o[0])
    variance = p[1] + p[0] * o[1] / o[0] + o[2] / (3 * o[0]) - mean * mean
    return mean, math.sqrt(max(0.0, variance))


def seats(capacity: float, mean: float, deviation: float, block: float) -> int:
    """Return the most requests that run together without preemption, two deviations on the safe side.

    The largest N with ``N (h + block / 2) + 2 s sqrt(N) <= capacity``; half a block is what the last one of
    each request leaves unused on average.

    Args:
        capacity: tokens that the pool holds.
        mean: h, tokens that a running request holds.
        deviation: s, their standard deviation.
        block: tokens of a block.
    """
    each, spread = mean + block / 2, 2 * deviation
    root = (-spread + math.sqrt(spread * spread + 4 * each * capacity)) / (2 * each)
    return math.floor(root * root + 1e-9)
