"""Whether an engine has lost its progress: it hangs, or nothing gets in. Pure."""

from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.situation import Situation


def engine_stalled(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """Requests run, and steps, tokens and KV usage have all stood still: a long prefill moves KV usage."""
    if not s.running or not _progress_is_known(s) or s.idle < s.thresholds.stall_after:
        return None
    return some(("progress_idle_seconds", s.idle, s.thresholds.stall_after), ("requests_running", s.running))


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


def _nothing_gets_in(s: Situation) -> bool:
    if s.running is None or s.running > 0 or not s.waiting or not _progress_is_known(s):
        return False
    start = s.history.window_start(s.t - s.thresholds.deadlock_after)
    stood = (
        s.history.highest("requests_running", start) == 0
        and s.history.share("requests_waiting", start, 0.5) == 1
    )
    return stood and s.idle >= s.thresholds.deadlock_after


def _progress_is_known(s: Situation) -> bool:
    values = s.history.snapshot.values if s.history.snapshot else {}
    return "generation_tokens" in values or "engine_steps" in values
