"""What the exporter tells about itself: counted as things happen, shown by collectors of its own."""

import math
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from exporter import __version__
from exporter.publish.metrics.samples import Labels, MetricRow, RowCollector, Samples, histogram
from exporter.publish.metrics.table import EXPORTER_METRICS
from exporter.runtime.poller import PollOutcome

__all__ = ["OwnMetrics", "PollCounts"]

_DURATIONS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BOUNDS: Final = (*map(str, _DURATIONS), "+Inf")


class PollCounts(RowCollector):
    """Counts the polls of one target, or of all. All counts begin at zero."""

    rows = EXPORTER_METRICS

    def __init__(self, labels: Iterable[tuple[str, str]] = ()) -> None:
        """Begin.

        Args:
            labels: what stands on every series, where several targets are to be told apart.
        """
        super().__init__()
        self.polls = 0
        self.skipped = 0
        self.errors: Counter[str] = Counter()
        self.unreadable = 0
        self.interval = math.nan
        self.body_bytes = math.nan
        self.duration_sum = 0.0
        self.durations = [0] * (len(_DURATIONS) + 1)
        self.labels = Labels(labels)

    def label(self, labels: Iterable[tuple[str, str]]) -> None:
        """Show these labels from now on."""
        self.labels = Labels(labels)

    def poll(self, outcome: PollOutcome) -> None:
        """Count one poll."""
        self.polls += 1
        self.skipped += outcome.skipped
        self.interval = outcome.interval
        self.unreadable += outcome.reading.unreadable
        if outcome.reading.error is not None:
            self.errors[outcome.reading.error] += 1
        body = outcome.answer.body
        if body is not None:
            seconds = outcome.answer.seconds
            self.body_bytes = len(body)
            self.duration_sum += seconds
            self.durations[sum(1 for bound in _DURATIONS if seconds > bound)] += 1

    def samples(self, row: MetricRow) -> Samples | None:
        """The samples of one metric about polls."""
        match row.name:
            case "exporter_polls":
                return self._count(self.polls)
            case "exporter_polls_skipped":
                return self._count(self.skipped)
            case "exporter_unreadable_lines":
                return self._count(self.unreadable)
            case "exporter_poll_errors":
                return _counts(self.labels, "reason", self.errors)
            case "exporter_poll_duration_seconds":
                return histogram(self.labels, _BOUNDS, self.durations, self.duration_sum)
            case "exporter_poll_interval_seconds":
                return self._gauge(self.interval)
            case "exporter_body_bytes":
                return self._gauge(self.body_bytes)
        return None

    def _count(self, value: float) -> Samples:
        return [("_total", self.labels, "", "", value)]

    def _gauge(self, value: float) -> Samples | None:
        return None if math.isnan(value) else [("", self.labels, "", "", value)]


class OwnMetrics(PollCounts):
    """Counts polls, and everything else that happens in this process.

    Attributes:
        apart: whether polls are shown by target, by a `PollCounts` of each, and not here.
    """

    def __init__(self, *, apart: bool = False) -> None:
        """Begin."""
        super().__init__()
        self.apart = apart
        self.collect_errors: Counter[str] = Counter()
        self.notifications: Counter[str] = Counter()
        self.targets: Mapping[str, int] = {}
        self.left_out = 0
        self.discovery_failures: Mapping[str, int] = {}
        self._reload_good = True
        self._reloaded_at: float | None = None

    def collect_error(self, metric: str) -> None:
        """Count a metric that could not be built."""
        self.collect_errors[metric] += 1

    def notified(self, outcome: str, alerts: int) -> None:
        """Count alerts that were pushed to an Alertmanager, by what came of it."""
        self.notifications[outcome] += alerts

    def reloaded(self, wall: float | None) -> None:
        """Note that the configuration was read: when it could be used, None where it could not."""
        self._reload_good = wall is not None
        self._reloaded_at = self._reloaded_at if wall is None else wall

    def samples(self, row: MetricRow) -> Samples | None:
        """The samples of one metric."""
        match row.name:
            case "exporter_build":
                build = self.labels.also(version=__version__, python=platform.python_version())
                return [("_info", build, "", "", 1)]
            case "exporter_collect_errors":
                return _counts(self.labels, "metric", self.collect_errors)
            case "exporter_notifications":  # where nothing is ever pushed there is nothing to count
                return _counts(self.labels, "outcome", self.notifications) or None
            case "exporter_targets":
                return [("", self.labels, "source", name, n) for name, n in self.targets.items()] or None
            case "exporter_targets_left_out":
                return self._gauge(self.left_out) if self.targets else None
            case "exporter_discovery_failures":
                return _counts(self.labels, "source", self.discovery_failures) or None
            case "exporter_config_last_reload_successful":
                return None if self._reloaded_at is None else self._gauge(float(self._reload_good))
            case "exporter_config_last_reload_success_timestamp_seconds":
                return None if self._reloaded_at is None else self._gauge(self._reloaded_at)
        return None if self.apart else super().samples(row)


def _counts(labels: Labels, label: str, values: Mapping[str, int]) -> Samples:
    return [("_total", labels, label, name, value) for name, value in sorted(values.items())]
