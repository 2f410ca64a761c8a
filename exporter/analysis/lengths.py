"""Keeps the lengths of recent requests, from the buckets of vLLM's histograms. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import Final

__all__ = ["LengthHistogram", "LengthWindow"]

# The distribution covers the last 15 to 30 minutes, as soon as they have enough requests, and before that
# the whole life of the process.
PERIOD_SECONDS: Final = 900.0
ENOUGH: Final = 50.0

Buckets = Mapping[float, float]


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """A distribution of lengths in tokens: ``(upper bound, requests in the bucket)``, bounds rising."""

    buckets: tuple[tuple[float, float], ...]
    count: float
    total: float | None
    produced: float | None = None  # tokens generated meanwhile, also for requests that have not finished

    @property
    def mean(self) -> float | None:
        """Return the mean length in tokens; None without requests."""
        return self.total / self.count if self.total is not None and self.count > 0 else None

    @property
    def detailed(self) -> bool:
        """Return whether there are more buckets than the one without a bound."""
        return len(self.buckets) > 1

    def quantile(self, share: float) -> float | None:
        """Return the length that `share` of the requests do not exceed: the upper bound of its bucket.

        It does not interpolate: the caller asks whether such a request fits. None without requests, or if the
        length is in the bucket without a bound.
        """
        if self.count <= 0:
            return None
        wanted, seen = share * self.count, 0.0
        for bound, inside in self.buckets:
            seen += inside
            if seen >= wanted and inside > 0:
                return bound if math.isfinite(bound) else None
        return None


class LengthWindow:
    """Keeps the distribution of the recent past from cumulative buckets."""

    __slots__ = ("_bases", "_lengths", "_now", "_produced", "_sum")

    def __init__(self) -> None:
        self._now: Buckets = {}
        self._sum: float | None = None
        self._produced: float | None = None
        self._bases: list[tuple[float, Buckets, float | None, float | None]] = []
        self._lengths: LengthHistogram | None = None  # the current one, once it was needed

    def observe(self, t: float, buckets: Buckets, total: float | None, produced: float | None = None) -> None:
        """Add the cumulative buckets of a poll; a reset starts over."""
        if buckets != self._now or total != self._sum:  # `produced` alone says nothing of lengths
            if self._count(buckets) < self._count(self._now):
                self._bases = []
            self._now, self._sum, self._produced, self._lengths = buckets, total, produced, None
        if not self._bases or t - self._bases[-1][0] >= PERIOD_SECONDS:
            self._bases = [*self._bases[-1:], (t, buckets, total, produced)]
            self._lengths = None

    def lengths(self) -> LengthHistogram | None:
        """Return the current distribution; None without data."""
        if self._lengths is None and self._now:
            _, base, base_sum, base_produced = self._bases[0]
            if self._count(self._now) - self._count(base) < ENOUGH:
                base, base_sum, base_produced = {}, 0.0, 0.0
            self._lengths = self._between(base, base_sum, base_produced)
        return self._lengths

    def _between(self, base: Buckets, base_sum: float | None, base_produced: float | None) -> LengthHistogram:
        counts = self._now
        bounds = sorted(counts)
        # A server may print a bucket below the previous one: it counts as empty.
        below = list(accumulate((counts[bound] - base.get(bound, 0.0) for bound in bounds), max, initial=0.0))
        inside = map(sub, below[1:], below)
        total, produced = (
            None if now is None or before is None else max(0.0, now - before)
            for now, before in ((self._sum, base_sum), (self._produced, base_produced))
        )
        return LengthHistogram(tuple(zip(bounds, inside, strict=True)), below[-1], total, produced)

    @staticmethod
    def _count(buckets: Buckets) -> float:
        return max(buckets.values(), default=0.0)
