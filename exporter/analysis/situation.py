"""Describes an engine's situation after a poll: the facts that verdicts are judged by, each computed once.

Pure. None is unknown; no verdict is based on an unknown value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from exporter.analysis.baseline import Baseline
from exporter.analysis.history import History
from exporter.analysis.pace import PaceWatch
from exporter.analysis.signals import Signals
from exporter.config import AnalysisConfig, as_number
from exporter.vllm.exposition import LoraState

__all__ = ["TWICE_MATTERS", "Counts", "Queue", "Situation", "Steps", "Throughput", "describe", "uncounted"]

# Inferred preemptions count this long, until the server's own counter must have moved.
_INFERRED_SECONDS: Final = 15.0
# Blocks are filled before tokens are counted; beyond this factor it is not that.
_UNCOUNTED: Final = 2.0
# Blocks are taken whole; fewer tokens than this may be their ends.
_LEAST_UNCOUNTED: Final = 256.0
# Steps of a moment this many times longer than the load explains may become a slow engine.
_SLOWING: Final = 2.5
_BUSY_SECONDS: Final = 1.5
# Tokens per second have fallen if the last polls have this share of the best rate before them. A rate needs
# polls this far apart.
_FALLING: Final = 0.8
_FALLING_SECONDS: Final = 15.0
_FALLING_SPAN: Final = 0.4
# From this share of the work on, preemptions make the engine do too much of it twice.
TWICE_MATTERS: Final = 0.25


class Counts(NamedTuple):
    """Events of one window; unknown counts read as 0, because they prove nothing."""

    preempted: float  # counted by the server, and those of the last 15 s that only its gauges show yet
    finished: float  # requests that finished
    counted: float  # preemptions that the server counted
    inferred: float  # preemptions that the gauges show, whether they were counted or not


class Queue(NamedTuple):
    """The queue and what it waits for, over `queue_window`."""

    waiting_share: float | None  # share of the polls in which at least one request waited
    waiting_mean: float | None  # requests waiting, on average
    deferred_mean: float | None  # those of them that wait for something other than capacity
    kv_usage_mean: float | None  # KV usage, on average
    free_tokens: float | None  # tokens of the pool that were free for waiting requests, on average
    # Tokens of the longest prompts seen (p99), else the longest that the model accepts.
    longest_prompt: float | None
    overhead: float  # tokens that every request holds beyond its prompt and its answer, as on hybrid models
    # Whether the longest prompts would fit into the free tokens; None without a KV reading.
    has_room: bool | None
    seats_share: float | None  # share of the polls in which all seats, or all but one, were taken
    running_most: float | None  # the most requests that ran at once


class Steps(NamedTuple):
    """The engine's steps, over `queue_window`."""

    # Computed per step, prompts and answers; a step without an output is not counted as one.
    tokens: float | None
    prompt_share: float | None  # share of their time that computing prompts explains
    work_share: float | None  # share of their time that grows with the work in them
    # Times the longest time that this load explains, in the burst window, in half and in twice of it; the
    # smallest of these.
    slow_factor: float | None
    slowing: bool  # whether the burst window alone has such steps, or none; too short to be sure
    uncounted: float  # tokens of prompts that are being computed: KV grows by more than was counted
    computes_prompt: bool  # whether those are most of the growth


class Throughput(NamedTuple):
    """Generated tokens per second."""

    tokens_per_second: float | None  # over the burst window
    level: float | None  # the engine's own rate in calm times, scaled down where fewer requests run than then


