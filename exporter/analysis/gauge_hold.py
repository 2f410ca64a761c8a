"""Keeps gauges that are printed less often than they are polled. Pure.

Ray prints an engine's gauges once in some seconds and its counters always. A gauge that is not there holds
for one and a half of its own periods; an engine whose gauges are gone for longer while its counters stand
still is gone itself.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from exporter.analysis.history import COUNTERS, GAUGES
from exporter.vllm.exposition import Snapshot

__all__ = ["GaugeHold"]

_PERIODS: Final = 1.5
# Before the second time the period is not known; no exporter prints more seldom than this.
_FIRST_HOLD_SECONDS: Final = 60.0
_NEEDED: Final = frozenset({"requests_running", "requests_waiting", "kv_usage"})


class GaugeHold:
    """Holds the gauges of one engine."""

    __slots__ = ("_before", "_period", "_seen_at", "_shown", "_skipped", "gone")

    def __init__(self) -> None:
        # The gauges did not come again in time, and no counter has moved since they were last there.
        self.gone = False
        self._shown: Mapping[str, float] = {}  # values of the last body with gauges
        self._before: Mapping[str, float] = {}  # values of the last body
        self._seen_at = math.nan
        self._period = _FIRST_HOLD_SECONDS / _PERIODS
        self._skipped = False

    def fill(self, t: float, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the gauges that still hold; unchanged where it has gauges of its own."""
        values = snapshot.values
        if not _NEEDED.isdisjoint(values) or not _NEEDED.isdisjoint(snapshot.untrusted):
            if self._skipped:
                self._period = t - self._seen_at
            self._seen_at, self._skipped, self.gone = t, False, False
            self._shown = self._before = values
            return snapshot
        gauges, counters = _some(GAUGES, self._shown), _some(COUNTERS, values)
        if not gauges or not counters:
            return snapshot
        before, self._before = _some(COUNTERS, self._before), values
        self._skipped = True
        if t - self._seen_at <= _PERIODS * self._period:
            return replace(snapshot, values={**gauges, **values})
        self.gone = counters == before
        return snapshot


def _some(names: Iterable[str], values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in names if name in values}
