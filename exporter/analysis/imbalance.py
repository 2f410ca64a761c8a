"""What concerns a model as a whole: whether its data-parallel engines share the load. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from exporter.analysis.history import History
from exporter.config import AnalysisConfig

__all__ = ["ModelWatch"]

# An imbalance that is there ends below this share of the factor's excess.
_LEAVE: Final = 0.6
# A cache this full while the mean of all is this much lower is a share of KV, not of requests.
_KV_FULL: Final = 0.8
_KV_APART: Final = 0.4


@dataclass(frozen=True, slots=True)
class _Load:
    """Means over the queue window: requests in the engine, and its KV usage."""

    requests: float
    kv_usage: float


class ModelWatch:
    """Watches the engines of one model.

    Attributes:
        imbalanced: one engine carries far more than its share, and has for a while.
    """

    __slots__ = ("imbalanced",)

    def __init__(self) -> None:
        self.imbalanced = False

    def observe(self, histories: Sequence[History], limits: AnalysisConfig) -> None:
        """Look at the engines after a poll; `histories` are those that the last good body had."""
        if len(histories) < 2:  # noqa: PLR2004 (the rule, and nothing to compare)
            self.imbalanced = False
            return
        loads = [load for history in histories if (load := _load(history, limits)) is not None]
        if len(loads) < len(histories):
            self.imbalanced = False
            return
        excess = (limits.imbalance_factor - 1) * (_LEAVE if self.imbalanced else 1.0)
        self.imbalanced = _is_imbalanced(loads, 1 + excess, limits.imbalance_requests)


def _load(history: History, limits: AnalysisConfig) -> _Load | None:
    t = history.times[-1]
    start = history.start_of(t - limits.queue_window)
    running, waiting = history.mean("requests_running", start), history.mean("requests_waiting", start)
    usage = history.mean("kv_usage", start)
    if running is None or waiting is None or usage is None or history.span(start) < limits.queue_window:
        return None
    return _Load(running + waiting, usage)


def _is_imbalanced(loads: Iterable[_Load], factor: float, least: int) -> bool:
    loads = list(loads)
    total = sum(load.requests for load in loads)
    if total < least:
        return False
    mean = total / len(loads)
    if max(load.requests for load in loads) >= factor * mean:
        return True
    usages = [load.kv_usage for load in loads]
    return max(usages) >= _KV_FULL and max(usages) - sum(usages) / len(usages) >= _KV_APART
