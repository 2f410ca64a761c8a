"""The loop that polls a target for its metrics and passes each reading on.

One task per target. Polls start on a schedule that does not drift, one request is in flight at a time,
and nothing that a server does ends the loop.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.runtime.pace import Pace, Place, phase
from exporter.vllm.answers import NO_ANSWERS
from exporter.vllm.client import Answer, MetricsClient
from exporter.vllm.prober import Prober

__all__ = ["PollOutcome", "Watcher"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PollOutcome:
    """One poll: its answer, its reading, the interval from now on and the starts that were skipped."""

    answer: Answer
    reading: TargetReading
    interval: float
    skipped: int


class Watcher:
    """Polls one target until it is cancelled."""

    def __init__(
        self,
        client: MetricsClient,
        pipeline: Pipeline,
        pace: Pace,
        on_outcome: Callable[[PollOutcome], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        prober: Prober | None = None,
    ) -> None:
        """Put the parts together; `on_outcome` gets every poll, and must not block."""
        self.place: Place | None = None  # its place among other targets; None if it is the only one
        self._client = client
        self._pipeline = pipeline
        self._pace = pace
        self._on_outcome = on_outcome
        self._clock = clock
        self._sleep = sleep
        self._prober = prober
        self._state: str | None = None
        self._faulty = False
        self._lines_rejected = False
        self._reading_seconds = 0.0

    async def run(self) -> None:
        """Poll until cancelled. Raises nothing but CancelledError."""
        start = self._clock()
        if self.place is not None:
            interval = self._pace.interval
            start += (phase(self.place.name, interval) - start) % interval
            await self._sleep(start - self._clock())
        while True:
            late = max(0.0, self._clock() - start)
            answer = await self._fetch()
            now = self._clock()
            interval = self._pace.interval
            # If this process begins late it also reads the answer late, which is not the server's fault.
            seconds = max(0.0, answer.seconds - late)
            # A reading's age limit depends on the pace, so the pace is set from the reading before this one.
            start = self._pace.next_start(
                start, now, seconds, self._reading_seconds, answered=answer.body is not None
            )
            self._note_pace(interval)
            self._take(now, answer)
            self._reading_seconds = self._clock() - now
            del answer  # perhaps megabytes, which must not stay in memory with the next one
            await self._sleep(max(0.0, start - self._clock()))

    async def _fetch(self) -> Answer:
        if self.place is None:
            return await self._client.fetch()
        async with self.place.gate.semaphore_for(up=self._state in (None, "up")):
            return await self._client.fetch()

    @property
    def _log_suffix(self) -> str:
        return f" target={self.place.name}" if self.place else ""

    def _take(self, now: float, answer: Answer) -> None:
        """Pass an answer on. A fault of ours in doing so costs this one poll, and is logged once."""
        try:
            answers = NO_ANSWERS if self._prober is None else self._prober.answers
            reading = self._pipeline.feed(now, answer.body, answer.error, answers)
            if reading.up and self._prober is not None:
                self._prober.note_good_poll(self._pipeline.restarts)
            self._note_state(reading, answer)
            self._note_rejected_lines(reading)
            skipped, self._pace.skipped = self._pace.skipped, 0
            self._on_outcome(PollOutcome(answer, reading, self._pace.interval, skipped))
        except Exception:
            if not self._faulty:
                log.exception("cannot use a poll%s", self._log_suffix)
            self._faulty = True
        else:
            self._faulty = False

    def _note_state(self, reading: TargetReading, answer: Answer) -> None:
        """Log each change between up and down, and each new error."""
        state = reading.error or "up"
        if state == self._state:
            return
        if reading.up:
            engines = len(reading.engines)
            log.info("target up engines=%d seconds=%.3f%s", engines, answer.seconds, self._log_suffix)
        else:
            log.warning("target down error=%s detail=%r%s", reading.error, answer.detail, self._log_suffix)
        self._state = state

    def _note_rejected_lines(self, reading: TargetReading) -> None:
        """Log once that lines are rejected, until a body has none of them again."""
        rejected = reading.unreadable > 0
        if rejected and not self._lines_rejected:
            log.warning("lines with known names rejected lines=%d%s", reading.unreadable, self._log_suffix)
        self._lines_rejected = rejected if reading.up else self._lines_rejected

    def _note_pace(self, before: float) -> None:
        """Log a change of the interval and its cause."""
        now, hard = self._pace.interval, self._pace.hard_to_read
        if now == before:
            return
        self._pipeline.set_interval(now)
        if now > before:
            cause = "answers take long to read" if hard else "server answers slowly"
            log.warning("%s, polling less often interval=%gs%s", cause, now, self._log_suffix)
        else:
            cause = "answers are read fast again" if hard else "server answers fast again"
            log.info("%s interval=%gs%s", cause, now, self._log_suffix)
