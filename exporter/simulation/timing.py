"""The time of an engine step, from what is scheduled in it.

A step takes a fixed time (reading the weights, launching kernels, scheduling), a time per scheduled token
(compute, mostly prefill) and a time per scheduled sequence (sampling, attention over its context). Times are
whole nanoseconds, so a sum does not depend on its order and a run is the same on every machine.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from exporter.analysis.load_profile import StepSlice

__all__ = ["NANOSECONDS", "StepTime", "fit", "nanoseconds"]

NANOSECONDS: Final = 1_000_000_000


def nanoseconds(seconds: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(seconds * NANOSECONDS)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one step: ``fixed + per_token * tokens + per_sequence * sequences`` (+ swapped blocks).

    All parts are in nanoseconds. The defaults resemble an 8B model on one data-centre GPU: at least 10 ms,
    27 ms with 256 requests decoding, 40,000 prompt tokens/s. `fit` returns the parts that match observations.
    """

    fixed: int = 10_000_000
    per_token: int = 25_000  # prefill and decode alike
    per_sequence: int = 40_000
    # One KV block over PCIe, one way (recovery ``swap`` only): 2 MiB (16 tokens of an 8B model in 16 bit) at
    # some 20 GiB/s.
    per_swapped_block: int = 100_000

    def of(self, tokens: int, sequences: int, swapped_blocks: int = 0) -> int:
        """Return the nanoseconds of a step."""
        return (
            self.fixed
            + self.per_token * tokens
            + self.per_sequence * sequences
            + self.per_swapped_block * swapped_blocks
        )

    def scaled(self, factor: float) -> "StepTime":
        """Return all parts multiplied by a factor, except the PCIe copies."""
        return StepTime(
            round(self.fixed * factor),
            round(self.per_token * factor),
            round(self.per_sequence * factor),
            self.per_swapped_block,
        )


def fit(samples: Iterable[StepSlice], shape: StepTime | None = None) -> StepTime:
    """Fit a step time to observations, by least squares without negative parts.

    With fewer than three samples the parts cannot be separated: then ``shape`` (by default the default
    model) is scaled so that the observed steps take the observed time.

    Raises:
        ValueError: no sample has both time and steps.
    """
    shape = shape or StepTime()
    usable = [s for s in samples if s.seconds > 0 and s.steps > 0]
    if not usable:
        raise ValueError("expected at least one sample with seconds and steps above 0, got none")
    parts = _least_squares(usable) if len(usable) >= 3 else None  # noqa: PLR2004 -- three unknowns
    if parts is None:
        modelled = sum(
            shape.fixed * s.steps + shape.per_token * s.tokens + shape.per_sequence * s.sequences
            for s in usable
        )
        return shape.scaled(sum(s.seconds for s in usable) * NANOSECONDS / modelled)
    fixed, per_token, per_sequence = (nanoseconds(part) for part in parts)
    return StepTime(fixed, per_token, per_sequence, shape.per_swapped_block)


def _least_squares(samples: Sequence[StepSlice]) -> tuple[float, ...] | None:
    """Return the non-negative parts with the least squared *relative* error, or None.

    The error is relative so that a long run does not outweigh the short ones. Three unknowns are few enough
    to try every subset of parts above zero.
    """
    rows = [tuple(x / s.seconds for x in (s.steps, s.tokens, s.sequences)) for s in samples]
    best: tuple[float, tuple[float, ...]] | None = None
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            solved = _solve([[row[i] for i in chosen] for row in rows])
            if solved is None or min(solved) < 0:
                continue
            parts = tuple(solved[chosen.index(i)] if i in chosen else 0.0 for i in range(3))
            error = sum((sum(p * x for p, x in zip(parts, row, strict=True)) - 1.0) ** 2 for row in rows)
            if best is None or error < best[0] * (1 - 1e-9):
                best = (error, parts)
    return None if best is None else best[1]


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Solve the normal equations of ``row . parts = 1`` by Gaussian elimination; None when singular."""
    size = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(matrix[r][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) <= 1e-12 * max(1.0, abs(matrix[i][-1])):
            return None
        for r in range(size):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][-1] / matrix[i][i] for i in range(size)]
