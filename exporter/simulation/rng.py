"""A small random number generator with the same numbers on every Python version and machine.

It uses only integer arithmetic: the standard library guarantees its stream for ``random()`` alone, and
``math.log`` may differ in the last bit between C libraries. That would move an arrival by a nanosecond and,
in a full pool, change which request is preempted.
"""

from typing import Final

__all__ = ["Rng"]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


class Rng:
    """SplitMix64 (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number generators")."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def bits(self) -> int:
        """Return the next 64 random bits as a whole number."""
        self._state = state = (self._state + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        return state ^ (state >> 31)

    def below(self, bound: int) -> int:
        """Return a whole number from 0 to ``bound`` - 1, each equally likely (bias below 2**-32)."""
        return (self.bits() * bound) >> 64

    def exponential(self, mean: int) -> int:
        """Return an exponentially distributed whole number with the given mean, without a logarithm.

        Von Neumann's method (1951): count falling runs of uniform numbers; a run of odd length accepts
        its first number as the fraction, and each rejected run adds one whole mean.
        """
        whole = 0
        while True:
            first = previous = self.bits()
            length = 1
            while (following := self.bits()) <= previous:
                previous = following
                length += 1
            if length % 2:
                return ((whole << 64) + first) * mean >> 64
            whole += 1

    def fork(self) -> "Rng":
        """Return an independent generator: drawing more from one does not change the other."""
        return Rng(self.bits())
