"""A histogram of durations in bounded memory."""

from typing import Final

__all__ = ["LatencyHistogram"]

_BITS: Final = 7


class LatencyHistogram:
    """Counts of values in buckets less than 1 % wide; the mean is exact.

    Values are whole numbers of at least 0 (nanoseconds). The values of a bucket have the same leading eight
    bits, so a hundred thousand latencies take a few hundred counts.
    """

    __slots__ = ("_buckets", "count", "total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0

    def add(self, value: int) -> None:
        """Count one value."""
        shift = max(0, value.bit_length() - _BITS - 1)
        least = value >> shift << shift
        self._buckets[least] = self._buckets.get(least, 0) + 1
        self.count += 1
        self.total += value

    @property
    def mean(self) -> float | None:
        """The exact mean, or None without values."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return a quantile (to 1 %), or None without values."""
        if not self.count:
            return None
        rank = max(1, -(-round(share * 1_000_000) * self.count // 1_000_000))
        for least in sorted(self._buckets):
            rank -= self._buckets[least]
            if rank <= 0:
                return least + ((1 << max(0, least.bit_length() - _BITS - 1)) - 1) / 2
        return float(max(self._buckets))
