"""An engine's situation after a poll: the facts that verdicts are judged by, each computed once.

Pure. Everything may be None, which is unknown; a judgement that needs it is then not made.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from exporter.analysis.baseline import Baseline
from exporter.analysis.history import History
from exporter.analysis.signals import Signals
from exporter.config import AnalysisConfig
from exporter.vllm.exposition import LoraState

__all__ = ["Situation", "describe"]

# Inferred preemptions wait this long for the server's own counter to move.
_INFERRED_SECONDS: Final = 15.0
_BUSY_SECONDS: Final = 1.5
# Tokens per second have fallen when the last poll brought this much less than the best before.
_FALLING: Final = 0.8
_FALLING_SECONDS: Final = 15.0
_FALLING_SPAN: Final = 0.4


@dataclass(slots=True)  # nobody changes one, but to freeze so many fields would be paid at every poll
class Situation:
    """The facts of one engine after one poll.

    Attributes:
        t: time of the poll.
        longest: tokens of the longest prompts seen (p99), else the longest the model takes.
        free_tokens: tokens that the pool had free for those who wait, on average over the queue window.
        has_room: whether the longest prompts would fit into what is free; None without any KV reading.
        preempted: preemptions in the burst window, the hold time, the minute and the long window, those
            that the gauges betrayed where they are more than those that were counted; ``finished``
            likewise.
        burst_counted: preemptions that the server counted in the burst window.
        inferred: preemptions that the gauges betrayed in the last seconds and the counter has not shown.
        preempted_ago: seconds since the counter of preemptions last moved, None if it never did.
        burst_tokens: put out per second over the burst window.
        level: the engine's own tokens per second in calm times, by as many requests as there are now.
        waiting_share: share of the polls of the queue window in which something waited.
        seats: `max_num_seqs`, or what stands in its place.
        seats_share: share of those polls with all seats taken, or all but one.
        idle: seconds since anything moved.
        requests: running and waiting, on average over the window of rates.
        busy: whether anything ran or waited in the last seconds; single idle readings come in mid-load.
        span: seconds of history of this process.
    """

    t: float
    signals: Signals
    history: History
    baseline: Baseline
    facts: Mapping[str, object]
    limits: AnalysisConfig
    lora: LoraState | None
    longest: float | None
    free_tokens: float | None
    has_room: bool | None
    kv_queue_mean: float | None
    burst_counted: float
    burst_preempted: float
    burst_finished: float
    half_preempted: float
    half_finished: float
    minute_preempted: float
    minute_finished: float
    long_preempted: float
    long_finished: float
    inferred: float
    preempted_ago: float | None
    burst_tokens: float | None
    level: float | None
    waiting_share: float | None
    waiting_mean: float | None
    deferred_mean: float | None
    seats: float | None
    seats_share: float | None
    requests: float | None
    idle: float
    busy: bool
    span: float

    def number(self, fact: str) -> float | None:
        """A fact of the server as a number, None where it was not told."""
        return _number(self.facts.get(fact))

    @property
    def running(self) -> float | None:
        """Requests running at the last poll."""
        return self.signals.requests_running

    @property
    def waiting(self) -> float | None:
        """Requests waiting at the last poll."""
        return self.signals.requests_waiting

    @property
    def falling(self) -> bool:
        """Whether tokens per second have just fallen."""
        return _falling(self.history)

    @property
    def answers_outlast_window(self) -> bool:
        """Whether a request takes longer than the long window, so that few finished ones prove nothing.

        By Little's law: requests in the engine, by requests finished per second.
        """
        start = self.history.start_of(self.t - self.limits.long_window)
        running = self.history.mean("requests_running", start)
        span = self.history.span(start)
        if running is None or span <= 0:
            return True
        if self.long_finished <= 0:
            return True
        return running * span / self.long_finished > self.limits.long_window

    @property
    def tokens_fell(self) -> bool | None:
        """Whether tokens per second are below the engine's own level by more than is normal."""
        if self.level is None or self.burst_tokens is None or self.level <= 0:
            return None
        return self.burst_tokens < self.limits.tokens_fallen * self.level


