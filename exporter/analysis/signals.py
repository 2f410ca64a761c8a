"""Computes the signals of an engine: the numbers that are exported, shown and judged.

Pure. Windows are in real time, never in nominal intervals, and shrink to the available history. An unknown
signal is None, never zero.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter, mul
from typing import Any, Final

from exporter.analysis.history import REFUSED, History
from exporter.analysis.pace import computed_prompts

__all__ = ["Signals", "Windows", "compute", "mean_context", "refused", "stale"]

# The time until the cache is full is estimated from at least this many polls over this time, all with running
# requests, and only if they fit a line this well: a load that has just started fills the cache with its first
# prompts.
_SLOPE_POLLS: Final = 5
_SLOPE_SECONDS: Final = 15.0
_SLOPE_FIT: Final = 0.8
_SLOPE_HORIZON_SECONDS: Final = 86_400.0
# The most points for the fit, whatever the number of polls.
_SLOPE_POINTS: Final = 30

# Increase of one counter / that of another since a window's start.
_Ratio = Callable[[str, str, int], float | None]


@dataclass(frozen=True, slots=True)
class Windows:
    """Lengths of windows in seconds: for rates, for ratios of rare events, for means of even rarer ones."""

    short: float = 60.0
    long: float = 300.0
    longest: float = 600.0


@dataclass(frozen=True, slots=True)
class Signals:
    """The signals of one engine after one poll; None is unknown. `words.SIGNALS` describes each of them."""

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
    # The capacity is computed from blocks, which is wrong for hybrid models.
    kv_capacity_is_estimate: bool = False
    kv_max_concurrency: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    requests_deferred: float | None = None
    requests_finished_total: float | None = None
    requests_finished_per_second: float | None = None
    requests_refused_per_second: float | None = None
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
        """Return the known signals by name."""
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
    """Compute all signals after the last good poll.

    Args:
        history: of the engine, with at least one poll.
        facts: settings of the server by vLLM's flag names.
        engines: data-parallel engines that share the block count of the server.
        windows: lengths of the windows.
        level: tokens per second of this engine in calm times, from its `Baseline`.
    """
    windows = windows or Windows()
    now = history.times[-1]
    short = history.recent_start(windows.short)
    long = history.recent_start(windows.long)
    wider = (short, long, history.recent_start(windows.longest))
    mixed = history.sources.by_turns(now)
    rate = _unknown if mixed else history.rate
    ratio = _unknown if mixed else history.ratio
    capacity, estimate = kv_capacity(history, engines)
    inside = history.first_index_since(now - windows.short)
    signals = Signals(
        preemptions_total=history.own.get("preemptions"),
        preemptions_per_second=rate("preemptions", short),
        preemptions_per_finished_request=ratio("preemptions", "requests_finished", long),
        preemptions_inferred_per_second=_inferred(history, rate, short),
        recomputed_ratio=None if mixed else _recomputed(history, short, capacity),
        kv_usage_ratio=history.latest("kv_usage"),
        kv_usage_max_ratio=history.highest("kv_usage", inside),
        kv_usage_mean_ratio=history.mean("kv_usage", inside),
        kv_seconds_to_full=None if mixed else _seconds_to_full(history, inside),
        kv_capacity_tokens=capacity,
        kv_capacity_is_estimate=estimate,
        kv_max_concurrency=_max_concurrency(history, facts, capacity),
        requests_running=history.latest("requests_running"),
        requests_waiting=history.latest("requests_waiting"),
        requests_deferred=history.latest("requests_deferred"),
        requests_finished_total=history.own.get("requests_finished"),
        requests_finished_per_second=rate("requests_finished", short),
        requests_refused_per_second=_refused(history, short, engines)
        if history.refused and not mixed
        else None,
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


def refused(history: History, start: int) -> dict[str, float]:
    """Return the known requests per second that the server refused, by the limit that was reached."""
    rates = ((REFUSED[name], history.rate(name, start)) for name in history.refused)
    return {limit: rate for limit, rate in rates if rate is not None}


def _refused(history: History, start: int, engines: int) -> float | None:
    """Return an engine's share of the requests per second that its server refused."""
    rates = refused(history, start)
    return sum(rates.values()) / max(1, engines) if rates else None


def stale(signals: Signals) -> Signals:
    """Return what stays of signals that are too old: the own counters."""
    return Signals(
        preemptions_total=signals.preemptions_total,
        requests_finished_total=signals.requests_finished_total,
    )


