"""The exporter's own metrics: counted as things happen, shown by collectors of their own."""

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from http.client import responses
from operator import add
from typing import Any, ClassVar, Final, Self

from exporter import __version__
from exporter.publish.metrics.samples import Labels, RowCollector, Samples, histogram
from exporter.publish.metrics.table import EXPORTER_METRICS

__all__ = ["ExporterMetrics", "PollCounts"]

_DURATIONS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BOUNDS: Final = (*map(str, _DURATIONS), "+Inf")
_NONE: Final = Labels()
# Their counters begin at 0, so that `rate()` sees the first one.
_USUAL: Final = ("connection_refused", "connection_reset", "timeout")


def _bounded(reason: str) -> str:
    """Return the reason of an error; of statuses that HTTP does not have the class, as each is a series."""
    status = reason.removeprefix("http_")
    unknown = status != reason and status.isdecimal() and int(status) not in responses
    return f"http_{status[0]}xx" if unknown else reason


class PollCounts(RowCollector):
    """Counts the polls of one target. All counts begin at zero."""

    rows = EXPORTER_METRICS
    makers: ClassVar[Mapping[str, Callable[[Any], Samples | None]]] = {
        "exporter_polls": lambda of: [("_total", of.labels, "", "", of.polls)],
        "exporter_polls_skipped": lambda of: [("_total", of.labels, "", "", of.skipped)],
        "exporter_unreadable_lines": lambda of: [("_total", of.labels, "", "", of.unreadable)],
        "exporter_poll_errors": lambda of: _counts(of.labels, "reason", of.errors),
        "exporter_poll_duration_seconds": lambda of: histogram(
            of.labels, _BOUNDS, of.durations, of.duration_sum
        ),
        "exporter_poll_interval_seconds": lambda of: _gauge(of.labels, of.interval),
        "exporter_body_bytes": lambda of: _gauge(of.labels, of.body_bytes),
    }

    def __init__(self, labels: Iterable[tuple[str, str]] = ()) -> None:
        """Begin; `labels` are on every series, and tell targets apart if there are several."""
        super().__init__()
        self.polls = 0
        self.skipped = 0
        self.errors = Counter(dict.fromkeys(_USUAL, 0))
        self.unreadable = 0
        self.interval = math.nan
        self.body_bytes = math.nan
        self.duration_sum = 0.0
        self.durations = [0] * (len(_DURATIONS) + 1)
        self.labels = Labels(labels)

    def label(self, labels: Iterable[tuple[str, str]]) -> None:
        """Show these labels from now on."""
        self.labels = Labels(labels)

    def poll(
        self,
        seconds: float,
        size: int | None,
        error: str | None,
        *,
        interval: float,
        skipped: int = 0,
        unreadable: int = 0,
    ) -> None:
        """Count one poll.

        Args:
            seconds: how long the server took.
            size: bytes of the body, None if there is none.
            error: why the poll failed, None if it did not.
            interval: seconds between polls from now on.
            skipped: starts of the schedule that passed while a poll was still under way.
            unreadable: lines of the body that could not be read.
        """
        self.polls += 1
        self.skipped += skipped
        self.interval = interval
        self.unreadable += unreadable
        if error is not None:
            self.errors[_bounded(error)] += 1
        if size is not None:
            self.body_bytes = size
            self.duration_sum += seconds
            self.durations[sum(1 for bound in _DURATIONS if seconds > bound)] += 1

    @classmethod
    def total(cls, counts: Iterable["PollCounts"]) -> Self:
        """Add up the polls of several targets; interval and body size are the largest."""
        total = cls()
        for one in counts:
            total.polls += one.polls
            total.skipped += one.skipped
            total.unreadable += one.unreadable
            total.errors.update(one.errors)
            total.duration_sum += one.duration_sum
            total.durations = list(map(add, total.durations, one.durations))
            total.interval = _larger(total.interval, one.interval)
            total.body_bytes = _larger(total.body_bytes, one.body_bytes)
        return total


class ExporterMetrics(RowCollector):
    """Counts what happens in this process as a whole; the polls of each target are in its `PollCounts`."""

    rows = EXPORTER_METRICS
    makers: ClassVar[Mapping[str, Callable[[Any], Samples | None]]] = {
        "exporter_build": lambda _of: [("_info", _build(), "", "", 1)],
        "exporter_collect_errors": lambda of: _counts(_NONE, "metric", of.collect_errors),
        "exporter_notifications": lambda of: _counts(_NONE, "outcome", of.notifications) or None,
        "exporter_targets": lambda of: [("", _NONE, "source", *pair) for pair in of.targets.items()] or None,
        "exporter_targets_left_out": lambda of: _gauge(_NONE, of.left_out) if of.targets else None,
        "exporter_discovery_failures": lambda of: _counts(_NONE, "source", of.discovery_failures) or None,
        "exporter_config_last_reload_successful": lambda of: (
            None if math.isnan(of.reloaded_at) else _gauge(_NONE, of.reload_succeeded)
        ),
        "exporter_config_last_reload_success_timestamp_seconds": lambda of: _gauge(_NONE, of.reloaded_at),
    }

    def __init__(self) -> None:
        """Begin."""
        super().__init__()
        self.collect_errors: Counter[str] = Counter()
        self.notifications: Counter[str] = Counter()
        self.targets: Mapping[str, int] = {}
        self.left_out = 0
        self.discovery_failures: Mapping[str, int] = {}
        self.reload_succeeded = 1.0
        self.reloaded_at = math.nan

    def collect_error(self, metric: str) -> None:
        """Count a metric that could not be built."""
        self.collect_errors[metric] += 1

    def notified(self, outcome: str, alerts: int) -> None:
        """Count alerts that were pushed to an Alertmanager, by outcome."""
        self.notifications[outcome] += alerts

    def reloaded(self, wall: float | None) -> None:
        """Record a reload: the unix seconds at which it succeeded, None if it failed."""
        self.reload_succeeded = float(wall is not None)
        self.reloaded_at = self.reloaded_at if wall is None else wall


def _build() -> Labels:
    return Labels((("version", __version__), ("python", platform.python_version())))


def _larger(one: float, other: float) -> float:
    """Return the larger of two numbers; a number that is unknown does not count."""
    return max((number for number in (one, other) if not math.isnan(number)), default=math.nan)


def _gauge(labels: Labels, value: float) -> Samples | None:
    return None if math.isnan(value) else [("", labels, "", "", value)]


def _counts(labels: Labels, label: str, values: Mapping[str, int]) -> Samples:
    return [("_total", labels, label, name, value) for name, value in sorted(values.items())]
