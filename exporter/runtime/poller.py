"""The loop that asks a target for its metrics and passes what comes back on; the only one with a clock.

One task per target. Polls start on a schedule that does not drift, one request is in flight at a time,
and nothing that a server does ends the loop.
"""

import asyncio
import logging
import random
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from exporter.analysis.median import median
from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.net.backoff import backoff
from exporter.vllm.answers import NO_ANSWERS
from exporter.vllm.client import Answer
from exporter.vllm.prober import Prober

__all__ = ["Among", "Gate", "Pace", "PollOutcome", "Watcher", "phase"]

log = logging.getLogger(__name__)

# A server that is down is asked at its usual pace this often, then ever more slowly: a blink is seen
# at once, and a model that loads for ten minutes is left alone.
PATIENT_FAILURES: Final = 5
SLOWEST_SECONDS: Final = 5.0
# Polling is to take no more than this share of a server's time, nor reading its answers of ours, which is all
# other targets' too. Judged by the median: real servers took 15 ms, but over 100 ms in 6 % of the polls of a
# storm, and one slow poll means nothing. To read the answer of one engine takes a third of a millisecond.
DEAREST_SHARE: Final = 0.1
JUDGED_POLLS: Final = 10


@dataclass(frozen=True, slots=True)
class PollOutcome:
    """One poll as the loop saw it: the answer, what was made of it, the pace from now on."""

    answer: Answer
    reading: TargetReading
    interval: float
    skipped: int


class Fetcher(Protocol):
    """Who fetches: `exporter.vllm.client.MetricsClient`, or a test's stand-in."""

    async def fetch(self) -> Answer:
        """One GET; raises nothing."""
        ...