def kv_capacity(history: History, engines: int) -> tuple[float | None, bool]:
    """Return the tokens that the KV pool of one engine holds, and whether that is an estimate.

    vLLM prints it since 0.24. For older releases it is blocks times block size, without the reserved block,
    which is wrong for hybrid models, whose block size is that of the smallest group.
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


def _inferred(history: History, rate: Callable[[str, int], float | None], start: int) -> float | None:
    """Return the rate of inferred preemptions; None while a gauge that shows them is missing."""
    gauges = ("requests_running", "requests_waiting", "kv_usage")
    if any(math.isnan(history.columns[name][-1]) for name in gauges):
        return None
    return rate("preemptions_inferred", start)


def _finite(signals: Signals) -> Signals:
    """Replace infinite signals by None: a server may print any number, also in labels."""
    if math.isfinite(sum(filter(None, _values(signals)))):
        return signals
    values: Iterable[tuple[str, float | None]] = zip(NAMES, _values(signals), strict=True)
    infinite: dict[str, Any] = {name: None for name, value in values if not math.isfinite(value or 0.0)}
    return replace(signals, **infinite)


def _unknown(*_question: object) -> None:
    """Return None: the increase of counters from mixed sources is unknown."""
    return


def _first_ratio(ratio: _Ratio, over: str, under: str, starts: tuple[int, ...]) -> float | None:
    """Return the mean over the first window in which anything was counted."""
    for start in starts:
        mean = ratio(over, under, start)
        if mean is not None:
            return mean
    return None


def _hit_ratio(history: History, ratio: _Ratio, starts: tuple[int, ...]) -> float | None:
    """Return the hit ratio from the counters, else the gauge of old releases with a window of its own."""
    counted = _first_ratio(ratio, "prefix_hits", "prefix_queries", starts)
    if counted is None and history.snapshot is not None:
        return history.snapshot.values.get("prefix_hit_ratio")
    return counted if counted is None or counted <= 1 else None


def _recomputed(history: History, start: int, capacity: float | None) -> float | None:
    """Estimate the share of the computed tokens that are computed again.

    Without a prefix cache a victim loses its context. With one it finds its blocks again, but for those that
    were overwritten while it waited for the next request to finish or to be preempted: between two of these
    the engine generates ``generated / (finished + preempted)`` tokens, and they take the victim's blocks.
    (57 simulated storms: the median of this by the true value is 0.97.)
    """
    preemptions = history.increase("preemptions", start)
    generated = history.increase("generation_tokens", start)
    if preemptions is None or generated is None or history.span(start) <= 0:
        return None
    if preemptions == 0:
        return 0.0
    lost = mean_context(history, start, capacity)
    if lost is None:
        return None
    cache = history.snapshot.cache if history.snapshot else None
    if cache is None or cache.enable_prefix_caching is not False:
        lost = min(lost, generated / (preemptions + (history.increase("requests_finished", start) or 0.0)))
    again = preemptions * lost
    computed = again + generated + (computed_prompts(history, start) or 0.0)
    return again / computed if computed > 0 else None


def mean_context(history: History, start: int, capacity: float | None) -> float | None:
    """Return the tokens per running request: used tokens / running requests, else from finished lengths."""
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
    """Return the seconds until the pool is full, by least squares over the window.

    None unless requests run and usage grows along a line that explains most of its variance: a cache whose
    usage swings has no such time.
    """
    polls = _at_work(history, start)
    every = max(1, len(polls) // _SLOPE_POINTS)
    polls = polls[(len(polls) - 1) % every :: every]  # the last is among them
    n, at, level = len(polls), history.times, history.columns["kv_usage"]
    if n < _SLOPE_POLLS or at[-1] - at[polls[0]] < _SLOPE_SECONDS or level[-1] <= level[polls[0]]:
        return None
    usages = [level[poll] for poll in polls]
    half = n // 2
    if sum(usages[half:]) * half <= sum(usages[:half]) * (n - half):
        return None  # usage does not grow: no line needs to be fitted
    last = at[-1]
    ago = [at[poll] - last for poll in polls]  # small numbers, whose squares keep their digits
    sx, sy = sum(ago), sum(usages)
    vx = n * sum(map(mul, ago, ago)) - sx * sx
    vy = n * sum(map(mul, usages, usages)) - sy * sy
    cov = n * sum(map(mul, ago, usages)) - sx * sy
    if vx <= 0 or vy <= 0 or cov <= 0 or cov * cov < _SLOPE_FIT * vx * vy:
        return None
    seconds = (1.0 - usages[-1]) * vx / cov
    return seconds if seconds <= _SLOPE_HORIZON_SECONDS else None


def _at_work(history: History, start: int) -> Sequence[int]:
    """Return the polls with a known usage since requests run; none if the last usage is unknown."""
    usages = history.columns["kv_usage"]
    if math.isnan(usages[-1]):
        return ()
    running = history.columns["requests_running"][start:]
    if not history.complete("requests_running", start) or min(running) <= 0:
        idle = [at for at, requests in enumerate(running) if not requests > 0]  # NaN too
        start += idle[-1] + 1
    polls = range(start, len(usages))
    if history.complete("kv_usage", start):
        return polls
    return [poll for poll in polls if not math.isnan(usages[poll])]
