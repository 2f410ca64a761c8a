"""What is remembered of one engine: a ring of polls, counters that survive restarts, a coarse past.

Pure: time is a parameter, in seconds of any monotonic clock. A missing number is NaN in a column and
None in an answer; nothing that is unknown ever reads as zero.
"""

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from exporter.analysis.lengths import LengthWindow
from exporter.analysis.restarts import Restart, SourceWatch
from exporter.vllm.exposition import Snapshot
from exporter.vllm.names import COUNTERS

__all__ = ["KV_BOUNDS", "History", "Minute"]

GAUGES: Final = ("requests_running", "requests_waiting", "requests_deferred", "kv_usage")
# Upper bounds of the histogram of polled KV usage.
KV_BOUNDS: Final = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)
# Any of these moving is work being done; in a long prefill only the KV usage moves.
PROGRESS: Final = ("engine_steps", "prompt_tokens", "generation_tokens")

KEEP_SECONDS: Final = 660.0  # ten minutes for the longest window and for the page, and a margin
KEEP_POLLS: Final = 1400  # two polls a second; at shorter intervals the ring reaches back less far
MINUTE: Final = 60.0
KEEP_MINUTES: Final = 60
# Fall of running and rise of waiting count as preemption only after KV was this full this recently.
INFER_KV_FULL: Final = 0.9
INFER_KV_SECONDS: Final = 10.0
# Between polls further apart than this anything may have happened.
INFER_GAP_SECONDS: Final = 5.0
_NAN: Final = math.nan
_INFERRED: Final = "preemptions_inferred"


@dataclass(frozen=True, slots=True)
class Minute:
    """A minute of the engine's past, for baselines; NaN stands for unknown.

    Attributes:
        at: when it ended.
        generation_rate: tokens put out per second.
        inter_token_seconds: mean inter-token latency.
        running: mean number of running requests.
        preemptions: what the server counted.
    """

    at: float
    generation_rate: float
    inter_token_seconds: float
    running: float
    preemptions: float


