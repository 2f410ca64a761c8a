"""The targets that are watched: started when they are discovered, stopped when they disappear.

A target that disappears and returns is a new one: its counters begin at zero. An address in a cluster is soon
given to another pod; every `rate()` copes with a counter that restarts, but a counter that goes on for
another pod is wrong.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.config import Config
from exporter.net.urls import shown_url
from exporter.publish.alerts.push import Notifier, TargetAlerts
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS, ReadingCollector
from exporter.publish.page.timeline import Timeline
from exporter.runtime.discovery import Labels, Source, Target, sources
from exporter.runtime.pace import Gate, Pace, Place
from exporter.runtime.poller import PollOutcome, Watcher
from exporter.runtime.process import Clocks
from exporter.vllm import series
from exporter.vllm.client import MetricsClient
from exporter.vllm.prober import Prober

__all__ = ["RESERVED", "SECTIONS", "Fleet", "Watched"]

log = logging.getLogger(__name__)

# Labels that series have anyway; a discovered label of the same name is dropped.
RESERVED: Final = frozenset(
    {"target", "le", "quantile", *(label for row in (*METRICS, *EXPORTER_METRICS) for label in row.labels)}
)
# The sections of the configuration that a fleet uses.
SECTIONS: Final = ("targets", "targets_dns", "targets_file_sd", "engine", "gpu", "poll", "analysis")

_Key: TypeAlias = tuple[str, Labels]


class Watched:
    """One target while it is watched, with its history."""

    def __init__(
        self,
        target: Target,
        config: Config,
        own: ExporterMetrics,
        clocks: Clocks,
        gate: Gate | None,
        notifier: Notifier,
        alerts: TargetAlerts | None = None,
    ) -> None:
        """Put the parts together, without opening anything; `gate` and `notifier` are those of `show`.

        `alerts`: of its predecessor with the same name and labels.
        """
        self.target = target
        self.url = shown_url(target.config.url)  # without anything secret
        self.reading: TargetReading | None = None  # the last one, None before the first poll has ended
        facts, arguments = config.facts_of(target.config), config.engine.args
        self.pipeline = Pipeline(config.analysis, facts, config.poll.interval, arguments)
        self.timeline = Timeline()
        self.counts = PollCounts()
        self._own = own
        self._clocks = clocks
        self._client = MetricsClient(target.config, config.poll)
        self._prober = Prober.for_target(target.config, config.poll, "" if config.is_single else target.name)
        self._watcher = Watcher(
            self._client, self.pipeline, Pace(config.poll.interval), self._note, prober=self._prober
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._alerts: TargetAlerts | None = alerts
        self._labels: Labels | None = None if alerts is None else _labels(target, gate)
        self.show(gate, notifier)

    def show(self, gate: Gate | None, notifier: Notifier) -> None:
        """Show the target as the only one (without a gate) or one of several, and move its alerts."""
        labels, before = _labels(self.target, gate), self._alerts
        if before is not None and labels != self._labels:
            before.end()
            before = None
        self._labels = labels
        self._watcher.place = None if gate is None else Place(self.target.name, gate)
        self.counts.label(labels)
        self.collector = ReadingCollector(
            lambda: self.reading, *self._clocks, self._own.collect_error, labels
        )
        self._alerts = notifier.target(dict(labels), before)

    def leave_alerts(self) -> TargetAlerts | None:
        """Return its alerts for a successor, and never end them."""
        alerts, self._alerts = self._alerts, None
        return alerts

    def start(self) -> None:
        """Begin to poll."""
        self._tasks = [asyncio.create_task(one.run()) for one in (self._watcher, self._prober)]

    async def stop(self, *, gone: bool) -> None:
        """Stop polling and close the connections; `gone`, if the exporter goes on, ends its alerts too."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if gone and self._alerts is not None:
            self._alerts.end()
        await self._client.close()
        await self._prober.close()

    def _note(self, outcome: PollOutcome) -> None:
        self.reading = outcome.reading
        self.timeline.add(outcome.reading)
        answer = outcome.answer
        self.counts.poll(
            answer.seconds,
            None if answer.body is None else len(answer.body),
            outcome.reading.error,
            interval=outcome.interval,
            skipped=outcome.skipped,
            unreadable=outcome.reading.unreadable,
        )
        if self._alerts is not None:
            self._alerts.note(outcome.reading)


def _labels(target: Target, gate: Gate | None) -> Labels:
    """Return the labels of its series and alerts: none if it is the only one."""
    return () if gate is None else (("target", target.name), *target.labels)