@dataclass(slots=True)  # never changed; freezing it would cost time at every poll
class Situation:
    """The facts of one engine after one poll."""

    t: float  # time of the poll
    signals: Signals
    history: History
    baseline: Baseline
    server_facts: Mapping[str, object]  # settings of the server, by vLLM's flag names
    thresholds: AnalysisConfig  # settings of the exporter
    lora: LoraState | None  # the server's adapters
    burst: Counts  # events of `burst_window`
    half_minute: Counts  # events of the hold time, by default 30 s
    minute: Counts  # events of the window of rates, by default 60 s
    long: Counts  # events of `long_window`
    # Preemptions of the last seconds that only the gauges show; the counter has not moved yet.
    inferred: float
    # Seconds since the counter of preemptions last moved; None if it has not lately.
    preempted_ago: float | None
    queue: Queue
    steps: Steps
    throughput: Throughput
    pace: PaceWatch
    seats: float | None  # `max_num_seqs`, or what takes its place
    requests: float | None  # running and waiting, on average over the window of rates
    idle: float  # seconds since the last sign of work
    unfinished: float  # seconds since a request finished, or since the engine was first seen
    busy: bool  # whether a request ran or waited within the last seconds
    span: float  # seconds of history within `long_window`
    # The verdict about the queue that explains most of the waiting of the last minutes.
    queue_cause: str | None = None

    def number(self, fact: str) -> float | None:
        """Return a fact of the server as a number; None where it is unknown or no number."""
        return as_number(self.server_facts.get(fact))

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

        By Little's law: time in the engine = requests in the engine / requests finished per second.
        """
        start = self.history.window_start(self.t - self.thresholds.long_window)
        running = self.history.mean("requests_running", start)
        span = self.history.span(start)
        if running is None or span <= 0 or self.long.finished <= 0:
            return True
        return running * span / self.long.finished > self.thresholds.long_window

    @property
    def tokens_fell(self) -> bool | None:
        """Whether tokens per second are abnormally far below the engine's own level; None if unknown.

        A long prompt that is being computed takes the steps of the answers; that is no harm, unless much of
        the work is done twice: then preemptions have brought the prompts.
        """
        now, level = self.throughput
        if now is None or level is None or level <= 0:
            return None
        if self.steps.computes_prompt and not self.much_is_done_twice:
            return False
        return now < self.thresholds.tokens_fallen * level

    @property
    def much_is_done_twice(self) -> bool:
        """Whether preempted requests are a good part of the work, which more KV would spare."""
        return (self.signals.recomputed_ratio or 0.0) >= TWICE_MATTERS


def describe(
    history: History,
    signals: Signals,
    baseline: Baseline,
    server_facts: Mapping[str, object],
    thresholds: AnalysisConfig,
    lora: LoraState | None,
    pace: PaceWatch,
) -> Situation:
    """Describe the situation after the last successful poll."""
    t = history.times[-1]
    burst = history.window_start(t - thresholds.burst_window)
    minute = history.window_start(t - thresholds.window)
    long = history.window_start(t - thresholds.long_window)
    seats = as_number(server_facts.get("max_num_active_seqs")) or as_number(server_facts.get("max_num_seqs"))
    return Situation(
        t=t,
        signals=signals,
        history=history,
        baseline=baseline,
        server_facts=server_facts,
        thresholds=thresholds,
        lora=lora,
        burst=_counts(history, burst),
        half_minute=_counts(history, history.window_start(t - thresholds.hold)),
        minute=_counts(history, minute),
        long=_counts(history, long),
        inferred=_only_inferred(history, history.window_start(t - _INFERRED_SECONDS)),
        preempted_ago=_preempted_ago(history, thresholds),
        queue=_queue(history, signals, server_facts, thresholds, seats, pace),
        steps=_steps(history, signals, thresholds, pace),
        throughput=_throughput(history, baseline, burst),
        pace=pace,
        seats=seats,
        requests=_requests(history, minute),
        idle=t - history.moved_at,
        unfinished=t - history.finished_at,
        busy=_busy(history),
        span=history.span(long),
    )


def _counts(history: History, start: int) -> Counts:
    counted = history.increase("preemptions", start)
    finished = history.increase("requests_finished", start) or 0.0
    inferred = history.increase("preemptions_inferred", start) or 0.0
    if counted is None:
        return Counts(inferred, finished, 0.0, inferred)
    recent = history.window_start(history.times[-1] - _INFERRED_SECONDS)
    return Counts(counted + _only_inferred(history, max(start, recent)), finished, counted, inferred)


def _only_inferred(history: History, start: int) -> float:
    """Preemptions since a window's start that the gauges show and the counter does not."""
    counted = history.increase("preemptions", start) or 0.0
    return max(0.0, (history.increase("preemptions_inferred", start) or 0.0) - counted)