class History:
    """The past of one engine.

    Attributes:
        own: counters since the exporter first saw the engine, restarts survived.
        snapshot: the last good one.
        restarts: how many new processes were seen.
        restart: the last of them.
        kv_polls: polls by KV usage, one more than `KV_BOUNDS`; with `kv_sum` the polled histogram.
        seen: readings that this process has shown.
        moved_at: when a sign of work last changed; `stepped_at`: when the step counter did.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self.columns = {name: array("d") for name in (*GAUGES, *COUNTERS, _INFERRED)}
        self.own: dict[str, float] = {}
        self.inferred = 0.0
        self.snapshot: Snapshot | None = None
        self.first_seen = _NAN
        self.restarts = 0
        self.restart: Restart | None = None
        self.kv_polls = [0] * (len(KV_BOUNDS) + 1)
        self.kv_sum = 0.0
        self.seen: set[str] = set()
        self.moved_at = _NAN
        self.stepped_at = _NAN
        self.minutes: deque[Minute] = deque(maxlen=KEEP_MINUTES)
        self.prompt_lengths = LengthWindow()
        self.output_lengths = LengthWindow()
        self.sources = SourceWatch()
        self._last: dict[str, float] = {}
        self._late: set[str] = set()
        self._whole_body_seen = False
        self._restart_index = 0
        self._minute_index = 0

    # Taking one more poll.

    def observe(self, t: float, snapshot: Snapshot, start_time: float | None, *, whole: bool = True) -> None:
        """Take one good poll.

        Args:
            t: when its answer was there.
            snapshot: what it said of this engine.
            start_time: when the server process began, where the body tells.
            whole: whether the body was read to its end; a counter first missed in a body that was cut
                off is not one that appears later.
        """
        origin = start_time if start_time is not None else snapshot.values.get("created")
        known = self.snapshot is not None
        if not known:
            self.first_seen = self.moved_at = self.stepped_at = t
        step = self.sources.step(t, origin, self._last, snapshot.values)
        if step == "returned":
            self._last.update(self.sources.before_fall)
            self.sources.before_fall = {}
        fresh = known and step == "new"
        if fresh and not self.sources.by_turns(t):
            self._note_restart(t)
        self._count(t, snapshot.values, fresh=fresh, known=known and self._whole_body_seen)
        self._whole_body_seen = self._whole_body_seen or whole
        self._append(t, snapshot, fresh=fresh)
        self.snapshot = snapshot
        self.seen.update(snapshot.values, snapshot.untrusted)
        for reading, window in (
            ("prompt_length", self.prompt_lengths),
            ("output_length", self.output_lengths),
        ):
            buckets = snapshot.buckets.get(reading)
            if buckets:
                window.observe(t, buckets, snapshot.values.get(f"{reading}_sum"))
        self._trim(t)

    def _note_restart(self, t: float) -> None:
        last_seen = self.times[-1]
        recent = self.start_of(last_seen - MINUTE)
        self.restarts += 1
        self.restart = Restart(
            at=t,
            last_seen=last_seen,
            kv_usage=self.latest("kv_usage"),
            kv_usage_max=self.highest("kv_usage", recent),
            preemptions=self.increase("preemptions", self.start_of(last_seen - 5 * MINUTE)),
            running=self.latest("requests_running"),
        )
        self.seen = set()
        self._restart_index = len(self.times)
        self.moved_at = self.stepped_at = t

    def _count(self, t: float, values: Mapping[str, float], *, fresh: bool, known: bool) -> None:
        """Add what the counters moved by; a reset adds the new value, first sight of an engine nothing."""
        mixed = self.sources.by_turns(t)
        last, own = self._last, self.own
        if fresh and not mixed:
            last.clear()  # whatever the new process shows, it has counted itself
        for reading in COUNTERS:
            value = values.get(reading)
            if value is None:
                continue
            before = last.get(reading)
            last[reading] = value
            if before is None:
                own[reading] = own.get(reading, 0.0) + (value if known else 0.0)
                if known:
                    self._late.add(reading)
            elif mixed:
                continue
            elif value < before:
                own[reading] += value
            elif value > before:
                own[reading] += value - before

    def _append(self, t: float, snapshot: Snapshot, *, fresh: bool) -> None:
        values = snapshot.values
        previous = self.snapshot
        if previous is not None and not fresh:
            self.inferred += self._inferred(t, values)
            self._note_progress(t, values, previous.values)
        self.times.append(t)
        columns, own = self.columns, self.own
        for name in GAUGES:
            columns[name].append(values.get(name, _NAN))
        for name in COUNTERS:
            columns[name].append(own.get(name, _NAN))
        columns[_INFERRED].append(self.inferred)
        usage = values.get("kv_usage")
        if usage is not None:
            self.kv_polls[_bucket(usage)] += 1
            self.kv_sum += usage

    def _note_progress(self, t: float, values: Mapping[str, float], before: Mapping[str, float]) -> None:
        for name in PROGRESS:
            if values.get(name) != before.get(name):
                self.moved_at = t
        if values.get("kv_usage") != before.get("kv_usage"):
            self.moved_at = t
        if values.get("engine_steps") != before.get("engine_steps"):
            self.stepped_at = t

    def _inferred(self, t: float, values: Mapping[str, float]) -> float:
        """Preemptions between the last poll and this one that the gauges betray: an estimate.

        The fall of running that no finished request explains, at most the rise of waiting, and only
        when KV was full a moment ago: clients that give up and try again look the same otherwise.
        """
        running, waiting = self.latest("requests_running"), self.latest("requests_waiting")
        now_running, now_waiting = values.get("requests_running"), values.get("requests_waiting")
        if running is None or waiting is None or now_running is None or now_waiting is None:
            return 0.0
        if now_running >= running or now_waiting <= waiting or t - self.times[-1] > INFER_GAP_SECONDS:
            return 0.0
        usage = self.highest("kv_usage", self.start_of(t - INFER_KV_SECONDS))
        if usage is None or usage < INFER_KV_FULL:
            return 0.0
        finished = self.own.get("requests_finished", _NAN) - self.columns["requests_finished"][-1]
        fallen = running - now_running - (0.0 if math.isnan(finished) else finished)
        return max(0.0, min(fallen, now_waiting - waiting))

    def _trim(self, t: float) -> None:
        if t - self._minute_start() >= MINUTE:
            self._close_minute(t)
        spare = len(self.times) - KEEP_POLLS
        old = bisect_right(self.times, t - KEEP_SECONDS) - 1
        cut = max(spare, old)
        if cut < 64:  # noqa: PLR2004 (moving the ring costs; not at every poll)
            return
        del self.times[:cut]
        for column in self.columns.values():
            del column[:cut]
        self._restart_index = max(0, self._restart_index - cut)
        self._minute_index = max(0, self._minute_index - cut)

    def _minute_start(self) -> float:
        return self.times[self._minute_index]

    def _close_minute(self, t: float) -> None:
        start = max(self._minute_index, self._restart_index)
        seconds = t - self.times[start]
        if seconds > 0:
            self.minutes.append(
                Minute(
                    at=t,
                    generation_rate=_or_nan(self.increase("generation_tokens", start), seconds),
                    inter_token_seconds=_or_nan(
                        self.ratio("inter_token_seconds", "inter_token_count", start)
                    ),
                    running=_or_nan(self.mean("requests_running", start)),
                    preemptions=_or_nan(self.increase("preemptions", start)),
                )
            )
        self._minute_index = len(self.times) - 1

    # Asking about the past. An index says where a window begins.

    def start_of(self, at: float) -> int:
        """Index of the last poll at or before `at`, of the first poll of this process where there is none."""
        return max(0, self._restart_index, bisect_right(self.times, at) - 1)

    def latest(self, name: str) -> float | None:
        """The last value of a column, None where the last body did not have it."""
        value = self.columns[name][-1]
        return None if math.isnan(value) else value

    def highest(self, name: str, start: int) -> float | None:
        """The maximum since a window's start, None where nothing is known."""
        known = [value for value in self.columns[name][start:] if value == value]  # noqa: PLR0124 (not NaN)
        return max(known) if known else None

    def mean(self, name: str, start: int) -> float | None:
        """The mean over the polls since a window's start, None where nothing is known."""
        known = [value for value in self.columns[name][start:] if value == value]  # noqa: PLR0124 (not NaN)
        return sum(known) / len(known) if known else None

    def share(self, name: str, start: int, least: float) -> float | None:
        """Share of the polls since a window's start in which a gauge was at least `least`."""
        known = [value for value in self.columns[name][start:] if value == value]  # noqa: PLR0124 (not NaN)
        return sum(1 for value in known if value >= least) / len(known) if known else None

    def increase(self, name: str, start: int) -> float | None:
        """What a counter moved by since a window's start; None where it is unknown.

        A counter that appeared after the engine was known began at zero.
        """
        column = self.columns[name]
        now, then = column[-1], column[start]
        if math.isnan(now):
            return None
        if math.isnan(then):
            return now if name in self._late else None
        return now - then

    def span(self, start: int) -> float:
        """Seconds from a window's start to the last poll."""
        return self.times[-1] - self.times[start]

    def rate(self, name: str, start: int) -> float | None:
        """A counter's increase per second of real time; None for a window of one poll."""
        seconds = self.span(start)
        increase = self.increase(name, start)
        return increase / seconds if increase is not None and seconds > 0 else None

    def ratio(self, name: str, of: str, start: int) -> float | None:
        """Increase of one counter by that of another; None where the latter did not move."""
        over, under = self.increase(name, start), self.increase(of, start)
        return over / under if over is not None and under else None


def _bucket(usage: float) -> int:
    """Index of the histogram's bucket: the first bound that is not below the usage."""
    for index, bound in enumerate(KV_BOUNDS):
        if usage <= bound:
            return index
    return len(KV_BOUNDS)


def _or_nan(value: float | None, seconds: float = 1.0) -> float:
    return _NAN if value is None else value / seconds
