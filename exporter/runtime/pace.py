"""When to poll: the schedule, the back-off and the limit of simultaneous polls. Times are parameters."""

import asyncio
import random
import zlib
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from exporter.analysis.median import median
from exporter.net.backoff import backoff

__all__ = ["Gate", "Pace", "Place", "phase"]

# A server that is down is polled at its usual pace this often, then ever more slowly: a short outage is seen
# at once, and a model that loads for ten minutes is left alone.
PATIENT_FAILURES: Final = 5
SLOWEST_SECONDS: Final = 5.0
# Polling may take no more than this share of a server's time, nor reading its answers of ours, which all
# targets share. Judged by the median: real servers took 15 ms, but over 100 ms in 6 % of the polls of a
# storm, and one slow poll means nothing. Reading the answer of one engine takes a third of a millisecond.
MOST_SHARE: Final = 0.1
JUDGED_POLLS: Final = 10


class Gate:
    """Limits how many polls are under way at once, over all targets.

    A server that did not answer last time waits at a gate of its own: if many servers are down, and each poll
    of them takes its whole time-out, the others are polled as usual. It lets a quarter as many through.
    """

    def __init__(self, most: int) -> None:
        self._up = asyncio.Semaphore(most)
        self._down = asyncio.Semaphore(max(1, most // 4))

    def semaphore_for(self, *, up: bool) -> asyncio.Semaphore:
        """The semaphore of servers that answered last time, or of those that did not."""
        return self._up if up else self._down


class Place(NamedTuple):
    """A target's place among others: its name, for the log and its time in the interval, and their gate."""

    name: str
    gate: Gate


def phase(name: str, interval: float) -> float:
    """Seconds into each interval at which a target is polled: by its name, to spread polls evenly."""
    return zlib.crc32(name.encode()) / 2.0**32 * interval


class Pace:
    """Computes when the next poll starts."""

    def __init__(self, interval: float, jitter: Callable[[], float] = random.random) -> None:
        """Begin at the intended pace; `jitter` returns a random number from 0 to 1."""
        self.interval = interval  # seconds between polls now, back-off aside
        self.skipped = 0  # starts of the schedule that passed while a poll was still under way
        self.hard_to_read = False  # whether our own reading time, not the server's, set the present interval
        self._intended = interval
        self._longest = max(SLOWEST_SECONDS, interval)
        self._jitter = jitter
        self._seconds: deque[float] = deque(maxlen=JUDGED_POLLS)
        self._reading: deque[float] = deque(maxlen=JUDGED_POLLS)
        self._failures = 0

    def next_start(
        self, start: float, now: float, seconds: float, reading: float = 0.0, *, answered: bool
    ) -> float:
        """Return when to start the next poll.

        Args:
            start: when the last poll was due.
            now: the time.
            seconds: how long the server took.
            reading: how long reading the previous answer took, during which nothing else is done.
            answered: whether the server answered.
        """
        if not answered:
            self._failures += 1
            doublings = self._failures - PATIENT_FAILURES
            if doublings <= 0:
                return self._slot(start, now)
            wait = backoff(self.interval, self._longest, doublings, self._jitter())
            return now + max(self.interval, wait)  # backing off never means polling more often
        self._failures = 0
        self._seconds.append(seconds)
        self._reading.append(reading)
        self._judge()
        return self._slot(start, now)

    def _judge(self) -> None:
        """Slow down for a server, or an answer, that takes too long; return to the intended pace after it."""
        if len(self._seconds) < JUDGED_POLLS:
            return
        most = MOST_SHARE * self._intended
        slow, hard = median(self._seconds) > most, median(self._reading) > most
        interval = self._longest if slow or hard else self._intended
        if interval != self.interval:
            # The new pace is judged by its own polls: a median on the border must not flap at every poll.
            self._seconds.clear()
            self._reading.clear()
            self.interval = interval
            if slow or hard:
                self.hard_to_read = hard

    def _slot(self, start: float, now: float) -> float:
        """The next start on the schedule; starts that have passed are skipped."""
        missed = max(0, int((now - start) / self.interval))
        self.skipped += missed
        return start + (missed + 1) * self.interval