class Fleet:
    """All targets, from all sources, as they appear and disappear."""

    def __init__(
        self,
        config: Config,
        own: ExporterMetrics,
        notifier: Notifier,
        clocks: Clocks,
        find: Callable[[Config], Sequence[Source]] = lambda config: sources(config, RESERVED),
    ) -> None:
        """Put the parts together, without opening anything; `find` returns the sources of a configuration."""
        self._config = config
        self._own = own
        self._notifier = notifier
        self._clocks = clocks
        self._find = find
        self._sources: Sequence[Source] = find(config)
        self._gate = None if config.is_single else Gate(config.poll.concurrency)
        self._watched: dict[_Key, Watched] = {}
        self._following: dict[Source, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._running = False
        self._left_out = (0, 0)
        self._left: dict[_Key, TargetAlerts] = {}  # of targets that restart
        self.changes = 0  # how many appeared or disappeared so far
        self._reconcile()

    def __iter__(self) -> Iterator[Watched]:
        """The watched targets, in the order in which they were discovered."""
        return iter(list(self._watched.values()))

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def several(self) -> bool:
        """Whether there may be more than one target, so that series need labels."""
        return self._gate is not None

    def start(self) -> None:
        """Begin to discover targets and to poll them."""
        self._running = True
        for watched in self:
            watched.start()
        self._follow()

    async def stop(self) -> None:
        """Stop discovering and polling; the last readings stay."""
        self._running = False
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), return_exceptions=True)
        self._following.clear()
        await asyncio.gather(*self._ending, *(watched.stop(gone=False) for watched in self))

    async def reload(self, config: Config, notifier: Notifier) -> None:
        """Go on with another configuration. Targets that it does not change keep their history."""
        sources = self._merged(self._find(config))
        # A new source has no targets yet: going on without them would end those that stay.
        await asyncio.gather(*(source.look() for source in sources if source not in self._following))
        if not self._running:
            return
        before, again = self._config, notifier is not self._notifier
        self._config, self._notifier, self._sources = config, notifier, sources
        # These are settings that all targets share: if one changes, all targets restart.
        shared = [(one.poll, one.engine.args, one.gpu) for one in (before, config)]
        if shared[0] != shared[1]:
            for key in list(self._watched):
                self._end(key, restarts=True)
        for watched in self:
            watched.pipeline.use(config.analysis)
        if before.is_single != config.is_single or before.poll.concurrency != config.poll.concurrency:
            self._gate, again = (None if config.is_single else Gate(config.poll.concurrency)), True
        if again:
            for watched in self:
                watched.show(self._gate, notifier)
        self._reconcile()
        self._follow()

    def _merged(self, sources: Sequence[Source]) -> Sequence[Source]:
        """The new sources; an old one stays in place of a new one with the same configuration.

        The old one knows its targets already. Two entries of the file may be equal: each takes another one.
        """
        old = list(self._sources)
        merged = []
        for source in sources:
            same = next((one for one in old if one.config == source.config), None)
            if same is not None:
                old.remove(same)
            merged.append(same or source)
        return merged

    def _follow(self) -> None:
        """Begin to follow the sources that are new, and stop following those that are gone."""
        for source in self._following.keys() - set(self._sources):
            self._following.pop(source).cancel()
        for source in self._sources:
            if source.every is not None and source not in self._following:
                self._following[source] = asyncio.create_task(self._look(source))

    async def _look(self, source: Source) -> None:
        while True:
            try:
                await source.look()
                self._reconcile()
            except Exception:  # a fault of ours must not end the discovery
                log.exception("cannot discover targets source=%s", source.name)
            await asyncio.sleep(source.every or 1.0)

    def _reconcile(self) -> None:
        """Watch the wanted targets and no others."""
        wanted = self._wanted()
        for key, watched in list(self._watched.items()):
            if key not in wanted or wanted[key] != watched.target:
                self._end(key, restarts=key in wanted)
        for key, target in wanted.items():
            if key not in self._watched:
                self._begin(target)
        for alerts in self._left.values():
            alerts.end()
        self._left.clear()
        self._own.targets, self._own.discovery_failures = {}, {}
        if self.several:
            series.expect(len(wanted))
            by_source = Counter(target.source for target in wanted.values())
            failures: Counter[str] = Counter()
            for source in self._sources:
                failures[source.name] += source.failures
                by_source[source.name] += 0
            del failures["static"]
            self._own.targets, self._own.discovery_failures = dict(sorted(by_source.items())), failures

    def _wanted(self) -> dict[_Key, Target]:
        """All targets, each once; if they are too many, those that are watched already come first."""
        wanted: dict[_Key, Target] = {}
        doubled = 0
        for source in self._sources:
            for target in source.targets:
                doubled += wanted.setdefault(target.key, target) != target
        most = self._config.poll.max_targets
        cut = max(0, len(wanted) - most)
        self._own.left_out = cut + doubled
        if cut and not self._left_out[0]:
            log.warning("too many targets, ignoring some left_out=%d poll.max_targets=%d", cut, most)
        if doubled and not self._left_out[1]:
            log.warning("targets with the same address and labels, watching one of each left_out=%d", doubled)
        self._left_out = (cut, doubled)
        if cut:
            first = sorted(wanted.values(), key=lambda target: target.key not in self._watched)
            wanted = {target.key: target for target in first[:most]}
        return wanted

    def _begin(self, target: Target) -> None:
        watched = self._watched[target.key] = Watched(
            target,
            self._config,
            self._own,
            self._clocks,
            self._gate,
            self._notifier,
            self._left.pop(target.key, None),
        )
        self.changes += 1
        if self._running:
            log.info("target found target=%s source=%s", target.name, target.source)
            watched.start()

    def _end(self, key: _Key, *, restarts: bool = False) -> None:
        """Forget a target at once; its connections are closed in a task.

        If it restarts, because its configuration changed, its alerts go on.
        """
        watched = self._watched.pop(key)
        if restarts and (alerts := watched.leave_alerts()):
            self._left[key] = alerts
        self.changes += 1
        log.info("target gone target=%s source=%s", watched.target.name, watched.target.source)
        ending = asyncio.ensure_future(watched.stop(gone=True))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
