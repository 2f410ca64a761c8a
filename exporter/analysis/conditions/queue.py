"""What a lasting queue waits for, as far as the metrics prove it. Pure.

`exporter.analysis.queue_causes` decides between the causes.
"""

import math
from typing import Final

from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.queue_causes import is_long
from exporter.analysis.situation import Situation

__all__ = [
    "TIMES_LONGEST",
    "UNFINISHED_SECONDS",
    "deferred_wait",
    "deferred_wait_is_critical",
    "is_long",
    "kv_bound",
    "nothing_finishes",
    "prefill_bound",
    "queue_not_kv",
    "seat_bound",
]

# A queue is judged by its cause only while the engine works; a stand-still has verdicts of its own.
_QUEUE_IDLE_SECONDS: Final = 6.0
# Nothing finishes when no request has for this long, or for this multiple of the longest time that any took.
UNFINISHED_SECONDS: Final = 600.0
TIMES_LONGEST: Final = 3.0


def _queues(s: Situation, current: bool, cause: str) -> bool:
    """Whether requests have been waiting for a while, for this cause, in an engine that works."""
    if s.queue_cause != cause:
        return False
    # Once it is there, a standstill ends it only when it is long enough for a verdict of its own.
    idle = s.thresholds.stall_after if current else _QUEUE_IDLE_SECONDS
    if s.queue.waiting_share is None or s.idle > idle:
        return False
    if current:
        return s.queue.waiting_share >= s.thresholds.queue_leave_share
    return (
        s.queue.waiting_share >= s.thresholds.queue_share
        and s.span >= s.thresholds.queue_window
        and bool(s.waiting and s.running)
        and not s.steps.slowing
    )


def _queue_evidence(s: Situation) -> tuple[Evidence, ...]:
    return some(
        ("requests_waiting", s.waiting),
        ("waiting_share", s.queue.waiting_share, s.thresholds.queue_share, s.thresholds.queue_leave_share),
        ("queue_time_mean_seconds", s.signals.queue_time_mean_seconds),
        ("kv_usage_ratio", s.signals.kv_usage_ratio),
    )


def kv_bound(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """The head of the queue does not fit into the free blocks."""
    if not _queues(s, current, "kv_bound"):
        return None
    needed = None if s.queue.longest_prompt is None else s.queue.longest_prompt + s.queue.overhead
    return _queue_evidence(s) + some(
        ("kv_free_tokens", s.queue.free_tokens, needed),
        ("overhead_tokens_per_request", s.queue.overhead or None),
    )


def seat_bound(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """All seats are taken, by a limit that is known: a plateau of running requests proves none."""
    if not _queues(s, current, "seat_bound"):
        return None
    return some(("requests_running", s.running, s.seats)) + _queue_evidence(s)


def prefill_bound(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Computing prompts takes the steps, so that no more are admitted."""
    if not _queues(s, current, "prefill_bound"):
        return None
    budget = s.number("max_num_batched_tokens")
    full = None if budget is None else s.thresholds.budget_share * budget
    return _queue_evidence(s) + some(("tokens_per_step", s.steps.tokens, full))


def deferred_wait(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Most of the queue waits for something that is not capacity."""
    if not _queues(s, current, "deferred_wait"):
        return None
    return some(("requests_deferred", s.signals.requests_deferred)) + _queue_evidence(s)


def deferred_wait_is_critical(s: Situation, critical: bool) -> bool:
    """Whether the queue would take longer than `drain_critical` to drain; half of that to stay critical."""
    if s.span < s.thresholds.long_window / 2:
        return False
    drained_per_second = s.long.finished / s.span
    allowed = s.thresholds.drain_critical / (2 if critical else 1)
    return (s.queue.waiting_mean or 0.0) > drained_per_second * allowed


def nothing_finishes(s: Situation, _critical: bool) -> bool:
    """Whether no request has finished for far longer than any of this engine's ever took."""
    if math.isnan(s.unfinished) or s.unfinished < UNFINISHED_SECONDS:
        return False
    longest = s.history.request_seconds.lengths()
    most = longest.quantile(1.0) if longest is not None else None
    patience = max(UNFINISHED_SECONDS, TIMES_LONGEST * (most or 0.0))
    if longest is not None and longest.count > 0 and most is None:
        return False  # some took longer than the last bound tells
    return s.unfinished >= patience


def queue_not_kv(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """A queue with room in KV whose cause the metrics do not prove."""
    return _queue_evidence(s) if _queues(s, current, "queue_not_kv") and s.queue.has_room else None
