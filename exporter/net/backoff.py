"""How long to wait after failures."""

from typing import Final

__all__ = ["backoff"]

_JITTER: Final = 0.2
_MOST_DOUBLINGS: Final = 10


def backoff(first: float, longest: float, doublings: int, chance: float) -> float:
    """Seconds to wait: `first`, doubled per failure up to `longest`, minus at most a fifth by chance.

    Args:
        first: seconds after the first failure.
        longest: seconds that are never exceeded.
        doublings: failures since then.
        chance: a random number from 0 to 1; many exporters must not ask one server in step.
    """
    return min(longest, first * 2.0 ** min(doublings, _MOST_DOUBLINGS)) * (1 - _JITTER * chance)
