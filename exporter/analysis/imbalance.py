"""Watches whether the data-parallel engines of a model share its load. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from exporter.analysis.history import History
from exporter.config import AnalysisConfig

__all__ = ["ImbalanceWatch"]

# An imbalance ends below this share of the excess that starts it.
_LEAVE: Final = 0.6
# Requests may be shared evenly and KV not: one cache this full, and so far above the mean of all.
_KV_FULL: Final = 0.8
_KV_APART: Final = 0.4
_HANGS_SECONDS: Final = 15.0
# A load is a mean over this time.
_LASTS_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Load:
    """Means over the queue window: requests in the engine, and its KV usage; and whether it stands still."""

    requests: float
    kv_usage: float
    hangs: bool


class ImbalanceWatch:
    """Watches whether one of a model's engines has carried far more than its share for a while."""

    __slots__ = ("imbalanced",)

    def __init__(self) -> None:
        self.imbalanced = False

    def observe(self, histories: Sequence[History], thresholds: AnalysisConfig) -> None:
        """Update after a poll; `histories` are of the engines in the last good body."""
        loads = [_load(history) for history in histories] if len(histories) > 1 else []
        known = [load for load in loads if load is not None]
        if not known or len(known) < len(loads):
            self.imbalanced = False
            return
        excess = (thresholds.imbalance_factor - 1) * (_LEAVE if self.imbalanced else 1.0)
        self.imbalanced = _is_imbalanced(known, 1 + excess, thresholds.imbalance_requests)


def _load(history: History) -> _Load | None:
    t = history.times[-1]
    start = history.recent_start(_LASTS_SECONDS)
    running, waiting = history.mean("requests_running", start), history.mean("requests_waiting", start)
    usage = history.mean("kv_usage", start)
    if running is None or waiting is None or usage is None or history.span(start) < _LASTS_SECONDS:
        return None
    hangs = running > 0 and t - history.moved_at > _HANGS_SECONDS
    return _Load(running + waiting, usage, hangs)


def _is_imbalanced(loads: Sequence[_Load], factor: float, least: int) -> bool:
    total = sum(load.requests for load in loads)
    if total < least:
        return False
    mean = total / len(loads)
    if max(loads, key=lambda load: load.requests).hangs:  # its requests are what it is stuck with
        return False
    if max(load.requests for load in loads) >= factor * mean:
        return True
    usages = [load.kv_usage for load in loads]
    return max(usages) >= _KV_FULL and max(usages) - sum(usages) / len(usages) >= _KV_APART
