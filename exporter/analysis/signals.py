"""From history to signals: the numbers that are exported, shown and judged.

Pure. Windows reach back by real time, never by the nominal interval, and shrink to what was seen. A
signal that cannot be known is None, never zero.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter, mul
from typing import Any, Final

from exporter.analysis.history import History

__all__ = ["Signals", "Windows", "compute", "stale"]

# An estimate of when the cache is full needs this many polls over this long, all of them at work, and
# this much of a straight line: a load that has just begun fills the cache with its first prompts.
_SLOPE_POLLS: Final = 5
_SLOPE_SECONDS: Final = 15.0
_SLOPE_FIT: Final = 0.8
_SLOPE_HORIZON_SECONDS: Final = 86_400.0
# A line needs no more points than this, however many polls the window has.
_SLOPE_POINTS: Final = 30

# Increase of one counter by that of another since a window's start.
_Ratio = Callable[[str, str, int], float | None]


@dataclass(frozen=True, slots=True)
class Windows:
    """How far back signals look, in seconds: rates, ratios of rare events, and means of rarer ones."""

    short: float = 60.0
    long: float = 300.0
    longest: float = 600.0


@dataclass(frozen=True, slots=True)
class Signals:
    """The signals of one engine after one poll; None is unknown. Names and units are those of the outputs.

    Attributes:
        preemptions_total: own counter, survives restarts of the server.
        preemptions_per_second: counted by the server, over the short window.
        preemptions_per_finished_request: over the long window; None while nothing finished.
        preemptions_inferred_per_second: betrayed by the gauges before the counter moves; an estimate.
        recomputed_ratio: share of computed tokens that repeats work lost to preemption; an estimate.
        kv_usage_ratio: KV usage at the last poll; ``max`` and ``mean`` over the short window.
        kv_seconds_to_full: from the slope of the short window, only while usage grows and requests run.
        kv_capacity_tokens: what the pool holds; see ``kv_capacity_is_estimate``.
        kv_max_concurrency: requests of the maximum length that fit.
        requests_running: and ``waiting``, ``deferred``: gauges of the last poll.
        requests_finished_total: own counter.
        requests_finished_per_second: and the other rates: over the short window.
        generation_tokens_per_second_recent: this engine's own level in calm times, as verdicts know it.
        queue_time_mean_seconds: first wait of the requests that were scheduled in the shortest window
            that has any.
        inter_token_latency_mean_seconds: over the short window; a preempted request's stall shows here.
        time_to_first_token_mean_seconds: the same for first tokens.
        prefix_cache_hit_ratio: hits by queries over the shortest window that has any.
        progress_idle_seconds: since the step count, tokens or KV usage last moved.
    """

    preemptions_total: float | None = None
    preemptions_per_second: float | None = None
    preemptions_per_finished_request: float | None = None
    preemptions_inferred_per_second: float | None = None
    recomputed_ratio: float | None = None
    kv_usage_ratio: float | None = None
    kv_usage_max_ratio: float | None = None
    kv_usage_mean_ratio: float | None = None
    kv_seconds_to_full: float | None = None
    kv_capacity_tokens: float | None = None
    kv_capacity_is_estimate: bool = False
    kv_max_concurrency: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    requests_deferred: float | None = None
    requests_finished_total: float | None = None
    requests_finished_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    generation_tokens_per_second_recent: float | None = None
    prompt_tokens_per_second: float | None = None
    engine_steps_per_second: float | None = None
    queue_time_mean_seconds: float | None = None
    inter_token_latency_mean_seconds: float | None = None
    time_to_first_token_mean_seconds: float | None = None
    prefix_cache_hit_ratio: float | None = None
    progress_idle_seconds: float | None = None

    def known(self) -> dict[str, float]:
        """The signals that are known, by name."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}


NAMES: Final = tuple(field.name for field in fields(Signals) if field.name != "kv_capacity_is_estimate")
_values: Final = attrgetter(*NAMES)


