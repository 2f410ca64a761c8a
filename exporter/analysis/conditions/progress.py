"""Whether an engine has lost its progress: it hangs, or nothing gets in. Pure."""

from collections.abc import Sequence
from typing import Final

from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.situation import CRAWLING, Situation

# For so long no token came, and usage fell so often from nearly full.
_EVICTING_SECONDS: Final = 120.0
_LEAST_FALLS: Final = 2


def engine_stalled(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Requests run, and steps, tokens and KV usage have all stood still: a long prefill moves KV usage."""
    if not s.running or not _progress_is_known(s):
        return None
    if s.idle >= s.thresholds.stall_after:
        return some(
            ("progress_idle_seconds", s.idle, s.thresholds.stall_after), ("requests_running", s.running)
        )
    if not current or s.steps.crawling is None:
        return None
    return some(("engine_steps_per_second", s.steps.crawling, CRAWLING), ("requests_running", s.running))


def scheduler_deadlock(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """Nothing runs, something waits, nothing moves, for longer than the pause after a mass preemption."""
    if not _nothing_gets_in(s):
        return None
    return some(
        ("progress_idle_seconds", s.idle, s.thresholds.deadlock_after), ("requests_waiting", s.waiting)
    )


def unfittable_request(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """As a deadlock, and the configuration lets in requests that the pool can never hold."""
    capacity, longest = s.signals.kv_capacity_tokens, s.number("max_model_len")
    if capacity is None or longest is None or longest <= capacity or not _nothing_gets_in(s):
        return None
    return some(
        ("max_model_len", longest, capacity),
        ("progress_idle_seconds", s.idle, s.thresholds.deadlock_after),
        ("requests_waiting", s.waiting),
    )


def evicts_itself(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """A request fills the pool, loses its blocks and starts again, for minutes, without one token."""
    start = s.history.recent_start(_EVICTING_SECONDS)
    if s.history.increase("generation_tokens", start) != 0 or s.history.increase("requests_finished", start):
        return None
    if s.history.span(start) < _EVICTING_SECONDS or not _progress_is_known(s) or not s.busy:
        return None
    falls = _falls_from_full(s.history.columns["kv_usage"][start:], s.thresholds.kv_full)
    if falls < (1 if current else _LEAST_FALLS):
        return None
    return some(("kv_falls_from_full", float(falls), float(_LEAST_FALLS)), ("requests_running", s.running))


def _falls_from_full(usages: Sequence[float], full: float) -> int:
    """How often KV usage fell from nearly full to less than half of it."""
    falls, was_full = 0, False
    for usage in usages:
        if usage >= full:
            was_full = True
        elif was_full and usage < full / 2:
            falls, was_full = falls + 1, False
    return falls


def _nothing_gets_in(s: Situation) -> bool:
    if s.running is None or s.running > 0 or not s.waiting or not _progress_is_known(s):
        return False
    start = s.history.recent_start(s.thresholds.deadlock_after)
    stood = (
        s.history.highest("requests_running", start) == 0
        and s.history.share("requests_waiting", start, 0.5) == 1
    )
    return stood and s.idle >= s.thresholds.deadlock_after


def _progress_is_known(s: Situation) -> bool:
    values = s.history.snapshot.values if s.history.snapshot else {}
    return "generation_tokens" in values or "engine_steps" in values