class Gate:
    """Lets so many polls be under way at once, of all targets.

    A server that did not answer last time waits at a gate of its own: where many are gone, and each poll of
    them takes its whole time-out, the others are asked as ever.
    """

    def __init__(self, most: int) -> None:
        """Prepare.

        Args:
            most: polls under way at once; of servers that did not answer last time a quarter as many.
        """
        self._good = asyncio.Semaphore(most)
        self._doubtful = asyncio.Semaphore(max(1, most // 4))

    def of(self, *, good: bool) -> asyncio.Semaphore:
        """The gate at which to wait."""
        return self._good if good else self._doubtful


@dataclass(frozen=True, slots=True)
class Among:
    """A target's place among others: its name, for the log and its time in the interval, and their gate."""

    name: str
    gate: Gate


def phase(name: str, interval: float) -> float:
    """When in each interval a target is asked: by its name, so that polls of many are spread evenly."""
    return zlib.crc32(name.encode()) / 2.0**32 * interval


class Pace:
    """When the next poll starts. Pure: times are parameters.

    Attributes:
        interval: seconds between polls at the moment, back-off apart.
        skipped: starts of the schedule that passed while a poll was still under way.
        hard_to_read: whether the pace was last judged by our own time rather than by the server's.
    """

    def __init__(self, interval: float, jitter: Callable[[], float] = random.random) -> None:
        """Begin at the intended pace.

        Args:
            interval: seconds between polls, as intended.
            jitter: a random number from 0 to 1; many exporters must not ask one server in step.
        """
        self.interval = interval
        self.skipped = 0
        self.hard_to_read = False
        self._intended = interval
        self._jitter = jitter
        self._seconds: deque[float] = deque(maxlen=JUDGED_POLLS)
        self._reading: deque[float] = deque(maxlen=JUDGED_POLLS)
        self._failures = 0

    def after(self, start: float, now: float, seconds: float, reading: float = 0.0, *, good: bool) -> float:
        """When to start the next poll.

        Args:
            start: when the last poll was due.
            now: the time.
            seconds: how long the server took.
            reading: how long it took to read the answer before this one, during which nothing else is done.
            good: whether the server answered.
        """
        if not good:
            self._failures += 1
            return now + self._back_off() if self._failures > PATIENT_FAILURES else self._slot(start, now)
        self._failures = 0
        self._seconds.append(seconds)
        self._reading.append(reading)
        self._judge()
        return self._slot(start, now)

    def _judge(self) -> None:
        if len(self._seconds) < JUDGED_POLLS:
            return
        most = DEAREST_SHARE * self._intended
        slow, hard = median(self._seconds) > most, median(self._reading) > most
        interval = max(SLOWEST_SECONDS, self._intended) if slow or hard else self._intended
        if interval != self.interval:
            # The new pace is judged by its own polls: a median on the border must not flap at every poll.
            self._seconds.clear()
            self._reading.clear()
            self.interval = interval
            if slow or hard:
                self.hard_to_read = hard

    def _slot(self, start: float, now: float) -> float:
        """The next start on the schedule; those that have passed are left out, not caught up with."""
        missed = max(0, int((now - start) / self.interval))
        self.skipped += missed
        return start + (missed + 1) * self.interval

    def _back_off(self) -> float:
        longest = max(SLOWEST_SECONDS, self._intended)
        wait = backoff(self.interval, longest, self._failures - PATIENT_FAILURES, self._jitter())
        return max(self.interval, wait)  # backing off never means to ask more often


class Watcher:
    """Watches one target until it is cancelled.

    Attributes:
        among: its place among other targets; None where it is the only one.
    """

    def __init__(
        self,
        client: Fetcher,
        pipeline: Pipeline,
        pace: Pace,
        on_outcome: Callable[[PollOutcome], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        prober: Prober | None = None,
    ) -> None:
        """Take everything that touches the world as a parameter.

        Args:
            client: fetches bodies.
            pipeline: turns them into readings.
            pace: decides when to ask.
            on_outcome: gets every poll; must not block.
            clock: monotonic seconds.
            sleep: waits for some seconds.
            prober: asks for the server's configuration; runs in a task of its own.
        """
        self._client = client
        self._pipeline = pipeline
        self._pace = pace
        self._on_outcome = on_outcome
        self._clock = clock
        self._sleep = sleep
        self._prober = prober
        self.among: Among | None = None
        self._state: str | None = None
        self._faulty = False
        self._left_out = False
        self._reading_seconds = 0.0

    async def run(self) -> None:
        """Poll for ever. Raises nothing but CancelledError."""
        start = self._clock()
        if self.among is not None:
            interval = self._pace.interval
            start += (phase(self.among.name, interval) - start) % interval
            await self._sleep(start - self._clock())
        while True:
            late = max(0.0, self._clock() - start)
            answer = await self._fetch()
            now = self._clock()
            interval = self._pace.interval
            # Where this process is late to begin it is late to read the answer too: not the server's doing.
            seconds = max(0.0, answer.seconds - late)
            # How long a reading holds depends on the pace, so the pace goes by the reading before this one.
            start = self._pace.after(start, now, seconds, self._reading_seconds, good=answer.body is not None)
            self._note_pace(interval)
            self._take(now, answer)
            self._reading_seconds = self._clock() - now
            del answer  # megabytes, perhaps, that the next one need not lie beside
            await self._sleep(max(0.0, start - self._clock()))

    async def _fetch(self) -> Answer:
        if self.among is None:
            return await self._client.fetch()
        async with self.among.gate.of(good=self._state in (None, "up")):
            return await self._client.fetch()

    @property
    def _whose(self) -> str:
        return f" target={self.among.name}" if self.among else ""

    def _take(self, now: float, answer: Answer) -> None:
        """Pass an answer on. A fault of ours in doing so costs this one poll, and is logged once."""
        try:
            answers = NO_ANSWERS if self._prober is None else self._prober.answers
            reading = self._pipeline.feed(now, answer.body, answer.error, answers)
            if reading.up and self._prober is not None:
                self._prober.note_good_poll(self._pipeline.restarts)
            self._note_state(reading, answer)
            self._note_left_out(reading)
            skipped, self._pace.skipped = self._pace.skipped, 0
            self._on_outcome(PollOutcome(answer, reading, self._pace.interval, skipped))
        except Exception:
            if not self._faulty:
                log.exception("poll could not be used%s", self._whose)
            self._faulty = True
        else:
            self._faulty = False

    def _note_state(self, reading: TargetReading, answer: Answer) -> None:
        state = reading.error or "up"
        if state == self._state:
            return
        if reading.up:
            engines = len(reading.engines)
            log.info("target up engines=%d seconds=%.3f%s", engines, answer.seconds, self._whose)
        else:
            log.warning("target down error=%s detail=%r%s", reading.error, answer.detail, self._whose)
        self._state = state

    def _note_left_out(self, reading: TargetReading) -> None:
        """Say once that lines are left out, until a body has none of them again."""
        left_out = reading.unreadable > 0
        if left_out and not self._left_out:
            log.warning("lines of known names left out lines=%d%s", reading.unreadable, self._whose)
        self._left_out = left_out if reading.up else self._left_out

    def _note_pace(self, before: float) -> None:
        now, hard = self._pace.interval, self._pace.hard_to_read
        if now == before:
            return
        self._pipeline.set_interval(now)
        if now > before:
            what = "answers take long to read" if hard else "server answers slowly"
            log.warning("%s, polling less often interval=%gs%s", what, now, self._whose)
        else:
            what = "answers are read fast again" if hard else "server answers fast again"
            log.info("%s interval=%gs%s", what, now, self._whose)
