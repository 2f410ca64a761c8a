"""Keeps gauges that are printed less often than they are polled. Pure.

Ray prints an engine's gauges once in some seconds and its counters always. A gauge that is not there holds
for one and a half of its own periods; an engine whose gauges are gone for longer while its counters stand
still is gone itself.
"""

import math
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

    __slots__ = ("_counters", "_gauges", "_period", "_seen_at", "_skipped", "gone")

    def __init__(self) -> None:
        # The gauges did not come again in time, and no counter has moved since they were last there.
        self.gone = False
        self._gauges: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self._seen_at = math.nan
        self._period = _FIRST_HOLD_SECONDS / _PERIODS
        self._skipped = False

    def fill(self, t: float, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the gauges that still hold; unchanged where it has gauges of its own."""
        values = snapshot.values
        counters = {name: values[name] for name in COUNTERS if name in values}
        if _NEEDED & values.keys() or _NEEDED & snapshot.untrusted.keys():
            if self._skipped:
                self._period = t - self._seen_at
            self._seen_at, self._skipped, self.gone = t, False, False
            self._gauges = {name: values[name] for name in GAUGES if name in values}
            self._counters = counters
            return snapshot
        if not self._gauges or not counters:
            return snapshot
        self._skipped = True
        if t - self._seen_at <= _PERIODS * self._period:
            self._counters = counters
            return replace(snapshot, values={**self._gauges, **values})
        self.gone, self._counters = counters == self._counters, counters
        return snapshot
