"""What a lasting queue waits for, as far as the metrics prove it. Pure."""

from typing import Final

from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.situation import Situation

# A queue is judged by its cause only while the engine works; a stand-still has verdicts of its own.
_QUEUE_IDLE_SECONDS: Final = 15.0
# A queue that waits for KV is left for another only where clearly more is free.
_BARELY: Final = 1.2
_BELOW_FULL: Final = 0.05


def _queues(s: Situation, held: bool) -> bool:
    """Whether requests have been waiting for a while, in an engine that works."""
    # Once it is there, a standstill ends it only when it is long enough for a verdict of its own.
    if s.waiting_share is None or s.idle > (s.limits.stall_after if held else _QUEUE_IDLE_SECONDS):
        return False
    if held:
        return s.waiting_share >= s.limits.queue_leave_share
    return s.waiting_share >= s.limits.queue_share and s.span >= s.limits.queue_window and bool(s.waiting)


def _is_deferred(s: Situation) -> bool:
    return (
        s.deferred_mean is not None
        and s.waiting_mean is not None
        and s.waiting_mean > 0
        and s.deferred_mean >= s.limits.deferred_share * s.waiting_mean
    )


def _seats_are_taken(s: Situation, held: bool) -> bool:
    if s.seats_share is None:
        return False
    return s.seats_share >= (s.limits.seats_share / 2 if held else s.limits.seats_share)


def _queue_evidence(s: Situation) -> tuple[Evidence, ...]:
    return some(
        ("requests_waiting", s.waiting),
        ("waiting_share", s.waiting_share, s.limits.queue_share),
        ("queue_time_mean_seconds", s.signals.queue_time_mean_seconds),
        ("kv_usage_ratio", s.signals.kv_usage_ratio),
    )


def kv_bound(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """The head of the queue does not fit into the free blocks."""
    if not _queues(s, held) or _is_deferred(s) or not (s.has_room is False or (held and _barely_room(s))):
        return None
    return _queue_evidence(s) + some(("kv_free_tokens", s.free_tokens, s.longest))


def _barely_room(s: Situation) -> bool:
    """Whether what is free is so little more than the longest prompts that it may be too little again."""
    if s.free_tokens is not None and s.longest is not None:
        return s.free_tokens < _BARELY * s.longest
    return s.kv_queue_mean is not None and s.kv_queue_mean >= s.limits.kv_full - _BELOW_FULL


def seat_bound(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """All seats are taken, by a limit that is known: a plateau of running requests proves none."""
    if not _queues(s, held) or not _seats_are_taken(s, held) or s.has_room is False:
        return None
    return some(("requests_running", s.running, s.seats)) + _queue_evidence(s)


def prefill_bound(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """Steps are full of prompt tokens while seats and KV are free."""
    if not _queues(s, held) or _is_deferred(s) or _seats_are_taken(s, held) or not s.has_room:
        return None
    evidence = _steps_are_full(s) or _only_prefill(s)
    return evidence and evidence + _queue_evidence(s)


def _steps_are_full(s: Situation) -> tuple[Evidence, ...] | None:
    """The token budget of a step is known, and used up."""
    budget = s.number("max_num_batched_tokens")
    if budget is None:
        return None
    start = s.history.start_of(s.t - s.limits.window)
    in_step = s.history.ratio("step_tokens", "engine_steps", start)
    prompts = s.history.ratio("prompt_tokens", "engine_steps", start)
    fullest = max(in_step or 0.0, prompts or 0.0)
    if fullest < s.limits.budget_share * budget:
        return None
    return some(("tokens_per_step", fullest, s.limits.budget_share * budget))


def _only_prefill(s: Situation) -> tuple[Evidence, ...] | None:
    """No step puts out a token, and KV usage grows: whatever the budget, prompts take all of it."""
    start = s.history.start_of(s.t - s.limits.queue_window)
    usage = s.history.columns["kv_usage"]
    put_out = s.history.increase("generation_tokens", start)
    if put_out != 0 or not s.running or not usage[-1] > usage[start]:
        return None
    return some(("generation_tokens", put_out, 0.0), ("kv_usage_growth", usage[-1] - usage[start], 0.0))


def deferred_wait(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """Most of the queue waits for something that is not capacity."""
    if not _queues(s, held) or not _is_deferred(s):
        return None
    return some(("requests_deferred", s.signals.requests_deferred)) + _queue_evidence(s)


def queue_not_kv(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """A queue with room in KV whose cause the metrics do not prove."""
    return _queue_evidence(s) if _queues(s, held) and s.has_room else None
