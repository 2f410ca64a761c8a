"""What a lasting queue waits for, as far as the metrics prove it. Pure."""

from typing import Final

from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.situation import Situation

# A queue is judged by its cause only while the engine works; a stand-still has verdicts of its own.
_QUEUE_IDLE_SECONDS: Final = 15.0
# A queue that waits for KV is left for another only where clearly more is free.
_BARELY: Final = 1.2
_BELOW_FULL: Final = 0.05


def _queues(s: Situation, current: bool) -> bool:
    """Whether requests have been waiting for a while, in an engine that works."""
    # Once it is there, a standstill ends it only when it is long enough for a verdict of its own.
    if s.queue.waiting_share is None or s.idle > (
        s.thresholds.stall_after if current else _QUEUE_IDLE_SECONDS
    ):
        return False
    if current:
        return s.queue.waiting_share >= s.thresholds.queue_leave_share
    return (
        s.queue.waiting_share >= s.thresholds.queue_share
        and s.span >= s.thresholds.queue_window
        and bool(s.waiting)
    )


def _is_deferred(s: Situation) -> bool:
    return (
        s.queue.deferred_mean is not None
        and s.queue.waiting_mean is not None
        and s.queue.waiting_mean > 0
        and s.queue.deferred_mean >= s.thresholds.deferred_share * s.queue.waiting_mean
    )


def _seats_are_taken(s: Situation, current: bool) -> bool:
    if s.queue.seats_share is None:
        return False
    return s.queue.seats_share >= (s.thresholds.seats_share / 2 if current else s.thresholds.seats_share)


def _queue_evidence(s: Situation) -> tuple[Evidence, ...]:
    return some(
        ("requests_waiting", s.waiting),
        ("waiting_share", s.queue.waiting_share, s.thresholds.queue_share),
        ("queue_time_mean_seconds", s.signals.queue_time_mean_seconds),
        ("kv_usage_ratio", s.signals.kv_usage_ratio),
    )


def kv_bound(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """The head of the queue does not fit into the free blocks."""
    if (
        not _queues(s, current)
        or _is_deferred(s)
        or not (s.queue.has_room is False or (current and _barely_room(s)))
    ):
        return None
    return _queue_evidence(s) + some(("kv_free_tokens", s.queue.free_tokens, s.queue.longest_prompt))


def _barely_room(s: Situation) -> bool:
    """Whether what is free is so little more than the longest prompts that it may be too little again."""
    if s.queue.free_tokens is not None and s.queue.longest_prompt is not None:
        return s.queue.free_tokens < _BARELY * s.queue.longest_prompt
    return s.queue.kv_usage_mean is not None and s.queue.kv_usage_mean >= s.thresholds.kv_full - _BELOW_FULL


def seat_bound(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """All seats are taken, by a limit that is known: a plateau of running requests proves none."""
    if not _queues(s, current) or not _seats_are_taken(s, current) or s.queue.has_room is False:
        return None
    return some(("requests_running", s.running, s.seats)) + _queue_evidence(s)


def prefill_bound(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Steps are full of prompt tokens while seats and KV are free."""
    if not _queues(s, current) or _is_deferred(s) or _seats_are_taken(s, current) or not s.queue.has_room:
        return None
    evidence = _steps_are_full(s) or _only_prefill(s)
    return evidence and evidence + _queue_evidence(s)


def _steps_are_full(s: Situation) -> tuple[Evidence, ...] | None:
    """The token budget of a step is known, and used up."""
    budget = s.number("max_num_batched_tokens")
    if budget is None:
        return None
    start = s.history.window_start(s.t - s.thresholds.window)
    in_step = s.history.ratio("step_tokens", "engine_steps", start)
    prompts = s.history.ratio("prompt_tokens", "engine_steps", start)
    fullest = max(in_step or 0.0, prompts or 0.0)
    if fullest < s.thresholds.budget_share * budget:
        return None
    return some(("tokens_per_step", fullest, s.thresholds.budget_share * budget))


def _only_prefill(s: Situation) -> tuple[Evidence, ...] | None:
    """No step puts out a token, and KV usage grows: whatever the budget, prompts take all of it."""
    start = s.history.window_start(s.t - s.thresholds.queue_window)
    usage = s.history.columns["kv_usage"]
    put_out = s.history.increase("generation_tokens", start)
    if put_out != 0 or not s.running or not usage[-1] > usage[start]:
        return None
    return some(("generation_tokens", put_out, 0.0), ("kv_usage_growth", usage[-1] - usage[start], 0.0))


def deferred_wait(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Most of the queue waits for something that is not capacity."""
    if not _queues(s, current) or not _is_deferred(s):
        return None
    return some(("requests_deferred", s.signals.requests_deferred)) + _queue_evidence(s)


def deferred_wait_is_critical(s: Situation, critical: bool) -> bool:
    """Whether the queue would take longer than `drain_critical` to drain; half of that to stay critical."""
    if s.span < s.thresholds.long_window / 2:
        return False
    drained_per_second = s.long.finished / s.span
    allowed = s.thresholds.drain_critical / (2 if critical else 1)
    return (s.queue.waiting_mean or 0.0) > drained_per_second * allowed


def queue_not_kv(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """A queue with room in KV whose cause the metrics do not prove."""
    return _queue_evidence(s) if _queues(s, current) and s.queue.has_room else None
