"""The targets that are watched: started when they are found, stopped when they are gone.

A target that was gone and comes back is a new one: its counters begin at zero, and nothing that was
remembered of its namesake counts. An address in a cluster is soon given to another pod, and a counter that
begins anew is what every `rate()` copes with; one that goes on for somebody else is a lie.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.config import AnalysisConfig, Config, PollConfig
from exporter.net.urls import shown_url
from exporter.publish.alerts.push import Notifier, TargetAlerts
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS, ReadingCollector
from exporter.publish.page.timeline import Timeline
from exporter.runtime.discovery import Labels, Source, Target, sources
from exporter.runtime.poller import Among, Gate, Pace, PollOutcome, Watcher
from exporter.vllm import series
from exporter.vllm.client import MetricsClient
from exporter.vllm.prober import Prober

__all__ = ["RESERVED", "Clocks", "Fleet", "Watched"]

log = logging.getLogger(__name__)

# Labels that series have anyway; a group's label of the same name is left out.
RESERVED: Final = frozenset(
    {"target", "le", "quantile", *(label for row in (*METRICS, *EXPORTER_METRICS) for label in row.labels)}
)


_Key: TypeAlias = tuple[str, Labels]


@dataclass(frozen=True, slots=True)
class Clocks:
    """The time, as whoever runs the fleet has it: monotonic seconds, and unix seconds."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Settings:
    """What all targets share. Where it changes, all of them begin anew."""

    poll: PollConfig
    analysis: AnalysisConfig
    arguments: object

    @classmethod
    def of(cls, config: Config) -> "_Settings":
        return cls(config.poll, config.analysis, config.engine.args)


class Watched:
    """One target while it is watched.

    Attributes:
        target: which one.
        url: its url without anything secret.
        reading: the last one, None before the first poll has ended.
        pipeline, timeline, counts: what is remembered of it.
        collector: shows its reading.
    """

    def __init__(self, target: Target, config: Config, own: ExporterMetrics, clocks: Clocks) -> None:
        """Put the parts together, without opening anything."""
        self.target = target
        self.url = shown_url(target.config.url)
        self.reading: TargetReading | None = None
        facts, arguments = target.config.facts, config.engine.args
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
        self._alerts: TargetAlerts | None = None
        self.collector = self._collector(())

    @property
    def labels(self) -> Labels:
        """What stands on its series where there are several targets."""
        return (("target", self.target.name), *self.target.labels)

    def show(self, gate: Gate | None, notifier: Notifier) -> None:
        """Say whether it is one of several, who then share a gate, and whom its alerts are told."""
        self._watcher.among = None if gate is None else Among(self.target.name, gate)
        labels = () if gate is None else self.labels
        self.counts.label(labels)
        self.collector = self._collector(labels)
        if self._alerts is not None:
            self._alerts.end()
        self._alerts = notifier.target(dict(labels))

    def start(self) -> None:
        """Begin to poll."""
        self._tasks = [asyncio.create_task(one.run()) for one in (self._watcher, self._prober)]

    async def stop(self, *, gone: bool) -> None:
        """Stop polling and close the connections.

        Args:
            gone: whether the target is to be watched no more, which ends its alerts, while the exporter
                goes on.
        """
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if gone and self._alerts is not None:
            self._alerts.end()
        await self._client.close()
        await self._prober.close()

    def _collector(self, labels: Iterable[tuple[str, str]]) -> ReadingCollector:
        clocks = self._clocks
        return ReadingCollector(
            lambda: self.reading, clocks.monotonic, clocks.wall, self._own.collect_error, labels
        )

    def _note(self, outcome: PollOutcome) -> None:
        self.reading = outcome.reading
        self.timeline.add(outcome.reading)
        self._count(outcome)
        if self._alerts is not None:
            self._alerts.note(outcome.reading)

    def _count(self, outcome: PollOutcome) -> None:
        answer, reading = outcome.answer, outcome.reading
        self.counts.poll(
            answer.seconds,
            None if answer.body is None else len(answer.body),
            reading.error,
            interval=outcome.interval,
            skipped=outcome.skipped,
            unreadable=reading.unreadable,
        )


