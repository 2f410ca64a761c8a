"""What may become a shortage, and what only looks like one. Pure."""

from typing import Final

from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.median import median
from exporter.analysis.situation import Situation

# So many slices in a row are slow, of those of the last minutes whose load was seen before.
_SLOW_SLICES: Final = 4
_SLOW_SPAN: Final = 120.0
_PRESSURE_SPAN: Final = 15.0
# Blocks are filled before tokens are counted; beyond this factor it is not that.
_UNCOUNTED: Final = 2.0
# Near the top a ripple of half a per cent reads as seconds to full; a climb moves more than that.
_PRESSURE_RISE: Final = 0.01


def kv_pressure_rising(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """The cache will be full within minutes."""
    seconds, usage = s.signals.kv_seconds_to_full, s.signals.kv_usage_ratio
    if seconds is None or usage is None or s.span < _PRESSURE_SPAN:
        return None
    horizon = s.thresholds.pressure_horizon * (1.5 if current else 1.0)
    if seconds > horizon or usage < s.thresholds.pressure_kv:
        return None
    then = s.history.columns["kv_usage"][s.history.window_start(s.t - s.thresholds.window)]
    if usage - then < _PRESSURE_RISE / (2 if current else 1) or _grows_by_prefill(s, usage - then):
        return None
    return some(("kv_seconds_to_full", seconds, horizon), ("kv_usage_ratio", usage))


def _grows_by_prefill(s: Situation, growth: float) -> bool:
    """Whether most of the growth is a prompt that is being computed, which ends with the prompt.

    A prompt is counted with its first output; what grows beyond all that was counted is not done yet.
    """
    start = s.history.window_start(s.t - s.thresholds.window)
    counted = [s.history.increase(name, start) for name in ("generation_tokens", "prompt_tokens")]
    if None in counted:
        return False
    tokens = sum(filter(None, counted))
    capacity = s.signals.kv_capacity_tokens
    return tokens == 0 or (capacity is not None and growth * capacity > _UNCOUNTED * tokens)


def kv_held_no_requests(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """Blocks stay in use with nothing running or waiting, beyond the lease that may explain it."""
    after = s.thresholds.held_after + (s.number("kv_lease_seconds") or 0.0)
    since = s.t - s.history.worked_at
    if since < after or s.running != 0 or s.waiting != 0:
        return None
    start = s.history.window_start(s.t - s.thresholds.held_after)
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
    paces = s.baseline.paces(s.t - _SLOW_SPAN)
    factor = 1 + (s.thresholds.slow_factor - 1) / (2 if current else 1)
    if len(paces) < _SLOW_SLICES or median(each.factor for each in paces) < factor:
        return None
    if not current and any(each.factor < factor for each in paces[-_SLOW_SLICES:]):
        return None
    last = paces[-1]
    return some(
        ("inter_token_latency_mean_seconds", last.seconds, factor * last.normal),
        ("requests_running", s.running),
    )


def runaway_generation(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """Very long answers: tokens flow, nothing finishes, nothing waits."""
    after = s.thresholds.runaway_after
    start = s.history.window_start(s.t - after)
    running = s.history.mean("requests_running", start)
    generated = s.history.increase("generation_tokens", start)
    finished = s.history.increase("requests_finished", start)
    if not running or generated is None or finished is None or s.history.span(start) < after:
        return None
    busy = s.history.share("requests_running", start, 0.5) == 1
    if not busy or finished > 0 or s.waiting or generated < s.thresholds.runaway_tokens * running:
        return None
    return some(
        ("tokens_per_running_request", generated / running, s.thresholds.runaway_tokens),
        ("generation_tokens_per_second", s.signals.generation_tokens_per_second),
    )


def kv_full_ok(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """A cache that is full with work getting done."""
    mean = s.signals.kv_usage_mean_ratio
    full = s.thresholds.kv_full - (0.05 if current else 0.0)
    if mean is None or mean < full or not s.busy or s.span < s.thresholds.queue_window:
        return None
    return some(("kv_usage_mean_ratio", mean, full))
