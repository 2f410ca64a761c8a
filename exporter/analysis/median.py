"""The median. The standard library's loads decimal and fractions, half a mebibyte."""

from collections.abc import Iterable

__all__ = ["median"]


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two middle ones; raises ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("expected values, got none")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