def _queue(
    history: History,
    signals: Signals,
    server_facts: Mapping[str, object],
    thresholds: AnalysisConfig,
    seats: float | None,
    pace: PaceWatch,
) -> Queue:
    start = history.window_start(history.times[-1] - thresholds.queue_window)
    kv_usage = history.mean("kv_usage", start)
    capacity = signals.kv_capacity_tokens
    reserved = as_number(server_facts.get("watermark")) or 0.0  # free, but not for waiting requests
    free = None if kv_usage is None or capacity is None else (1 - kv_usage - reserved) * capacity
    longest = _longest_prompt(history, server_facts)
    overhead = _overhead(history, capacity, pace)
    return Queue(
        waiting_share=history.share("requests_waiting", start, 0.5),
        waiting_mean=history.mean("requests_waiting", start),
        deferred_mean=history.mean("requests_deferred", start),
        kv_usage_mean=kv_usage,
        free_tokens=free,
        longest_prompt=longest,
        overhead=overhead,
        has_room=_has_room(kv_usage, free, longest, overhead, thresholds),
        seats_share=None if seats is None else history.share("requests_running", start, max(1.0, seats - 1)),
        running_most=history.highest("requests_running", start),
    )


def _overhead(history: History, capacity: float | None, pace: PaceWatch) -> float:
    """Tokens that every request holds whatever its lengths: what even the emptiest time does not explain.

    Requests of hybrid models hold the state of some layers, those with a draft model its KV too.
    """
    least = pace.used_per_request()
    prompts, outputs = history.prompt_lengths.lengths(), history.output_lengths.lengths()
    if least is None or capacity is None or prompts is None or prompts.mean is None:
        return 0.0
    answer = outputs.mean if outputs is not None and outputs.mean is not None else 0.0
    return max(0.0, least * capacity - prompts.mean - answer)


def _steps(history: History, signals: Signals, thresholds: AnalysisConfig, pace: PaceWatch) -> Steps:
    t = history.times[-1]
    start = history.window_start(t - thresholds.queue_window)
    growth, computes = uncounted(history, start, signals.kv_capacity_tokens)
    tokens = _tokens_per_step(history, start)
    seconds = _step_seconds(history, start)
    factors = [
        _slow_factor(history, history.window_start(t - window), signals.kv_capacity_tokens, pace)
        for window in (thresholds.burst_window / 2, thresholds.burst_window, 2 * thresholds.burst_window)
    ]
    known = [factor for factor in factors if factor is not None]
    return Steps(
        tokens=tokens,
        prompt_share=None if tokens is None or seconds is None else pace.prompt_share(seconds, tokens),
        work_share=None if seconds is None else pace.work_share(seconds),
        slow_factor=None if None in factors[1:] else min(known),
        slowing=factors[1] is not None and factors[1] >= _SLOWING,
        uncounted=growth,
        computes_prompt=computes,
    )


def _step_seconds(history: History, start: int) -> float | None:
    """Seconds of a step; an answer that is set back for a while makes its tokens late and no step longer."""
    steps = history.increase("engine_steps", start)
    seconds = history.ratio("inter_token_seconds", "inter_token_count", start)
    return None if not steps or seconds is None else min(seconds, history.span(start) / steps)


def uncounted(history: History, start: int, capacity: float | None) -> tuple[float, bool]:
    """Tokens by which KV usage grew beyond what was counted, and whether they are most of the growth.

    A prompt is counted with its first output; until then only the KV usage shows that it is being computed.
    """
    usage = history.columns["kv_usage"]
    growth = usage[-1] - usage[start]
    if not growth > 0 or not history.columns["requests_running"][-1] > 0:
        return 0.0, False
    counted = sum(history.increase(name, start) or 0.0 for name in ("generation_tokens", "prompt_tokens"))
    if capacity is None:
        return 0.0, counted == 0
    beyond = max(0.0, growth * capacity - counted)
    return beyond, beyond >= _LEAST_UNCOUNTED and growth * capacity > _UNCOUNTED * counted


def _tokens_per_step(history: History, start: int) -> float | None:
    """Tokens computed per step; prompt tokens from the prefix cache are none."""
    steps = history.increase("engine_steps", start)
    generated, prompts = (
        history.increase("generation_tokens", start),
        history.increase("prompt_tokens", start),
    )
    if not steps or generated is None or prompts is None:
        return None
    computed = history.increase("prompt_tokens_computed", start)
    if computed is None:
        computed = max(0.0, prompts - (history.increase("prefix_hits", start) or 0.0))
    return (generated + min(computed, prompts)) / steps


