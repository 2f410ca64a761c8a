"""Measures the figures that the project promises: ``python -m bench [NAME ...]`` prints one table.

A benchmark is a function without parameters that returns rows; `bench.__main__` lists them. Compared programs
run in turns in one process, or side by side in two, and medians are used, so that a busy machine slows both.
A row of several measurements has their first and ninth decile.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

__all__ = ["Row", "turns"]

Side = Literal["at least", "at most"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, optionally with a bar that it must meet.

    Attributes:
        what: what was measured, in words.
        figure: the result, in `unit`.
        unit: ``us``, ``ms``, ``x`` for a ratio, ...
        bar: the promised figure.
        side: the side of the bar that meets it.
        low: the first decile of the measurements; None if there was one.
        high: the ninth decile.
    """

    what: str
    figure: float
    unit: str
    bar: float | None = None
    side: Side = "at least"
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(
        cls, what: str, single: Sequence[float], unit: str, bar: float | None = None, side: Side = "at least"
    ) -> Self:
        """Build a row from measurements: their median, first and ninth decile."""
        deciles = statistics.quantiles(single, n=10)
        return cls(what, statistics.median(single), unit, bar, side, deciles[0], deciles[-1])

    @property
    def holds(self) -> bool:
        """Whether the figure meets its bar."""
        if self.bar is None:
            return True
        return self.figure >= self.bar if self.side == "at least" else self.figure <= self.bar


def turns(rounds: int, *functions: Callable[[int], object], in_a_row: int = 1) -> Sequence[Sequence[float]]:
    """Return the seconds of one call of each function, averaged over its turn in each round.

    Args:
        rounds: in each the functions take turns.
        functions: what to measure; called with the number of the call.
        in_a_row: calls of one function before the next one's turn. With 1 each call finds the
            processor's caches filled by the other functions.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for first in range(0, rounds * in_a_row, in_a_row):
        for function, times in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            for number in range(first, first + in_a_row):
                function(number)
            times.append((time.perf_counter() - start) / in_a_row)
    return seconds
