"""What may become a shortage, and what only looks like one. Pure."""

from typing import Final

from exporter.analysis.baseline import Pace
from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.median import median
from exporter.analysis.situation import Situation, uncounted

# So many slices in a row are slow, of those of the last minutes whose load was seen before.
_SLOW_SLICES: Final = 4
_SLOW_SPAN: Final = 120.0
# Steps this many times longer than the load explains are another engine's; left below the second.
_MUCH_SLOWER: Final = 3.0
_MUCH_SLOWER_LEAVE: Final = 1.5
_NEARLY_STOPPED: Final = 10.0
# Blocks are filled before tokens are counted; beyond this factor it is not that.
_UNCOUNTED: Final = 2.0
_PRESSURE_SPAN: Final = 15.0
# Near the top a ripple of half a per cent reads as seconds to full; a climb moves more than that.
_PRESSURE_RISE: Final = 0.01


def kv_pressure_rising(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """The cache will be full within minutes."""
    seconds, usage = s.signals.kv_seconds_to_full, s.signals.kv_usage_ratio
    if seconds is None or usage is None or s.span < _PRESSURE_SPAN:
        return None
    horizon, ends = s.thresholds.pressure_horizon, 1.5 * s.thresholds.pressure_horizon
    if seconds > (ends if current else horizon) or usage < s.thresholds.pressure_kv:
        return None
    then = s.history.columns["kv_usage"][s.history.recent_start(s.thresholds.window)]
    if usage - then < _PRESSURE_RISE / (2 if current else 1) or _grows_by_prompt(s):
        return None
    return some(("kv_seconds_to_full", seconds, horizon, ends), ("kv_usage_ratio", usage))


def _grows_by_prompt(s: Situation) -> bool:
    """Whether most of the growth is a prompt that is being computed, which ends with the prompt."""
    start = s.history.recent_start(s.thresholds.window)
    return uncounted(s.history, start, s.signals.kv_capacity_tokens)[1]


def kv_held_no_requests(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """Blocks stay in use with nothing running or waiting, beyond the lease that may explain it."""
    after = s.thresholds.held_after + (s.number("kv_lease_seconds") or 0.0)
    since = s.t - s.history.worked_at
    if since < after or s.running != 0 or s.waiting != 0:
        return None
    start = s.history.recent_start(s.thresholds.held_after)
    if s.history.share("kv_usage", start, s.thresholds.held_kv) != 1:
        return None
    return some(
        ("kv_usage_ratio", s.signals.kv_usage_ratio, s.thresholds.held_kv),
        ("seconds_without_requests", since, after),
    )


def decode_slow(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Each step takes longer than this engine's steps did at about this load."""
    usage = s.queue.kv_usage_mean
    if usage is None or usage >= s.thresholds.kv_full or not s.busy:
        return None
    if s.steps.computes_prompt and not current:
        return None
    capacity = s.signals.kv_capacity_tokens
    paces = [each for each in s.baseline.paces(s.t - _SLOW_SPAN) if not _computed_prompt(each, capacity)]
    enters, ends = s.thresholds.slow_factor, 1 + (s.thresholds.slow_factor - 1) / 2
    factor = ends if current else enters
    if len(paces) < _SLOW_SLICES or median(each.factor for each in paces) < factor:
        return None
    if not current and any(each.factor < factor for each in paces[-_SLOW_SLICES:]):
        return None
    last = paces[-1]
    return some(
        ("inter_token_latency_mean_seconds", last.seconds, enters * last.normal, ends * last.normal),
        ("requests_running", s.running),
    )


def _computed_prompt(pace: Pace, capacity: float | None) -> bool:
    """Whether KV grew by more than was counted: then a prompt took the steps of the answers."""
    grown = pace.kv_growth > 0 if capacity is None else pace.kv_growth * capacity > _UNCOUNTED * pace.counted
    return grown and (capacity is not None or pace.counted == 0)


def decode_much_slower(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Each step takes several times longer than this engine's steps ever did, and no prompt explains it."""
    if not s.busy:
        return None
    crawl = _crawl_factor(s, current)
    if crawl >= (_MUCH_SLOWER_LEAVE if current else _NEARLY_STOPPED):
        return some(
            ("step_time_factor", crawl, _NEARLY_STOPPED, _MUCH_SLOWER_LEAVE), ("requests_running", s.running)
        )
    if not current and (s.steps.burst_factor or 0.0) < _MUCH_SLOWER:
        return None  # the factor is the smallest of several, of which this is one
    factor = s.steps.slow_factor
    if s.steps.computes_prompt:
        return None
    if factor is None:  # no step to look at: nothing has changed
        return some(("progress_idle_seconds", s.idle)) if current else None
    # Steps may wait for the transfers of deferred requests.
    times = 2 if (s.queue.deferred_mean or 0.0) > (s.running or 0.0) else 1
    if factor < times * (_MUCH_SLOWER_LEAVE if current else _MUCH_SLOWER):
        return None
    limits = times * _MUCH_SLOWER, times * _MUCH_SLOWER_LEAVE
    return some(("step_time_factor", factor, *limits), ("requests_running", s.running))


def decode_slow_is_critical(s: Situation, critical: bool) -> bool:
    """Whether the engine has nearly stopped, and no normal pace was seen since."""
    crawl = _crawl_factor(s, critical)
    if critical and (crawl >= _MUCH_SLOWER_LEAVE or s.steps.crawling is not None):
        return True
    least = _NEARLY_STOPPED / (2 if critical else 1)
    return max(s.steps.slow_factor or 0.0, s.steps.idle_factor or 0.0, crawl) >= least


def _crawl_factor(s: Situation, current: bool) -> float:
    """How many times the longest step this engine's last ones took, of which there may be one a minute."""
    if current:
        return s.steps.crawl_factor(2 * s.thresholds.burst_window)
    return s.steps.crawl_factor(s.thresholds.stall_after) if s.steps.rare else 0.0


def runaway_generation(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """Very long answers: tokens flow, nothing finishes, nothing waits."""
    after = s.thresholds.runaway_after
    if s.unfinished < after or s.waiting:
        return None
    start = s.history.recent_start(after)
    running = s.history.mean("requests_running", start)
    generated = s.history.increase("generation_tokens", start)
    finished = s.history.increase("requests_finished", start)
    if not running or generated is None or finished is None or s.history.span(start) < after:
        return None
    busy = s.history.share("requests_running", start, 0.5) == 1
    if not busy or finished > 0 or generated < s.thresholds.runaway_tokens * running:
        return None
    return some(
        ("tokens_per_running_request", generated / running, s.thresholds.runaway_tokens),
        ("generation_tokens_per_second", s.signals.generation_tokens_per_second),
    )


def kv_full_ok(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """A cache that is full with work getting done."""
    mean = s.signals.kv_usage_mean_ratio
    full, ends = s.thresholds.kv_full, s.thresholds.kv_full - 0.05
    if mean is None or mean < (ends if current else full) or not s.busy or s.span < s.thresholds.queue_window:
        return None
    return some(("kv_usage_mean_ratio", mean, full, ends))