def _slow_factor(history: History, start: int, capacity: float | None, pace: PaceWatch) -> float | None:
    """How many times the longest plausible time of this load a step takes; None if unknown."""
    steps = history.increase("engine_steps", start)
    seconds = history.ratio("inter_token_seconds", "inter_token_count", start)
    running = history.mean("requests_running", start)
    if not steps or seconds is None or not running:
        return None
    growth, computes = uncounted(history, start, capacity)
    again = (history.increase("preemptions", start) or 0.0) * _held(history, start, capacity)
    prompts = (history.increase("prompt_tokens", start) or 0.0) + growth + again
    expected = None if computes else pace.expected(running, prompts / steps)
    # One token that came late is no slow step: the steps have to be few as well.
    return None if expected is None else min(seconds, history.span(start) / steps) / expected


def _held(history: History, start: int, capacity: float | None) -> float:
    """Tokens that a running request holds."""
    usage, running = history.mean("kv_usage", start), history.mean("requests_running", start)
    return usage * capacity / running if usage and running and capacity else 0.0


def _throughput(history: History, baseline: Baseline, start: int) -> Throughput:
    """Compare the rate since a window's start with the calm level; fewer requests get fewer tokens."""
    level, requests = baseline.level, _requests(history, start)
    if level is not None and requests is not None and requests < baseline.level_requests:
        level *= requests / baseline.level_requests
    return Throughput(history.rate("generation_tokens", start), level)


def _requests(history: History, start: int) -> float | None:
    """Return the mean of running and waiting requests since a window's start."""
    running, waiting = history.mean("requests_running", start), history.mean("requests_waiting", start)
    return None if running is None or waiting is None else running + waiting


def _busy(history: History) -> bool:
    """Whether any of the last polls showed a request, or tokens were generated between them.

    At least two polls, and more than a second: single idle readings occur under load.
    """
    if history.columns["requests_running"][-1] > 0:
        return True
    start = min(history.window_start(history.times[-1] - _BUSY_SECONDS), max(0, len(history.times) - 2))
    shown = any(history.highest(name, start) for name in ("requests_running", "requests_waiting"))
    return shown or bool(history.increase("generation_tokens", start))


def _longest_prompt(history: History, server_facts: Mapping[str, object]) -> float | None:
    """Return the tokens of the longest prompts: p99 of those seen, else the model's limit."""
    lengths = history.prompt_lengths.lengths()
    p99 = lengths.quantile(0.99) if lengths is not None and lengths.detailed else None
    longest = as_number(server_facts.get("max_model_len"))
    if p99 is None:
        return longest
    return p99 if longest is None else min(p99, longest)


def _has_room(
    kv_usage: float | None,
    free: float | None,
    longest: float | None,
    overhead: float,
    thresholds: AnalysisConfig,
) -> bool | None:
    """Whether the head of the queue would be admitted: only as a whole, and no request overtakes it."""
    if kv_usage is None:
        return None
    if free is not None and longest is not None:
        return free >= longest + overhead
    return kv_usage < thresholds.kv_full


def _preempted_ago(history: History, thresholds: AnalysisConfig) -> float | None:
    """Return the seconds since the counter of preemptions moved; None if not within 2 `light_for`."""
    t = history.times[-1]
    start = history.window_start(t - 2 * thresholds.light_for)
    column = history.columns["preemptions"]
    now = column[-1]
    if math.isnan(now) or now <= 0 or now == column[start]:  # unknown, never moved, or not lately
        return None
    for index in range(len(column) - 2, start - 1, -1):
        if column[index] != now:
            return t - history.times[index + 1]
    return None


def _falling(history: History) -> bool:
    """Whether the last rate of tokens is clearly below the best one of the last seconds.

    Walks backwards in steps of at least `_FALLING_SPAN`: two polls in quick succession make no rate.
    """
    times, tokens = history.times, history.columns["generation_tokens"]
    first = history.window_start(times[-1] - _FALLING_SECONDS)
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
