"""Keeps the past of one engine: a ring of polls, and counters that survive restarts.

Pure: time is a parameter, in seconds of any monotonic clock. A missing number is NaN in a column and
None in a result; an unknown value never reads as zero.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from exporter.analysis.lengths import LengthWindow
from exporter.analysis.restarts import Restart, SourceWatch, Step
from exporter.vllm.exposition import Snapshot

__all__ = ["KV_BOUNDS", "History"]

NUMBERS: Final = ("requests_running", "requests_waiting", "requests_deferred")
GAUGES: Final = (*NUMBERS, "kv_usage")
# The counters whose past matters; of others the last value is in the snapshot.
# fmt: off
COUNTERS: Final = (
    "preemptions", "requests_finished", "prompt_tokens", "prompt_tokens_computed", "generation_tokens",
    "engine_steps", "step_tokens", "queue_seconds", "queue_count", "inter_token_seconds", "inter_token_count",
    "prefill_seconds", "prefill_count", "first_token_seconds", "first_token_count",
    "prefix_queries", "prefix_hits",
)
# fmt: on
REFUSED: Final = {
    "refused_by_requests": "--max-num-queued-reqs",
    "refused_by_tokens": "--max-num-queued-tokens",
}
"""Counters that only newer servers have, with the limit that each is of: without them they cost nothing."""
# Upper bounds of the histogram of polled KV usage.
KV_BOUNDS: Final = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)
# A change of any of these is a sign of work. (In a long prefill only the KV usage changes.)
PROGRESS: Final = ("engine_steps", "prompt_tokens", "generation_tokens")

KEEP_SECONDS: Final = 660.0  # ten minutes for the longest window and for the page, with a margin
KEEP_POLLS: Final = 1400  # two polls a second; at shorter intervals the ring covers less time
MINUTE: Final = 60.0
# A fall of running with a rise of waiting counts as preemption only if KV was this full this recently.
INFER_KV_FULL: Final = 0.9
INFER_KV_SECONDS: Final = 2.0
# Between polls further apart than this nothing is inferred.
INFER_GAP_SECONDS: Final = 5.0
# A mass preemption sends back at least this many, and this share, of the running requests at once.
MASS_LEAST: Final = 4.0
MASS_SHARE: Final = 0.5
KEEP_FALLS: Final = 64
# No real engine counts this far; sums of a hostile server's values must stay finite.
MOST_COUNTED: Final = 1e18
# Sums of whole numbers below this have no rounding errors.
_EXACT: Final = 2.0**53
_NAN: Final = math.nan
_INFERRED: Final = "preemptions_inferred"
_RETURNED: Final = "requests_returned"


class Fall(NamedTuple):
    """Most of the running requests went back to waiting between two polls: preempted, or sent again."""

    at: float  # time of the poll that showed it
    requests: float  # their number
    inferred: float  # the number that counts as preempted because the cache was full
    counted: float  # the own counter of preemptions before it; NaN where the server does not count them
    whole: bool  # whether no request was left running


class History:
    """The past of one engine."""

    def __init__(self) -> None:
        self.times = array("d")
        self.columns = {name: array("d") for name in (*GAUGES, *COUNTERS, _INFERRED, _RETURNED)}
        self._gauges = [(name, self.columns[name].append) for name in GAUGES]
        self._counters = [(name, self.columns[name].append) for name in COUNTERS]
        self.refused: tuple[str, ...] = ()  # those of `REFUSED` that were seen
        # Counters since the exporter first saw the engine; they survive restarts.
        self.own: dict[str, float] = {}
        self.inferred = 0.0
        self.returned = 0.0
        self.snapshot: Snapshot | None = None  # the last good one
        self.restarts = 0  # number of new processes seen
        self.restart: Restart | None = None  # the last of them
        # Polls per bucket of KV usage, one more than `KV_BOUNDS`; with `kv_sum` the histogram.
        self.kv_polls = [0] * (len(KV_BOUNDS) + 1)
        self.kv_sum = 0.0
        self.seen: set[str] = set()  # readings that this process has had
        self.moved_at = _NAN  # time of the last sign of work; time asleep does not count as a standstill
        self.worked_at = _NAN  # time when a request was last seen, or could have been, running or waiting
        self.finished_at = _NAN  # time when a request last finished, else of the first poll
        self.preempted_at = -math.inf  # time when the counter of preemptions last moved
        # The last times when most of the running requests went back to waiting at once.
        self.falls: deque[Fall] = deque(maxlen=KEEP_FALLS)
        self.prompt_lengths = LengthWindow()
        self.output_lengths = LengthWindow()
        self.request_seconds = LengthWindow()
        self.sources = SourceWatch()
        self._last: dict[str, float] = {}
        self._usage: float | None = None
        self._late: set[str] = set()
        self._whole_body_seen = False
        self._mixed = False
        self._begin_index = 0
        self._recent: dict[float, int] = {}  # results of `recent_start` since the last poll
        # The sum of whole numbers up to each poll, which gives the mean of any window at once; and the index
        # of the last poll without a gauge.
        self._sums = {name: array("d") for name in NUMBERS}
        self._unknown = dict.fromkeys(GAUGES, -1)

    # Adding a poll.

    def observe(self, t: float, snapshot: Snapshot, start_time: float | None, *, whole: bool = True) -> None:
        """Add one good poll.

        `start_time` is the start of the server process, where the body has it. If the body is not `whole`, a
        counter may be missing only because of the truncation.
        """
        values = snapshot.values
        if self.snapshot is None:
            self.moved_at = self.worked_at = self.finished_at = t
        # Each counter has its own creation time; a truncated body may have only that of another counter.
        origin = start_time if start_time is not None or not whole else values.get("created")
        step = self.sources.step(t, origin, self._last, values)
        mixed = self.sources.by_turns(t)
        self._begin(t, step, mixed=mixed, whole=whole)
        if not self.refused and not REFUSED.keys().isdisjoint(values):
            self._add_refused()
        self._count(values, mixed=mixed)
        asleep = values.get("sleep_weights_offloaded") == 1 or values.get("sleep_discard_all") == 1
        if step != "same" or mixed or asleep:
            self.moved_at = t  # a body of another source, or a sleeping engine, does not prove a standstill
        elif self.snapshot is not None:
            self.inferred += self._inferred(t, values)
            self._note_progress(t, values)
        if values.get("requests_running", 1.0) or values.get("requests_waiting", 1.0) or step == "new":
            self.worked_at = t
        self._append(t, values)
        self.snapshot, self._mixed = snapshot, mixed
        self._whole_body_seen = self._whole_body_seen or whole
        self.seen.update(values, snapshot.untrusted)
        if whole:
            self._observe_lengths(t, snapshot)
        self._trim(t)

    def _begin(self, t: float, step: Step, *, mixed: bool, whole: bool) -> None:
        """Reset what a new process, the end of a mixture or the first complete body makes invalid."""
        if step == "returned":
            self._last = dict(self.sources.resumed)
            self.restart = None  # it was not a restart but the first turn
        elif step == "new":
            self._last = {}  # the new process counts from zero
            self.prompt_lengths, self.output_lengths = LengthWindow(), LengthWindow()
            self.request_seconds = LengthWindow()
            if not mixed:
                self._note_restart(t)
        if (self._mixed and not mixed) or (whole and not self._whole_body_seen):
            self._begin_index = len(self.times)

    def _note_restart(self, t: float) -> None:
        self.restarts += 1
        self.restart = Restart(
            at=t,
            kv_usage=self.latest("kv_usage"),
            kv_usage_max=self.highest("kv_usage", self.first_index_since(self.times[-1] - MINUTE)),
            running=self.latest("requests_running"),
        )
        self.seen = set()
        self.falls.clear()
        self._begin_index = len(self.times)

    def _count(self, values: Mapping[str, float], *, mixed: bool) -> None:
        """Add the increase of each counter: after a reset the new value, at first sight of an engine nothing.

        Nothing is added from a mixture of sources, whose increase is unknown; nor if one counter falls while
        others show that their process goes on. After a small fall it must first reach its old value again.
        """
        last, own, goes_on = self._last, self.own, self.sources.goes_on
        for reading, _ in self._counters:
            value, before = values.get(reading), last.get(reading)
            if value is None or value == before or value > MOST_COUNTED:
                continue
            if before is not None and value < before and goes_on and not mixed:
                last[reading] = before if 2 * value >= before else value
                continue
            last[reading] = value
            if mixed:
                own.setdefault(reading, 0.0)
            elif before is None:
                self._count_first(reading, value)
            else:
                own[reading] += value if value < before else value - before

    def _add_refused(self) -> None:
        self.refused = tuple(REFUSED)
        for name in REFUSED:
            column = self.columns[name] = array("d", [_NAN]) * len(self.times)
            self._counters.append((name, column.append))

    def _count_first(self, reading: str, value: float) -> None:
        """Start a counter without a previous value: of a new process or engine, or created late."""
        if reading in self.own:
            self.own[reading] += value
        elif self._whole_body_seen and reading not in self.seen:
            self.own[reading] = value
            self._late.add(reading)
        else:
            self.own[reading] = 0.0

    def _note_progress(self, t: float, values: Mapping[str, float]) -> None:
        """Note signs of work since the last poll; called before this one is appended."""
        usage = values.get("kv_usage", self._usage)
        if usage != self._usage or any(map(self._moved, PROGRESS)):
            self.moved_at = t
        if self._moved("requests_finished"):
            self.finished_at = t

    def _moved(self, name: str) -> bool:
        own = self.own.get(name)
        return own is not None and own != self.columns[name][-1]

    def _append(self, t: float, values: Mapping[str, float]) -> None:
        if self.times and self._moved("preemptions"):
            self.preempted_at = t
        self.times.append(t)
        self._recent.clear()
        own = self.own
        for name, append in self._gauges:
            value = values.get(name, _NAN)
            append(value)
            if math.isnan(value):
                self._unknown[name] = len(self.times) - 1
        for name, sums in self._sums.items():
            sums.append((sums[-1] if sums else 0.0) + values.get(name, 0.0))
        for name, append in self._counters:
            append(own.get(name, _NAN))
        self.columns[_INFERRED].append(self.inferred)
        self.columns[_RETURNED].append(self.returned)
        usage = values.get("kv_usage")
        if usage is not None:
            self._usage = usage
            self.kv_polls[_bucket(usage)] += 1
            self.kv_sum += usage

    def _observe_lengths(self, t: float, snapshot: Snapshot) -> None:
        for reading, window in (
            ("prompt_length", self.prompt_lengths),
            ("output_length", self.output_lengths),
            ("request_seconds", self.request_seconds),
        ):
            buckets = snapshot.buckets.get(reading)
            if buckets:
                produced = snapshot.values.get("generation_tokens") if reading == "output_length" else None
                window.observe(t, buckets, snapshot.values.get(f"{reading}_sum"), produced)

    def _inferred(self, t: float, values: Mapping[str, float]) -> float:
        """Estimate the preemptions between the last poll and this one from the gauges.

        It is the fall of running without the finished requests, at most the rise of waiting, and 0 unless KV
        was full a moment ago: clients that give up and retry look the same.
        """
        running, waiting = self.columns["requests_running"][-1], self.columns["requests_waiting"][-1]
        fell = running - values.get("requests_running", _NAN)
        rose = values.get("requests_waiting", _NAN) - waiting
        if not (fell > 0 and rose > 0) or t - self.times[-1] > INFER_GAP_SECONDS:
            return 0.0
        finished = self.own.get("requests_finished", _NAN) - self.columns["requests_finished"][-1]
        back = max(0.0, min(fell - (0.0 if math.isnan(finished) else finished), rose))
        self.returned += back
        usage = self.highest("kv_usage", self.first_index_since(t - INFER_KV_SECONDS))
        inferred = back if usage is not None and usage >= INFER_KV_FULL else 0.0
        if fell >= max(MASS_LEAST, MASS_SHARE * running) and rose >= MASS_SHARE * fell:
            counted = self.columns["preemptions"][-1]
            self.falls.append(Fall(t, fell, inferred, counted, whole=fell >= running))
        return inferred

    def _trim(self, t: float) -> None:
        spare = len(self.times) - KEEP_POLLS
        old = bisect_right(self.times, t - KEEP_SECONDS) - 1
        cut = max(spare, old)
        if cut < 64:  # noqa: PLR2004 (moving the ring is too expensive for every poll)
            return
        del self.times[:cut]
        for column in self.columns.values():
            del column[:cut]
        self._unknown = {name: max(-1, index - cut) for name, index in self._unknown.items()}
        for name in NUMBERS:
            known = (0.0 if math.isnan(value) else value for value in self.columns[name])
            self._sums[name] = array("d", accumulate(known))
        self._begin_index = max(0, self._begin_index - cut)

    # Reading the past. An index is the start of a window.

    def window_start(self, at: float) -> int:
        """Return the index of the last poll at or before `at`, else of the first poll of this process."""
        return max(self._begin_index, bisect_right(self.times, at) - 1)

    def recent_start(self, seconds: float) -> int:
        """Return the start of the window of the last seconds; each is looked up once per poll."""
        start = self._recent.get(seconds)
        if start is None:
            start = self._recent[seconds] = self.window_start(self.times[-1] - seconds)
        return start

    def first_index_since(self, at: float) -> int:
        """Return the index of the first poll at or after `at`, else of the last poll.

        Use it for gauges, which say nothing about the time before their poll. Windows of counters start at
        `window_start`, so that an increase between two polls far apart is not lost.
        """
        return min(len(self.times) - 1, max(self._begin_index, bisect_left(self.times, at)))

    def latest(self, name: str) -> float | None:
        """Return the last value of a column, None if the last body did not have it."""
        value = self.columns[name][-1]
        return None if math.isnan(value) else value

    def highest(self, name: str, start: int) -> float | None:
        """Return the maximum since a window's start, None where nothing is known."""
        return max(self._known(name, start), default=None)

    def mean(self, name: str, start: int) -> float | None:
        """Return the mean of a gauge over the polls since a window's start, None where nothing is known."""
        sums = self._sums.get(name)
        if sums is not None and sums[-1] < _EXACT and self.complete(name, start):
            return (sums[-1] - (sums[start - 1] if start else 0.0)) / (len(sums) - start)
        known = self._known(name, start)
        return sum(known) / len(known) if known else None

    def share(self, name: str, start: int, least: float) -> float | None:
        """Return the share of the polls since a window's start in which a gauge was at least `least`."""
        known = self._known(name, start)
        if not known:
            return None
        # Usually it is all of them or none, which the extremes show at a third of the cost.
        if min(known) >= least:
            return 1.0
        if max(known) < least:
            return 0.0
        return sum(map(float(least).__le__, known)) / len(known)

    def complete(self, name: str, start: int) -> bool:
        """Return whether every poll since a window's start had this gauge."""
        return self._unknown[name] < start

    def _known(self, name: str, start: int) -> Sequence[float]:
        """Return the known values of a gauge since a window's start."""
        column = self.columns[name][start:]
        if self.complete(name, start):
            return column
        return [value for value in column if not math.isnan(value)]

    def increase(self, name: str, start: int) -> float | None:
        """Return the increase of a counter since a window's start; None if unknown.

        A counter that appeared after its engine started at zero.
        """
        column = self.columns[name]
        now = column[-1]
        change = now - column[start]
        if change == change:  # noqa: PLR0124 (not NaN: both are known)
            return change
        return now if name in self._late and not math.isnan(now) else None

    def span(self, start: int) -> float:
        """Return the seconds from a window's start to the last poll."""
        return self.times[-1] - self.times[start]

    def rate(self, name: str, start: int) -> float | None:
        """Return a counter's increase per second; None for a window of one poll."""
        seconds = self.span(start)
        increase = self.increase(name, start)
        return increase / seconds if increase is not None and seconds > 0 else None

    def ratio(self, name: str, of: str, start: int) -> float | None:
        """Return the increase of one counter / that of another; None if the latter did not move."""
        over, under = self.increase(name, start), self.increase(of, start)
        return over / under if over is not None and under else None


def _bucket(usage: float) -> int:
    """Return the index of the histogram's bucket: the first bound that is not below the usage."""
    for index, bound in enumerate(KV_BOUNDS):
        if usage <= bound:
            return index
    return len(KV_BOUNDS)