def describe(
    history: History,
    signals: Signals,
    baseline: Baseline,
    facts: Mapping[str, object],
    limits: AnalysisConfig,
    lora: LoraState | None,
) -> Situation:
    """The situation after the last good poll."""
    t = history.times[-1]
    burst = history.start_of(t - limits.burst_window)
    half = history.start_of(t - limits.hold)
    queue = history.start_of(t - limits.queue_window)
    minute = history.start_of(t - limits.window)
    long = history.start_of(t - limits.long_window)
    recent = history.start_of(t - _INFERRED_SECONDS)
    windows = (burst, half, minute, long, recent)
    counted = _counts(history, "preemptions", windows)
    betrayed = _counts(history, "preemptions_inferred", windows)
    preempted = list(map(max, counted, betrayed))
    finished = _counts(history, "requests_finished", windows)
    longest = _longest(history, facts)
    kv_mean = history.mean("kv_usage", queue)
    capacity = signals.kv_capacity_tokens
    kept = _number(facts.get("watermark")) or 0.0  # free, but not for those who wait
    free = None if kv_mean is None or capacity is None else (1 - kv_mean - kept) * capacity
    seats = _number(facts.get("max_num_active_seqs")) or _number(facts.get("max_num_seqs"))
    return Situation(
        t=t,
        signals=signals,
        history=history,
        baseline=baseline,
        facts=facts,
        limits=limits,
        lora=lora,
        longest=longest,
        free_tokens=free,
        has_room=_has_room(kv_mean, free, longest, limits),
        kv_queue_mean=kv_mean,
        burst_counted=counted[0],
        burst_preempted=preempted[0],
        burst_finished=finished[0],
        half_preempted=preempted[1],
        half_finished=finished[1],
        minute_preempted=preempted[2],
        minute_finished=finished[2],
        long_preempted=preempted[3],
        long_finished=finished[3],
        inferred=max(0.0, betrayed[4] - counted[4]),
        preempted_ago=_preempted_ago(history, limits),
        burst_tokens=history.rate("generation_tokens", burst),
        level=_level(baseline, _requests(history, burst)),
        waiting_share=history.share("requests_waiting", queue, 0.5),
        waiting_mean=history.mean("requests_waiting", queue),
        deferred_mean=history.mean("requests_deferred", queue),
        seats=seats,
        seats_share=None if seats is None else history.share("requests_running", queue, max(1.0, seats - 1)),
        requests=_requests(history, minute),
        idle=t - history.moved_at,
        busy=_busy(history),
        span=history.span(long),
    )


def _counts(history: History, name: str, starts: Sequence[int]) -> list[float]:
    """How often something was counted in each of several windows; what is unknown proves nothing."""
    column = history.columns[name]
    now = column[-1]
    changes = [now - column[start] for start in starts]
    if math.isnan(sum(changes)):
        return [history.increase(name, start) or 0.0 for start in starts]
    return changes


def _requests(history: History, start: int) -> float | None:
    """Running and waiting requests, on average since a window's start."""
    running, waiting = history.mean("requests_running", start), history.mean("requests_waiting", start)
    return None if running is None or waiting is None else running + waiting


def _level(baseline: Baseline, requests: float | None) -> float | None:
    """What the engine put out in calm times; fewer requests than then are served fewer tokens."""
    if baseline.level is None or requests is None or requests >= baseline.level_requests:
        return baseline.level
    return baseline.level * requests / baseline.level_requests


def _busy(history: History) -> bool:
    """Whether any of the last polls showed a request, or tokens came between them.

    At least two polls, and more than a second: single idle readings come in mid-load.
    """
    if history.columns["requests_running"][-1] > 0:
        return True
    start = min(history.start_of(history.times[-1] - _BUSY_SECONDS), max(0, len(history.times) - 2))
    shown = any(history.highest(name, start) for name in ("requests_running", "requests_waiting"))
    return shown or bool(history.increase("generation_tokens", start))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _longest(history: History, facts: Mapping[str, object]) -> float | None:
    """Tokens of the longest prompts: p99 of those seen where there are buckets, else the model's limit."""
    lengths = history.prompt_lengths.lengths()
    p99 = lengths.quantile(0.99) if lengths is not None and lengths.detailed else None
    longest = _number(facts.get("max_model_len"))
    if p99 is None:
        return longest
    return p99 if longest is None else min(p99, longest)


def _has_room(
    kv_mean: float | None, free: float | None, longest: float | None, limits: AnalysisConfig
) -> bool | None:
    """Whether the head of the queue would be admitted: whole or not at all, and nobody overtakes it."""
    if kv_mean is None:
        return None
    if free is not None and longest is not None:
        return free >= longest
    return kv_mean < limits.kv_full


def _preempted_ago(history: History, limits: AnalysisConfig) -> float | None:
    """Seconds since the counter of preemptions moved, looking back no further than it is spoken of."""
    t = history.times[-1]
    start = history.start_of(t - 2 * limits.light_for)
    column = history.columns["preemptions"]
    now = column[-1]
    if math.isnan(now) or now <= 0 or now == column[start]:  # unknown, never moved, or not lately
        return None
    for index in range(len(column) - 2, start - 1, -1):
        if column[index] != now:
            return t - history.times[index + 1]
    return None


def _falling(history: History) -> bool:
    """Whether the last poll brought clearly fewer tokens per second than the best one shortly before."""
    times, tokens = history.times, history.columns["generation_tokens"]
    first = history.start_of(times[-1] - _FALLING_SECONDS)
    best = last = None
    end = len(times) - 1
    while end > first:
        begin = end - 1
        while begin > first and times[end] - times[begin] < _FALLING_SPAN:
            begin -= 1
        seconds = times[end] - times[begin]
        rate = (tokens[end] - tokens[begin]) / seconds if seconds > 0 else 0.0
        if last is None:
            last = rate
        else:
            best = rate if best is None or rate > best else best
        end = begin
    return last is not None and best is not None and last < _FALLING * best
