"""Describes an engine's situation after a poll: the facts that verdicts are judged by, each computed once.

Pure. None is unknown; no verdict is based on an unknown value. A fact is computed when a verdict, a finding
or a fix first reads it, so that a poll pays only for those it is judged by.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from exporter.analysis.baseline import Baseline
from exporter.analysis.history import History
from exporter.analysis.lazy import lazy
from exporter.analysis.pace import PaceWatch, computed_prompts
from exporter.analysis.signals import Signals, mean_context
from exporter.config import AnalysisConfig, as_number, seat_limit
from exporter.vllm.exposition import LoraState

__all__ = ["CRAWLING", "TWICE_MATTERS", "Counts", "Queue", "Situation", "Steps", "Throughput", "uncounted"]

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
# An engine that stood still has no progress yet with fewer steps per second than this.
CRAWLING: Final = 0.1
# vLLM's largest default of `max_num_batched_tokens`.
_LARGEST_BUDGET: Final = 16_384.0


class Counts(NamedTuple):
    """Events of one window; unknown counts read as 0, because they prove nothing."""

    preempted: float  # counted by the server, and those of the last 15 s that only its gauges show yet
    finished: float  # requests that finished
    counted: float  # preemptions that the server counted
    inferred: float  # preemptions that the gauges show, whether they were counted or not


class Throughput(NamedTuple):
    """Generated tokens per second."""

    tokens_per_second: float | None  # over the burst window
    level: float | None  # the engine's own rate in calm times, scaled down where fewer requests run than then


class Situation:
    """The facts of one engine after one poll; valid until its history gets the next one."""

    def __init__(
        self,
        history: History,
        signals: Signals,
        baseline: Baseline,
        server_facts: Mapping[str, object],
        thresholds: AnalysisConfig,
        lora: LoraState | None,
        pace: PaceWatch,
    ) -> None:
        """Describe the situation after the last successful poll.

        Args:
            history: of the engine, with at least one poll.
            signals: after that poll.
            baseline: the normal rate of this engine.
            server_facts: settings of the server, by vLLM's flag names.
            thresholds: settings of the exporter.
            lora: the server's adapters.
            pace: the normal time of this engine's steps.
        """
        self.t = history.times[-1]
        self.history = history
        self.signals = signals
        self.baseline = baseline
        self.server_facts = server_facts
        self.thresholds = thresholds
        self.lora = lora
        self.pace = pace
        self.queue = Queue(self)
        self.steps = Steps(self)
        self.running = signals.requests_running  # at the last poll
        self.waiting = signals.requests_waiting
        self.idle = self.t - history.moved_at  # seconds since the last sign of work
        # Seconds since a request finished, or since the engine was first seen.
        self.unfinished = self.t - history.finished_at
        # The verdict about the queue that explains most of the waiting of the last minutes.
        self.queue_cause: str | None = None

    def number(self, fact: str) -> float | None:
        """Return a fact of the server as a number; None where it is unknown or no number."""
        return as_number(self.server_facts.get(fact))

    @lazy
    def burst(self) -> Counts:
        """Events of `burst_window`."""
        return _counts(self.history, self.thresholds.burst_window)

    @lazy
    def half_minute(self) -> Counts:
        """Events of the hold time, by default 30 s."""
        return _counts(self.history, self.thresholds.hold)

    @lazy
    def minute(self) -> Counts:
        """Events of the window of rates, by default 60 s."""
        return _counts(self.history, self.thresholds.window)

    @lazy
    def long(self) -> Counts:
        """Events of `long_window`."""
        return _counts(self.history, self.thresholds.long_window)

    @lazy
    def inferred(self) -> float:
        """Preemptions of the last seconds that only the gauges show; the counter has not moved yet."""
        return _only_inferred(self.history, self.history.recent_start(_INFERRED_SECONDS))

    @lazy
    def preempted_ago(self) -> float | None:
        """Seconds since the counter of preemptions last moved; None if not within 2 `light_for`."""
        history = self.history
        start = history.recent_start(2 * self.thresholds.light_for)
        if not history.latest("preemptions") or history.preempted_at <= history.times[start]:
            return None
        return self.t - history.preempted_at

    @lazy
    def throughput(self) -> Throughput:
        """The rate of the burst window beside the calm level; fewer requests get fewer tokens."""
        start = self.history.recent_start(self.thresholds.burst_window)
        level, requests = self.baseline.level, _requests(self.history, start)
        if level is not None and requests is not None and requests < self.baseline.level_requests:
            level *= requests / self.baseline.level_requests
        return Throughput(self.history.rate("generation_tokens", start), level)

    @lazy
    def seats(self) -> float | None:
        """The most requests that run at once; None where no limit is known."""
        return self.number(seat_limit(self.server_facts))

    @lazy
    def requests(self) -> float | None:
        """Running and waiting, on average over the window of rates."""
        return _requests(self.history, self.history.recent_start(self.thresholds.window))

    @lazy
    def demand(self) -> float | None:
        """Requests that would run or wait if none were refused: as many more as are refused per finished one.

        An upper bound, because clients that try again are refused again. Without a finished request the
        refused ones are left out.
        """
        refused = self.signals.requests_refused_per_second
        finished = self.signals.requests_finished_per_second
        if not refused or not finished or self.requests is None:
            return self.requests
        return self.requests * (1 + refused / finished)

    @lazy
    def span(self) -> float:
        """Seconds of history within `long_window`."""
        return self.history.span(self.history.recent_start(self.thresholds.long_window))

    @lazy
    def busy(self) -> bool:
        """Whether any of the last polls showed a request, or tokens were generated between them.

        At least two polls, and more than a second: single idle readings occur under load.
        """
        history = self.history
        if history.columns["requests_running"][-1] > 0:
            return True
        start = min(history.recent_start(_BUSY_SECONDS), max(0, len(history.times) - 2))
        shown = any(history.highest(name, start) for name in ("requests_running", "requests_waiting"))
        return shown or bool(history.increase("generation_tokens", start))

    @lazy
    def falling(self) -> bool:
        """Whether tokens per second have just fallen."""
        return _falling(self.history)

    @lazy
    def answers_outlast_window(self) -> bool:
        """Whether a request takes longer than the long window, so that few finished ones prove nothing.

        By Little's law: time in the engine = requests in the engine / requests finished per second.
        """
        running = self.history.mean(
            "requests_running", self.history.recent_start(self.thresholds.long_window)
        )
        if running is None or self.span <= 0 or self.long.finished <= 0:
            return True
        return running * self.span / self.long.finished > self.thresholds.long_window

    @lazy
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


class _QueueWindow:
    """What is observed over `queue_window`."""

    def __init__(self, situation: Situation) -> None:
        self._s = situation
        self._history = situation.history

    @lazy
    def _start(self) -> int:
        return self._history.recent_start(self._s.thresholds.queue_window)


class Queue(_QueueWindow):
    """The queue and what it waits for, over `queue_window`."""

    @lazy
    def waiting_share(self) -> float | None:
        """Share of the polls in which at least one request waited."""
        return self._history.share("requests_waiting", self._start, 0.5)

    @lazy
    def waiting_mean(self) -> float | None:
        """Requests waiting, on average."""
        return self._history.mean("requests_waiting", self._start)

    @lazy
    def deferred_mean(self) -> float | None:
        """Requests of them that wait for something other than capacity, on average."""
        return self._history.mean("requests_deferred", self._start)

    @lazy
    def running_mean(self) -> float | None:
        """Requests running, on average."""
        return self._history.mean("requests_running", self._start)

    @lazy
    def running_most(self) -> float | None:
        """The most requests that ran at once."""
        return self._history.highest("requests_running", self._start)

    @lazy
    def seats_share(self) -> float | None:
        """Share of the polls in which all seats, or all but one, were taken."""
        seats = self._s.seats
        least = None if seats is None else max(1.0, seats - 1)
        return None if least is None else self._history.share("requests_running", self._start, least)

    @lazy
    def kv_usage_mean(self) -> float | None:
        """KV usage, on average."""
        return self._history.mean("kv_usage", self._start)

    @lazy
    def free_tokens(self) -> float | None:
        """Tokens of the pool that were free for waiting requests, on average."""
        usage, capacity = self.kv_usage_mean, self._s.signals.kv_capacity_tokens
        reserved = self._s.number("watermark") or 0.0  # free, but not for waiting requests
        return None if usage is None or capacity is None else (1 - usage - reserved) * capacity

    @lazy
    def longest_prompt(self) -> float | None:
        """Tokens of the longest prompts seen (p99), else the longest that the model accepts."""
        lengths = self._history.prompt_lengths.lengths()
        p99 = lengths.quantile(0.99) if lengths is not None and lengths.detailed else None
        longest = self._s.number("max_model_len")
        if p99 is None:
            return longest
        return p99 if longest is None else min(p99, longest)

    @lazy
    def overhead(self) -> float:
        """Tokens that every request holds whatever its lengths: what even the emptiest time does not explain.

        Requests of hybrid models hold the state of some layers, those with a draft model its KV too.
        """
        least, capacity = self._s.pace.used_per_request, self._s.signals.kv_capacity_tokens
        prompts, outputs = self._history.prompt_lengths.lengths(), self._history.output_lengths.lengths()
        if least is None or capacity is None or prompts is None or prompts.mean is None:
            return 0.0
        answer = outputs.mean if outputs is not None and outputs.mean is not None else 0.0
        return max(0.0, least * capacity - prompts.mean - answer)

    @lazy
    def has_room(self) -> bool | None:
        """Whether the head of the queue would be admitted: only as a whole, and no request overtakes it.

        None without a KV reading.
        """
        if self.kv_usage_mean is None:
            return None
        if self.free_tokens is not None and self.longest_prompt is not None:
            left = self.free_tokens - self.longest_prompt
            return left >= 0 and left >= self.overhead
        return self.kv_usage_mean < self._s.thresholds.kv_full


class Steps(_QueueWindow):
    """The engine's steps, over `queue_window`; a step without an output is not counted as one."""

    @lazy
    def _count(self) -> float | None:
        return self._history.increase("engine_steps", self._start)

    @lazy
    def tokens(self) -> float | None:
        """Tokens computed per step, prompts and answers; prompt tokens from the prefix cache are none."""
        generated = self._history.increase("generation_tokens", self._start)
        if not self._count or generated is None or self.prompts is None:
            return None
        return generated / self._count + self.prompts

    @lazy
    def prompts(self) -> float | None:
        """Those of prompts."""
        computed = computed_prompts(self._history, self._start)
        return None if computed is None or not self._count else computed / self._count

    @lazy
    def seconds(self) -> float | None:
        """Seconds of a step."""
        seconds = self._history.ratio("inter_token_seconds", "inter_token_count", self._start)
        if not self._count or seconds is None:
            return None
        # An answer that is set back for a while makes its tokens late and no step longer.
        return min(seconds, self._history.span(self._start) / self._count)

    @lazy
    def prompt_share(self) -> float | None:
        """Share of their time that computing prompts explains."""
        if self.seconds is None or self.prompts is None:
            return None
        return self._s.pace.prompt_share(self.seconds, self.prompts)

    @lazy
    def again_share(self) -> float:
        """Share of their time for contexts that are computed again, at most; 0 if unknown.

        What is found in the prefix cache takes no time: it is no more than what nothing else explains.
        """
        running, seconds, prompts = self._s.queue.running_mean, self.seconds, self.prompts
        preempted = self._history.increase("preemptions", self._start)
        if not preempted or not self._count or seconds is None or prompts is None or running is None:
            return 0.0
        pace = self._s.pace
        held = mean_context(self._history, self._start, self._s.signals.kv_capacity_tokens) or 0.0
        again = pace.prompt_share(seconds, preempted * held / self._count) or 0.0
        return min(again, pace.unexplained_share(seconds, running, prompts))

    @lazy
    def work_share(self) -> float | None:
        """Share of their time that grows with the work in them."""
        return None if self.seconds is None else self._s.pace.work_share(self.seconds)

    @lazy
    def burst_factor(self) -> float | None:
        """Times the longest time that this load explains, in the burst window alone; too short to be sure."""
        return self._slow_factor(self._s.thresholds.burst_window)

    @lazy
    def slow_factor(self) -> float | None:
        """The same in the burst window, in half and in twice of it; the smallest of these."""
        burst = self._s.thresholds.burst_window
        factors = (self.burst_factor, self._slow_factor(2 * burst))
        known = [factor for factor in (self._slow_factor(burst / 2), *factors) if factor is not None]
        return None if None in factors else min(known)

    @lazy
    def crawling(self) -> float | None:
        """Steps per second over `stall_after` if next to none and KV usage hardly moves; else None."""
        start = self._history.recent_start(self._s.thresholds.stall_after)
        steps, span = self._history.increase("engine_steps", start), self._history.span(start)
        return None if steps is None or max(steps, self._moves(start)) >= CRAWLING * span else steps / span

    @lazy
    def idle_factor(self) -> float | None:
        """Times the longest time of a full step since the last sign of progress; None if unknown."""
        return None if self._full is None or not self._s.running else self._s.idle / self._full

    def crawl_factor(self, window: float) -> float:
        """Times that of a full step which those of a whole window and the one under way took; 0 if unknown.

        Full steps are the longest there are, so no load explains it. A prompt that is being computed moves
        KV usage all the time, with steps that are not counted.
        """
        start = self._history.recent_start(window)
        steps, span = self._history.increase("engine_steps", start), self._history.span(start)
        busy = self._history.share("requests_running", start, 0.5) == 1
        if steps is None or self._full is None or not busy or span < 0.9 * window:
            return 0.0
        moves, polls = self._moves(start), len(self._history.times) - start
        return 0.0 if moves > max(steps, polls / 2) else span / (max(steps, moves) + 1) / self._full

    @lazy
    def rare(self) -> bool:
        """Whether the engine crawls and goes on doing so: a single pause has no step in its later half."""
        later = self._history.recent_start(self._s.thresholds.stall_after / 2)
        return self.crawling is not None and bool(self._history.increase("engine_steps", later))

    def _moves(self, start: int) -> int:
        """How often KV usage changed from poll to poll since a window's start."""
        return sum(a != b for a, b in pairwise(self._history.columns["kv_usage"][start:]))

    @lazy
    def _full(self) -> float | None:
        """Seconds of the longest step."""
        s = self._s
        return s.pace.expected(s.running or 0.0, s.number("max_num_batched_tokens") or _LARGEST_BUDGET)

    @lazy
    def slowing(self) -> bool:
        """Whether steps of the burst window may become a slow engine."""
        return self.burst_factor is not None and self.burst_factor >= _SLOWING

    @lazy
    def computes_prompt(self) -> bool:
        """Whether prompts that are being computed are most of the growth of KV usage."""
        return uncounted(self._history, self._start, self._s.signals.kv_capacity_tokens)[1]

    def _slow_factor(self, window: float) -> float | None:
        """How many times the longest plausible time of this load a step takes; None if unknown."""
        history, capacity = self._history, self._s.signals.kv_capacity_tokens
        start = history.recent_start(window)
        steps = history.increase("engine_steps", start)
        seconds = history.ratio("inter_token_seconds", "inter_token_count", start)
        running = history.mean("requests_running", start)
        if not steps or seconds is None or not running:
            return None
        growth, computes = uncounted(history, start, capacity)
        held = mean_context(history, start, capacity) or 0.0
        again = (history.increase("preemptions", start) or 0.0) * held
        prompts = (computed_prompts(history, start) or 0.0) + growth + again
        expected = None if computes else self._s.pace.expected(running, prompts / steps)
        # One token that came late is no slow step: the steps have to be few as well.
        return None if expected is None else min(seconds, history.span(start) / steps) / expected


def _counts(history: History, window: float) -> Counts:
    start = history.recent_start(window)
    counted = history.increase("preemptions", start)
    finished = history.increase("requests_finished", start) or 0.0
    inferred = history.increase("preemptions_inferred", start) or 0.0
    if counted is None:
        return Counts(inferred, finished, 0.0, inferred)
    recent = max(start, history.recent_start(_INFERRED_SECONDS))
    return Counts(counted + _only_inferred(history, recent), finished, counted, inferred)


def _only_inferred(history: History, start: int) -> float:
    """Preemptions since a window's start that the gauges show and the counter does not."""
    counted = history.increase("preemptions", start) or 0.0
    return max(0.0, (history.increase("preemptions_inferred", start) or 0.0) - counted)


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


def _requests(history: History, start: int) -> float | None:
    """Return the mean of running and waiting requests since a window's start."""
    running, waiting = history.mean("requests_running", start), history.mean("requests_waiting", start)
    return None if running is None or waiting is None else running + waiting


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
