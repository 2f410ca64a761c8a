"""What the project promises in figures, measured: ``python -m bench [NAME ...]`` prints one table.

A benchmark is a function without parameters that gives rows; `bench.__main__` lists them. Where two
things are compared they run by turns in one process, and medians are taken, so that a busy machine
slows both.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Row", "medians"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, with the bar that it is held against where there is one.

    Attributes:
        what: what was measured, in words.
        figure: the result, in `unit`.
        unit: ``us``, ``ms``, ``x`` for a ratio, ...
        bar: the figure that was promised.
        side: which side of the bar is good.
    """

    what: str
    figure: float
    unit: str
    bar: float | None = None
    side: Literal["at least", "at most"] = "at least"

    @property
    def holds(self) -> bool:
        """Whether the figure is on the good side of its bar."""
        if self.bar is None:
            return True
        return self.figure >= self.bar if self.side == "at least" else self.figure <= self.bar


def medians(rounds: int, *functions: Callable[[int], object], in_a_row: int = 1) -> Sequence[float]:
    """The median seconds of one call of each function.

    Args:
        rounds: in each the functions take turns.
        functions: what to measure; called with the number of the call.
        in_a_row: calls of one function before it is the next one's turn. With 1 each finds the
            processor's caches full of what the other left there.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for first in range(0, rounds * in_a_row, in_a_row):
        for function, times in zip(functions, seconds, strict=True):
            for number in range(first, first + in_a_row):
                start = time.perf_counter()
                function(number)
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]