def compute(
    history: History,
    facts: Mapping[str, object],
    *,
    engines: int = 1,
    windows: Windows | None = None,
    level: float | None = None,
) -> Signals:
    """All signals after the last good poll.

    Args:
        history: of the engine, with at least one poll.
        facts: what is known of the server by vLLM's flag names.
        engines: data-parallel engines that share the block count of the server.
        windows: how far to look back.
        level: tokens per second of this engine in calm times, by its `Baseline`.
    """
    windows = windows or Windows()
    now = history.times[-1]
    short = history.window_start(now - windows.short)
    long = history.window_start(now - windows.long)
    wider = (short, long, history.window_start(now - windows.longest))
    mixed = history.sources.by_turns(now)
    rate = _unknown if mixed else history.rate
    ratio = _unknown if mixed else history.ratio
    capacity, estimate = kv_capacity(history, engines)
    inside = history.first_index_since(now - windows.short)
    kv_usage_max, kv_usage_mean = history.highest_and_mean("kv_usage", inside)
    signals = Signals(
        preemptions_total=history.own.get("preemptions"),
        preemptions_per_second=rate("preemptions", short),
        preemptions_per_finished_request=ratio("preemptions", "requests_finished", long),
        preemptions_inferred_per_second=rate("preemptions_inferred", short) if _betrays(history) else None,
        recomputed_ratio=None if mixed else _recomputed(history, short, capacity),
        kv_usage_ratio=history.latest("kv_usage"),
        kv_usage_max_ratio=kv_usage_max,
        kv_usage_mean_ratio=kv_usage_mean,
        kv_seconds_to_full=None if mixed else _seconds_to_full(history, inside),
        kv_capacity_tokens=capacity,
        kv_capacity_is_estimate=estimate,
        kv_max_concurrency=_max_concurrency(history, facts, capacity),
        requests_running=history.latest("requests_running"),
        requests_waiting=history.latest("requests_waiting"),
        requests_deferred=history.latest("requests_deferred"),
        requests_finished_total=history.own.get("requests_finished"),
        requests_finished_per_second=rate("requests_finished", short),
        generation_tokens_per_second=rate("generation_tokens", short),
        generation_tokens_per_second_recent=level,
        prompt_tokens_per_second=rate("prompt_tokens", short),
        engine_steps_per_second=rate("engine_steps", short),
        queue_time_mean_seconds=_first_ratio(ratio, "queue_seconds", "queue_count", wider),
        inter_token_latency_mean_seconds=ratio("inter_token_seconds", "inter_token_count", short),
        time_to_first_token_mean_seconds=ratio("first_token_seconds", "first_token_count", short),
        prefix_cache_hit_ratio=_hit_ratio(history, ratio, wider),
        progress_idle_seconds=now - history.moved_at,
    )
    return _finite(signals)


def stale(signals: Signals) -> Signals:
    """What is left of signals that are too old: the own counters."""
    return Signals(
        preemptions_total=signals.preemptions_total,
        requests_finished_total=signals.requests_finished_total,
    )


def kv_capacity(history: History, engines: int) -> tuple[float | None, bool]:
    """Tokens that the KV pool of one engine holds, and whether that is an estimate.

    vLLM tells it since 0.24. Before, it is blocks times block size, without the reserved block; wrong
    for hybrid models, whose block size is that of the smallest group.
    """
    cache = history.snapshot.cache if history.snapshot else None
    if cache is None:
        return None, False
    if cache.kv_cache_size_tokens is not None:
        return float(cache.kv_cache_size_tokens), False
    if cache.num_gpu_blocks is None or cache.block_size is None:
        return None, False
    blocks = cache.num_gpu_blocks / max(1, engines) - 1
    return (blocks * cache.block_size, True) if blocks > 0 else (None, False)


def _betrays(history: History) -> bool:
    """Whether the gauges that would betray a preemption are all there."""
    return not any(
        math.isnan(history.columns[name][-1]) for name in ("requests_running", "requests_waiting", "kv_usage")
    )


def _finite(signals: Signals) -> Signals:
    """The signals without those that ran out of numbers: servers may print any, and labels too."""
    if math.isfinite(sum(filter(None, _values(signals)))):
        return signals
    values: Iterable[tuple[str, float | None]] = zip(NAMES, _values(signals), strict=True)
    gone: dict[str, Any] = {name: None for name, value in values if not math.isfinite(value or 0.0)}
    return replace(signals, **gone)


def _unknown(*_question: object) -> None:
    """The answer to any question about how far the counters of two mixed sources moved."""
    return


