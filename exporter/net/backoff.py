"""How long to wait after failures."""

from typing import Final

__all__ = ["backoff"]

_JITTER: Final = 0.2
_MOST_DOUBLINGS: Final = 10


def backoff(first: float, longest: float, doublings: int, chance: float) -> float:
    """Return seconds to wait: `first`, doubled up to `longest`, minus at most a fifth by `chance` (0 to 1).

    Without chance, many exporters would ask one server in step.
    """
    return min(longest, first * 2.0 ** min(doublings, _MOST_DOUBLINGS)) * (1 - _JITTER * chance)
