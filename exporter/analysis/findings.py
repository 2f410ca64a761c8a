"""Facts that stand beside an engine's verdict: of its configuration, its life cycle, its data. Pure."""

from collections.abc import Callable, Mapping
from typing import Final

from exporter.analysis.history import MASS_SHARE, Fall
from exporter.analysis.situation import Situation

__all__ = ["FINDINGS", "findings"]

# Fewer than this many of the longest requests fit: one long request shuts out all others.
_FEW: Final = 2.0
# Labels that tell one capacity in two ways may differ by rounding, not by more.
_AGREE: Final = 0.1
_MASS_SHOWN_SECONDS: Final = 60.0
# After a mass preemption the counter follows the gauges within this time.
_MASS_COUNTED_SECONDS: Final = 15.0
_INFERRED_LEAST: Final = 2.0
# At least this number of requests went back, and at most this share of them may be counted as preempted.
_GIVEN_UP_LEAST: Final = 10.0
_GIVEN_UP_COUNTED: Final = 0.3
_OOM_KV: Final = 0.5


def findings(situation: Situation) -> tuple[str, ...]:
    """All findings that hold, in the order of the table."""
    return tuple(name for name, holds in FINDINGS.items() if holds(situation))


def _kv_too_small(s: Situation) -> bool:
    concurrency = s.signals.kv_max_concurrency
    capacity, longest = s.signals.kv_capacity_tokens, s.number("max_model_len")
    if capacity is not None and longest is not None:
        return capacity / longest < _FEW
    return concurrency is not None and concurrency < _FEW


def _max_model_len_exceeds_pool(s: Situation) -> bool:
    capacity, longest = s.signals.kv_capacity_tokens, s.number("max_model_len")
    return capacity is not None and longest is not None and longest > capacity


def _capacity_labels_disagree(s: Situation) -> bool:
    cache = s.history.snapshot.cache if s.history.snapshot else None
    longest = s.number("max_model_len")
    if (
        cache is None
        or cache.kv_cache_size_tokens is None
        or cache.kv_cache_max_concurrency is None
        or not longest
    ):
        return False
    told = cache.kv_cache_max_concurrency * longest
    return abs(told - cache.kv_cache_size_tokens) > _AGREE * cache.kv_cache_size_tokens


def _speculation_enlarges_kv(s: Situation) -> bool:
    drafted = s.history.snapshot.values.get("draft_tokens") if s.history.snapshot else None
    return bool(drafted) or bool(s.number("num_speculative_tokens"))


def _prefix_cache_off(s: Situation) -> bool:
    cache = s.history.snapshot.cache if s.history.snapshot else None
    told = cache.enable_prefix_caching if cache is not None else None
    return (s.server_facts.get("enable_prefix_caching") if told is None else told) is False


def _restarted(s: Situation) -> bool:
    restart = s.history.restart
    if restart is None or s.history.sources.by_turns(s.t):  # then it was no restart
        return False
    return s.t - restart.at <= s.thresholds.restart_shown


def _suspect_out_of_memory(s: Situation) -> bool:
    """The process went away under load, with next to no memory left outside the KV cache."""
    restart = s.history.restart
    used = s.number("gpu_memory_utilization")
    if restart is None or used is None or not _restarted(s):
        return False
    loaded = (restart.kv_usage_max or 0.0) >= _OOM_KV and (restart.running or 0.0) > 0
    return loaded and used >= s.thresholds.oom_utilization


def _was_preemption(s: Situation, fall: Fall) -> bool:
    """Whether the cache was full before, or the counter confirms it; clients that retry look the same."""
    least = MASS_SHARE * fall.requests
    if fall.inferred >= least:
        return True
    counted = s.history.columns["preemptions"]
    return counted[s.history.window_start(fall.at + _MASS_COUNTED_SECONDS)] - fall.counted >= least


def _clients_give_up(s: Situation) -> bool:
    """Requests went back to waiting, more than the counter of preemptions explains once it had the time."""
    columns = s.history.columns["requests_returned"]
    if columns[-1] < _GIVEN_UP_LEAST:
        return False
    begin = s.history.recent_start(s.thresholds.long_window)
    counted = s.history.increase("preemptions", begin)
    if counted is None:
        return False
    end = s.history.recent_start(_MASS_COUNTED_SECONDS)
    returned = columns[max(begin, end)] - columns[begin]
    return returned >= _GIVEN_UP_LEAST and counted < _GIVEN_UP_COUNTED * returned


def _stale_gauges(s: Situation) -> bool:
    """The gauges show work or held blocks, and nothing at all has changed for a while."""
    after = s.thresholds.stall_after
    held = (s.signals.kv_usage_ratio or 0.0) >= s.thresholds.held_kv
    if held and not s.running and not s.waiting:
        after += s.number("kv_lease_seconds") or 0.0  # held on purpose, until then
    if s.idle < after or not (s.running or held):
        return False
    after = s.thresholds.stall_after
    start = s.history.recent_start(after)
    if s.history.span(start) < after:
        return False
    return all(
        len(set(s.history.columns[name][start:])) == 1
        for name in ("requests_running", "requests_waiting", "kv_usage")
    )


FINDINGS: Final[Mapping[str, Callable[[Situation], bool]]] = {
    # First, because it has an alert, and only the first two are exported.
    "requests_refused": lambda s: bool(s.signals.requests_refused_per_second),
    "restarted": _restarted,
    "suspect_out_of_memory": _suspect_out_of_memory,
    # Within the last minute most of the running requests went back to waiting between two polls.
    "mass_preemption": lambda s: any(
        s.t - fall.at <= _MASS_SHOWN_SECONDS and _was_preemption(s, fall) for fall in s.history.falls
    ),
    "preemption_inferred": lambda s: s.inferred >= _INFERRED_LEAST,
    "clients_give_up": _clients_give_up,
    "stale_gauges": _stale_gauges,
    "max_model_len_exceeds_pool": _max_model_len_exceeds_pool,
    "kv_too_small": _kv_too_small,
    "capacity_labels_disagree": _capacity_labels_disagree,
    "capacity_is_estimate": lambda s: (
        s.signals.kv_capacity_tokens is not None and s.signals.kv_capacity_is_estimate
    ),
    "speculation_enlarges_kv": _speculation_enlarges_kv,
    "prefix_cache_off": _prefix_cache_off,
    "duplicate_series": lambda s: bool(s.history.snapshot and s.history.snapshot.duplicates),
}
