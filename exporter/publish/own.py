"""What the exporter tells about itself: counted as things happen, shown by a collector of its own."""

import math
import platform
from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from exporter import __version__
from exporter.publish.metrics import EXPORTER_METRICS, PREFIX
from exporter.watch import PollOutcome

__all__ = ["OwnMetrics"]

_DURATIONS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_ROWS: Final = {row.name: row for row in EXPORTER_METRICS}


class OwnMetrics(Collector):
    """Counts polls and faults. All counts begin at zero with the process."""

    def __init__(self) -> None:
        self.polls = 0
        self.skipped = 0
        self.errors: Counter[str] = Counter()
        self.collect_errors: Counter[str] = Counter()
        self.unreadable = 0
        self.interval = math.nan
        self.body_bytes = math.nan
        self.duration_sum = 0.0
        self.durations = [0] * (len(_DURATIONS) + 1)

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

    def collect_error(self, metric: str) -> None:
        """Count a metric that could not be built."""
        self.collect_errors[metric] += 1

    def collect(self) -> Iterator[Metric]:
        """Build all families anew."""
        build = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily(PREFIX + "exporter_build", _ROWS["exporter_build"].help, value=build)
        yield self._counter("exporter_polls", self.polls)
        yield self._counter("exporter_polls_skipped", self.skipped)
        yield self._counters("exporter_poll_errors", self.errors)
        yield self._duration()
        for name, value in (
            ("exporter_poll_interval_seconds", self.interval),
            ("exporter_body_bytes", self.body_bytes),
        ):
            if not math.isnan(value):
                yield GaugeMetricFamily(PREFIX + name, _ROWS[name].help, value=value)
        yield self._counter("exporter_unreadable_lines", self.unreadable)
        yield self._counters("exporter_collect_errors", self.collect_errors)

    def _duration(self) -> Metric:
        row = _ROWS["exporter_poll_duration_seconds"]
        total, buckets = 0, []
        for bound, polls in zip((*map(str, _DURATIONS), "+Inf"), self.durations, strict=True):
            total += polls
            buckets.append((bound, float(total)))
        return HistogramMetricFamily(
            PREFIX + row.name, row.help, buckets=buckets, sum_value=self.duration_sum
        )

    @staticmethod
    def _counter(name: str, value: float) -> Metric:
        return CounterMetricFamily(PREFIX + name, _ROWS[name].help, value=value)

    @staticmethod
    def _counters(name: str, values: Counter[str]) -> Metric:
        row = _ROWS[name]
        family = CounterMetricFamily(PREFIX + name, row.help, labels=row.labels)
        for label, value in sorted(values.items()):
            family.add_metric([label], value)
        return family