def _first_ratio(ratio: _Ratio, over: str, under: str, starts: tuple[int, ...]) -> float | None:
    """A mean over the first of several windows in which anything was counted."""
    for start in starts:
        mean = ratio(over, under, start)
        if mean is not None:
            return mean
    return None


def _hit_ratio(history: History, ratio: _Ratio, starts: tuple[int, ...]) -> float | None:
    """From the counters, else the gauge of old releases, over a window of their own."""
    counted = _first_ratio(ratio, "prefix_hits", "prefix_queries", starts)
    if counted is None and history.snapshot is not None:
        return history.snapshot.values.get("prefix_hit_ratio")
    return counted


def _recomputed(history: History, start: int, capacity: float | None) -> float | None:
    """Share of tokens computed again: preemptions times the mean context that a victim held.

    An upper bound where prefix caching lets a victim find its blocks again.
    """
    preemptions = history.increase("preemptions", start)
    generated = history.increase("generation_tokens", start)
    if preemptions is None or generated is None or history.span(start) <= 0:
        return None
    if preemptions == 0:
        return 0.0
    held = _mean_context(history, start, capacity)
    if held is None:
        return None
    again = preemptions * held
    computed = again + generated
    return again / computed if computed > 0 else None


def _mean_context(history: History, start: int, capacity: float | None) -> float | None:
    """Tokens that a running request holds: used tokens by running requests, else from finished lengths."""
    usage, running = history.mean("kv_usage", start), history.mean("requests_running", start)
    if capacity is not None and usage is not None and running:
        return usage * capacity / running
    prompts, outputs = history.prompt_lengths.lengths(), history.output_lengths.lengths()
    if prompts is None or outputs is None or prompts.mean is None or outputs.mean is None:
        return None
    return prompts.mean + outputs.mean / 2


def _max_concurrency(history: History, facts: Mapping[str, object], capacity: float | None) -> float | None:
    cache = history.snapshot.cache if history.snapshot else None
    if cache is not None and cache.kv_cache_max_concurrency is not None:
        return cache.kv_cache_max_concurrency
    longest = facts.get("max_model_len")
    if capacity is None or not isinstance(longest, int | float) or longest <= 0:
        return None
    return capacity / longest


def _seconds_to_full(history: History, start: int) -> float | None:
    """Seconds until the pool is full, by least squares over the window.

    Known only while something runs, from when it began to run, and while usage grows along a line
    that explains most of its variance; a swinging cache has no such time.
    """
    times, usages = _at_work(history, start)
    every = max(1, len(times) // _SLOPE_POINTS)
    first = (len(times) - 1) % every  # so that the last is among them
    times, usages = times[first::every], usages[first::every]
    n = len(times)
    if n < _SLOPE_POLLS or times[-1] - times[0] < _SLOPE_SECONDS or usages[-1] <= usages[0]:
        return None
    last = times[-1]
    ago = [t - last for t in times]  # small numbers, whose squares keep their digits
    sx, sy = sum(ago), sum(usages)
    vx = n * sum(map(mul, ago, ago)) - sx * sx
    vy = n * sum(map(mul, usages, usages)) - sy * sy
    cov = n * sum(map(mul, ago, usages)) - sx * sy
    if vx <= 0 or vy <= 0 or cov <= 0 or cov * cov < _SLOPE_FIT * vx * vy:
        return None
    seconds = (1.0 - usages[-1]) * vx / cov
    return seconds if seconds <= _SLOPE_HORIZON_SECONDS else None


def _at_work(history: History, start: int) -> tuple[Sequence[float], Sequence[float]]:
    """Times and usages since something runs; none when the last usage is unknown."""
    times, usages = history.times[start:], history.columns["kv_usage"][start:]
    running = history.columns["requests_running"][start:]
    if min(running) > 0 and sum(usages) + sum(running) >= 0:  # at work all the time, and nothing is NaN
        return times, usages
    if math.isnan(usages[-1]):
        return (), ()
    idle = [at for at, requests in enumerate(running) if not requests > 0]  # NaN too
    begin = idle[-1] + 1 if idle else 0
    known = [at for at in range(begin, len(times)) if not math.isnan(usages[at])]
    return [times[at] for at in known], [usages[at] for at in known]
