"""The time of an engine step, from what is scheduled in it.

A step takes a fixed time (reading the weights, launching kernels, scheduling), a time per scheduled token
(compute, mostly prefill) and a time per scheduled sequence (sampling, attention over its context). Times are
whole nanoseconds, so a sum does not depend on its order and a run is the same on every machine.
"""

from dataclasses import dataclass
from typing import Final

__all__ = ["NANOSECONDS", "StepTime", "nanoseconds"]

NANOSECONDS: Final = 1_000_000_000


def nanoseconds(seconds: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(seconds * NANOSECONDS)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one step: ``fixed + per_token * tokens + per_sequence * sequences`` (+ swapped blocks).

    All parts are in nanoseconds. The defaults resemble an 8B model on one data-centre GPU: at least 10 ms,
    27 ms with 256 requests decoding, 40,000 prompt tokens/s. `step_fit.fit` fits the parts to a server.
    """

    fixed: int = 10_000_000
    per_token: int = 25_000  # prefill and decode alike
    per_sequence: int = 40_000  # below 0 if decoding takes less per token than prefill
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
