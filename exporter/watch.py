"""The loop that asks a target for its metrics and passes what comes back on; the only one with a clock.

One task per target. Polls start on a schedule that does not drift, one request is in flight at a time,
and nothing that a server does ends the loop.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol

from exporter.pipeline import Pipeline, TargetReading
from exporter.vllm.client import Answer

__all__ = ["Pace", "PollOutcome", "Watcher"]

log = logging.getLogger(__name__)

# A server that is down is asked at its usual pace this often, then ever more slowly: a blink is seen
# at once, and a model that loads for ten minutes is left alone.
PATIENT_FAILURES: Final = 5
SLOWEST_SECONDS: Final = 5.0
# Polling is to take no more than this share of a server's time. Judged by the median: real servers took
# 15 ms, but over 100 ms in 6 % of the polls of a storm, and one slow poll means nothing.
DEAREST_SHARE: Final = 0.1
JUDGED_POLLS: Final = 10
_JITTER: Final = 0.2


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


class Pace:
    """When the next poll starts. Pure: times are parameters.

    Attributes:
        interval: seconds between polls at the moment, back-off apart.
        skipped: starts of the schedule that passed while a poll was still under way.
    """

    def __init__(self, interval: float, jitter: Callable[[], float] = random.random) -> None:
        """Begin at the intended pace.

        Args:
            interval: seconds between polls, as intended.
            jitter: a random number from 0 to 1; many exporters must not ask one server in step.
        """
        self.interval = interval
        self.skipped = 0
        self._intended = interval
        self._jitter = jitter
        self._seconds: deque[float] = deque(maxlen=JUDGED_POLLS)
        self._failures = 0

    def after(self, start: float, now: float, seconds: float, *, good: bool) -> float:
        """When to start the next poll.

        Args:
            start: when the last poll was due.
            now: the time.
            seconds: how long it took.
            good: whether the server answered.
        """
        if not good:
            self._failures += 1
            return now + self._back_off() if self._failures > PATIENT_FAILURES else self._slot(start, now)
        self._failures = 0
        self._seconds.append(seconds)
        self._judge()
        return self._slot(start, now)

    def _judge(self) -> None:
        if len(self._seconds) < JUDGED_POLLS:
            return
        dear = median(self._seconds) > DEAREST_SHARE * self._intended
        interval = max(SLOWEST_SECONDS, self._intended) if dear else self._intended
        if interval != self.interval:
            # The new pace is judged by its own polls: a median on the border must not flap at every poll.
            self._seconds.clear()
            self.interval = interval

    def _slot(self, start: float, now: float) -> float:
        """The next start on the schedule; those that have passed are left out, not caught up with."""
        missed = max(0, int((now - start) / self.interval))
        self.skipped += missed
        return start + (missed + 1) * self.interval

    def _back_off(self) -> float:
        doubled = self.interval * 2.0 ** min(self._failures - PATIENT_FAILURES, 10)
        wait = min(max(SLOWEST_SECONDS, self._intended), doubled) * (1 - _JITTER * self._jitter())
        return max(self.interval, wait)  # backing off never means to ask more often


class Watcher:
    """Watches one target until it is cancelled."""

    def __init__(
        self,
        client: Fetcher,
        pipeline: Pipeline,
        pace: Pace,
        on_outcome: Callable[[PollOutcome], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Take everything that touches the world as a parameter.

        Args:
            client: fetches bodies.
            pipeline: turns them into readings.
            pace: decides when to ask.
            on_outcome: gets every poll; must not block.
            clock: monotonic seconds.
            sleep: waits for some seconds.
        """
        self._client = client
        self._pipeline = pipeline
        self._pace = pace
        self._on_outcome = on_outcome
        self._clock = clock
        self._sleep = sleep
        self._state: str | None = None
        self._faulty = False

    async def run(self) -> None:
        """Poll for ever. Raises nothing but CancelledError."""
        start = self._clock()
        while True:
            answer = await self._client.fetch()
            now = self._clock()
            interval = self._pace.interval
            next_start = self._pace.after(start, now, answer.seconds, good=answer.body is not None)
            self._note_pace(interval)
            self._take(now, answer)
            start = next_start
            await self._sleep(max(0.0, start - self._clock()))

    def _take(self, now: float, answer: Answer) -> None:
        """Pass an answer on. A fault of ours in doing so costs this one poll, and is logged once."""
        try:
            reading = self._pipeline.feed(now, answer.body, answer.error)
            self._note_state(reading, answer)
            skipped, self._pace.skipped = self._pace.skipped, 0
            self._on_outcome(PollOutcome(answer, reading, self._pace.interval, skipped))
        except Exception:
            if not self._faulty:
                log.exception("poll could not be used")
            self._faulty = True
        else:
            self._faulty = False

    def _note_state(self, reading: TargetReading, answer: Answer) -> None:
        state = reading.error or "up"
        if state == self._state:
            return
        if reading.up:
            log.info("target up engines=%d seconds=%.3f", len(reading.engines), answer.seconds)
        else:
            log.warning("target down error=%s detail=%r", reading.error, answer.detail)
        self._state = state

    def _note_pace(self, before: float) -> None:
        now = self._pace.interval
        if now == before:
            return
        self._pipeline.paced(now)
        if now > before:
            log.warning("server answers slowly, polling less often interval=%gs", now)
        else:
            log.info("server answers fast again interval=%gs", now)
