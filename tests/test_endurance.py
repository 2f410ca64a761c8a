"""Accelerated hours: the real loop with a clock and a server of the test's own, with restarts and errors."""

import asyncio
import gc
import logging
import os
import statistics
from pathlib import Path

import pytest
from support import bodies
from support.metrics_text import text_of

from exporter.analysis.history import KEEP_POLLS
from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import ReadingCollector
from exporter.publish.page.timeline import POINTS, Timeline
from exporter.runtime.pace import Pace
from exporter.runtime.poller import Watcher
from exporter.vllm.client import Answer

POLLS = 28_800
WARM = 4_000  # polls after which every ring and cache is full: an hour of minutes
ERRORS = ("connection_refused", "timeout", "http_503", "bad_encoding")


class Server:
    """A server over hours: load that rises and falls, storms, restarts, errors of all kinds."""

    def __init__(self, polls: int, every: int) -> None:
        self.polls = polls
        self.now = 0.0
        self.asked = 0
        self.preempted = 0
        self.failed = 0
        self._every = every  # polls between two faults
        self._start = 1000.0
        self._count = 0
        self._tokens = 0
        self.measured: list[tuple[float, float]] = []
        self.scrape = lambda: None

    def clock(self) -> float:
        """The time."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    async def fetch(self) -> Answer:
        """The next answer."""
        if self.asked >= self.polls:
            raise asyncio.CancelledError
        self.asked += 1
        if self.asked % 60 == 0:
            self.scrape()
        if self.asked % (self.polls // 48) == 0:
            gc.collect()
            self.measured.append((self.asked, resident()))
        self.now += 0.01
        within = self.asked % self._every
        if within < 8 and self.asked > self._every:
            if within == 7:
                self._start, self._count, self._tokens = self.now, 0, 0
            self.failed += 1
            return Answer(None, ERRORS[(self.asked // self._every) % len(ERRORS)], "", 0.01)
        return Answer(self._body(within), None, "", 0.01)

    def _body(self, within: int) -> bytes:
        storm = within > self._every // 2 and self.asked % 3 == 0
        self._count += storm
        self.preempted += storm
        self._tokens += 200 + within % 50
        engine = bodies.engine(
            running=5 + within % 20,
            waiting=within % 7,
            kv=0.4 + (within % 60) / 100,
            preemptions=self._count,
            finished=self._tokens // 100,
            generation_tokens=self._tokens,
            prompt_tokens=self._tokens,
            steps=self._tokens,
            prompt_lengths=({10.0: self._tokens // 200, 100.0: self._tokens // 100}, self._tokens),
        )
        return bodies.body(engine, start_time=self._start)


def resident() -> float:
    """Resident memory in KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def lived(polls: int, every: int):
    """So many polls; the server, the pipeline and the last reading."""
    server = Server(polls, every)
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
    counts, timeline = PollCounts(), Timeline()
    last = []

    def note(outcome):
        last[:] = [outcome.reading]
        answer, reading = outcome.answer, outcome.reading
        size = None if answer.body is None else len(answer.body)
        counts.poll(answer.seconds, size, reading.error, interval=outcome.interval, skipped=outcome.skipped)
        timeline.add(outcome.reading)

    shown = ReadingCollector(lambda: last[0] if last else None, server.clock, lambda: 1.7e9)
    server.scrape = lambda: text_of(shown, ExporterMetrics(), counts).encode()
    watcher = Watcher(server, pipeline, Pace(1.0, lambda: 0.0), note, server.clock, server.sleep)

    async def scenario():
        with pytest.raises(asyncio.CancelledError):
            await watcher.run()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(scenario())
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    return server, pipeline, last[0], counts, timeline


def slope(measured) -> float:
    """KiB per 10,000 polls after the warm-up: the median of all slopes between two measurements."""
    late = [(at, value) for at, value in measured if at >= WARM]
    slopes = [(two[1] - one[1]) / (two[0] - one[0]) for n, one in enumerate(late) for two in late[n + 1 :]]
    return 10_000 * statistics.median(slopes)


@pytest.fixture(autouse=True)
def _silent():
    """Log lines that pytest keeps are memory too."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(polls: int, every: int) -> None:
    """Live so long, and look at what is left."""
    server, pipeline, reading, own, timeline = lived(polls, every)
    (engine,) = pipeline._engines.values()
    (shown,) = reading.engines.values()
    # Everything that was counted, and nothing twice.
    assert shown.signals.preemptions_total == server.preempted
    assert own.polls == polls
    assert reading.restarts == polls // every - 1
    assert sum(own.errors.values()) == server.failed
    # Rings and caches are bounded.
    history = engine.history
    assert len(history.times) <= KEEP_POLLS + 64
    assert all(len(column) == len(history.times) for column in history.columns.values())
    assert (+own.errors).keys() == {*ERRORS}
    assert len(own.durations) == 11
    assert sum(len(track.times) for track in timeline.tracks.values()) <= POINTS
    # Twenty bytes kept of each poll would be three times as much.
    assert slope(server.measured) < 64, f"KiB per 10,000 polls of {server.measured}"


@pytest.mark.long
def test_hours_leave_nothing_behind():
    """Eight hours with the faults of a day: memory is flat, nothing is open, all was counted once."""
    check(POLLS, 600)