class Fleet:
    """All targets, from all sources, as they come and go.

    Attributes:
        changes: how many came or went so far.
    """

    def __init__(
        self,
        config: Config,
        own: ExporterMetrics,
        notifier: Notifier,
        clocks: Clocks,
        find: Callable[[Config], Sequence[Source]] = lambda config: sources(config, RESERVED),
    ) -> None:
        """Put the parts together, without opening anything.

        Args:
            config: whose targets.
            own: counts polls and targets.
            notifier: gets their alerts.
            clocks: the time.
            find: gives the sources of a configuration.
        """
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
        self._told = (0, 0)
        self.changes = 0
        self._reconcile()

    def __iter__(self) -> Iterator[Watched]:
        """Those watched, in the order in which they were found."""
        return iter(list(self._watched.values()))

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def several(self) -> bool:
        """Whether there may be more targets than one, so that labels tell them apart."""
        return self._gate is not None

    def start(self) -> None:
        """Begin to look for targets, and to poll them."""
        self._running = True
        for watched in self:
            watched.start()
        self._follow()

    async def stop(self) -> None:
        """Stop to look for targets and to poll; what is known of them stays."""
        self._running = False
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), return_exceptions=True)
        self._following.clear()
        await asyncio.gather(*self._ending, *(watched.stop(gone=False) for watched in self))

    async def reload(self, config: Config, notifier: Notifier) -> None:
        """Go on with another configuration. What is not changed by it goes on as it was.

        Args:
            config: the new one.
            notifier: gets the alerts from now on.
        """
        found = self._merged(self._find(config), config)
        # A source that is new has no targets yet: to go on without them would end those that stay.
        await asyncio.gather(*(source.look() for source in found if source not in self._following))
        if not self._running:
            return
        before, again = self._config, notifier is not self._notifier
        self._config, self._notifier, self._sources = config, notifier, found
        kept = dict(self._watched) if _Settings.of(before) == _Settings.of(config) else {}
        if before.is_single != config.is_single or before.poll.concurrency != config.poll.concurrency:
            self._gate, again = (None if config.is_single else Gate(config.poll.concurrency)), True
        for key in self._watched.keys() - kept.keys():
            self._end(key)
        if again:
            for watched in self:
                watched.show(self._gate, notifier)
        self._reconcile()
        self._follow()

    def _merged(self, found: Sequence[Source], config: Config) -> Sequence[Source]:
        """The new sources, with the old ones in place of those that are the same."""
        before = self._config
        old = [*before.targets_dns, *before.targets_file_sd]
        new = [*config.targets_dns, *config.targets_file_sd]
        known = {id(one): source for one, source in zip(old, self._discovering(self._sources), strict=True)}
        merged = [source for source in found if source.every is None]
        for one, source in zip(new, self._discovering(found), strict=True):
            same = next((other for other in old if other == one and id(other) in known), None)
            merged.append(source if same is None else known.pop(id(same)))
        return merged

    @staticmethod
    def _discovering(found: Sequence[Source]) -> Sequence[Source]:
        return [source for source in found if source.every is not None]

    def _follow(self) -> None:
        """Look for changes in every source, and no longer in those that are not ours any more."""
        for source in self._following.keys() - set(self._sources):
            self._following.pop(source).cancel()
        for source in self._discovering(self._sources):
            if source not in self._following:
                self._following[source] = asyncio.create_task(self._look(source))

    async def _look(self, source: Source) -> None:
        while True:
            try:
                await source.look()
                self._reconcile()
            except Exception:  # a fault of ours must not end the looking
                log.exception("targets could not be looked for source=%s", source.name)
            await asyncio.sleep(source.every or 1.0)

    def _reconcile(self) -> None:
        """Watch what is wanted and nothing else."""
        wanted = self._wanted()
        for key, watched in list(self._watched.items()):
            if key not in wanted or wanted[key] != watched.target:
                self._end(key)
        for key, target in wanted.items():
            if key not in self._watched:
                self._begin(target)
        if self.several:
            series.expect(len(wanted))
            by_source = Counter(target.source for target in wanted.values())
            failures: Counter[str] = Counter()
            for source in self._sources:
                failures[source.name] += source.failures
                by_source[source.name] += 0
            del failures["static"]
            self._own.targets, self._own.discovery_failures = dict(sorted(by_source.items())), failures
        else:
            self._own.targets, self._own.discovery_failures = {}, {}

    def _wanted(self) -> dict[_Key, Target]:
        """All targets, each once; where they are too many those that are watched already go first."""
        wanted: dict[_Key, Target] = {}
        doubled = 0
        for source in self._sources:
            for target in source.targets:
                doubled += wanted.setdefault(target.key, target) != target
        most = self._config.poll.max_targets
        self._tell_left_out(max(0, len(wanted) - most), doubled)
        if len(wanted) > most:
            first = sorted(wanted.values(), key=lambda target: target.key not in self._watched)
            wanted = {target.key: target for target in first[:most]}
        return wanted

    def _tell_left_out(self, cut: int, doubled: int) -> None:
        self._own.left_out = cut + doubled
        if cut and not self._told[0]:
            most = self._config.poll.max_targets
            log.warning("too many targets, some are not watched left_out=%d poll.max_targets=%d", cut, most)
        if doubled and not self._told[1]:
            log.warning(
                "targets with the same address and labels, one of each is watched left_out=%d", doubled
            )
        self._told = (cut, doubled)

    def _begin(self, target: Target) -> None:
        watched = self._watched[target.key] = Watched(target, self._config, self._own, self._clocks)
        watched.show(self._gate, self._notifier)
        self.changes += 1
        if self._running:
            log.info("target found target=%s source=%s", target.name, target.source)
            watched.start()

    def _end(self, key: _Key) -> None:
        """Forget a target at once; its connections are closed by and by."""
        watched = self._watched.pop(key)
        self.changes += 1
        log.info("target gone target=%s source=%s", watched.target.name, watched.target.source)
        ending = asyncio.ensure_future(watched.stop(gone=True))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
