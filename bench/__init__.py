"""What the project promises in figures, measured: ``python -m bench [NAME ...]`` prints one table.

A benchmark is a function without parameters that gives rows; `bench.__main__` lists them. Where two
things are compared they run by turns in one process or side by side in two, and medians are taken, so
that a busy machine slows both; where single measurements were kept, a row has their first and ninth decile.
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
    """One figure, with the bar that it is held against where there is one.

    Attributes:
        what: what was measured, in words.
        figure: the result, in `unit`.
        unit: ``us``, ``ms``, ``x`` for a ratio, ...
        bar: the figure that was promised.
        side: which side of the bar is good.
        low: a tenth of the single measurements were at most this; None where there was one.
        high: and a tenth at least this.
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
        """The median of single measurements, and how far they lie apart."""
        deciles = statistics.quantiles(single, n=10)
        return cls(what, statistics.median(single), unit, bar, side, deciles[0], deciles[-1])

    @property
    def holds(self) -> bool:
        """Whether the figure is on the good side of its bar."""
        if self.bar is None:
            return True
        return self.figure >= self.bar if self.side == "at least" else self.figure <= self.bar


def turns(rounds: int, *functions: Callable[[int], object], in_a_row: int = 1) -> Sequence[Sequence[float]]:
    """The seconds of one call of each function, on average over its turn in each round.

    Args:
        rounds: in each the functions take turns.
        functions: what to measure; called with the number of the call.
        in_a_row: calls of one function before it is the next one's turn. With 1 each finds the
            processor's caches full of what the other left there.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for first in range(0, rounds * in_a_row, in_a_row):
        for function, times in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            for number in range(first, first + in_a_row):
                function(number)
            times.append((time.perf_counter() - start) / in_a_row)
    return seconds
