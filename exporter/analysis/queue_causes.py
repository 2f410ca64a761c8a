"""Which verdict explains most of the waiting of the last minutes: the queue's cause, without swinging.

Pure. The scheduler admits the head of the queue until all seats are taken, until the step's tokens are used
up, or until the head does not fit into the free KV blocks; requests that wait for something else are aside.
So each poll with a queue has a cause, and the polls of the last minutes vote by the requests that waited.
"""

import math
from typing import Final

from exporter.analysis.situation import Situation

__all__ = [
    "QueueCauses",
    "cause_of_waiting",
    "deferred_holds_the_pool",
    "is_compute_bound",
    "is_long",
    "steps_are_full",
    "waiting_holds_blocks",
    "waiting_holds_seats",
]

# A vote counts half after this time.
_HALF_LIFE_SECONDS: Final = 40.0
_FORGOTTEN: Final = 0.01
# The present cause gives way to one with this many times its votes.
_TAKE_OVER: Final = 1.5
# Steps with less than this share of the budget leave room for the head of the queue.
_FAR_FROM_FULL: Final = 0.5
# The smallest budget that vLLM sets by itself.
_LEAST_BUDGET: Final = 2048.0
# Seats are all taken from this share on; blocks are held by others beyond this factor of the usual.
_ALMOST: Final = 0.95
_MOST_HELD: Final = 3.0
# A queue of at least this share of what runs keeps requests waiting for a good part of their time.
_LONG: Final = 1 / 3
# Waiting for an adapter or a connector takes at least this share of the time that requests run.
_DEFERRED_LONG: Final = 0.1
# The number of requests is steady where it changes by less than this share of those that finish.
_STEADY: Final = 0.1
# Prompts that take less than this share of the steps are not what limits.
_LEAST_PROMPTS: Final = 0.3
# Causes are compared by what this many times as much of each would give.
_TIMES: Final = 4.0
# A pool this full beside preemptions is what limits, even with all seats taken.
_KV_TIGHT: Final = 0.95
# Preemptions per finished request, as a share of those of a storm, that show a pool too small for its load.
_MANY: Final = 0.25
# A pool of which less is used, because the head does not fit, is too small for its prompts.
_KV_WASTED: Final = 0.6
# A pool this full all the time limits, whatever the head of the queue needs.
_KV_FULL: Final = 0.97


class QueueCauses:
    """Collects the votes for each cause."""

    __slots__ = ("_at", "_leading", "_votes")

    def __init__(self) -> None:
        self._votes: dict[str, float] = {}
        self._leading: str | None = None
        self._at = math.nan

    def observe(self, s: Situation) -> str | None:
        """Add the vote of the last poll and return the cause that leads; None without a queue so far."""
        seconds = s.t - self._at if s.t > self._at else 0.0
        self._at = s.t
        fade = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        votes = {name: vote * fade for name, vote in self._votes.items() if vote * fade > _FORGOTTEN}
        cause = cause_of_waiting(s)
        if cause is not None:
            votes[cause] = votes.get(cause, 0.0) + max(seconds, 1e-3) * (s.queue.waiting_mean or 0.0)
        self._votes = votes
        first = max(votes, key=lambda name: votes[name], default=None)
        held = 0.0 if self._leading is None else votes.get(self._leading, 0.0)
        if first is None or votes[first] > _TAKE_OVER * held:
            self._leading = first
        return self._leading


def is_long(s: Situation) -> bool:
    """Whether requests wait for a good part of the time that they are served, by Little's law."""
    running, waiting, share = s.queue.running_mean, s.queue.waiting_mean, s.queue.waiting_share
    if running is None or waiting is None or share is None or share < s.thresholds.queue_share:
        return False
    return waiting >= max(1.0, _LONG * running)


def waiting_holds_seats(s: Situation) -> bool:
    """Whether requests that wait for something else hold seats: with those that run all are taken."""
    running, deferred = s.queue.running_mean, s.queue.deferred_mean
    if s.seats is None or running is None or not deferred:
        return False
    return deferred >= running and _ALMOST * s.seats <= running + deferred <= s.seats + 1


def waiting_holds_blocks(s: Situation) -> bool:
    """Whether requests that do not run hold most of the used blocks: too many for what runs."""
    running, usage = s.queue.running_mean, s.queue.kv_usage_mean
    if running is None or usage is None or usage < s.thresholds.held_kv or not s.queue.waiting_mean:
        return False
    usual = s.pace.usual_used_per_request
    if running == 0:
        start = s.history.recent_start(s.thresholds.queue_window)
        return s.history.increase("generation_tokens", start) == 0
    return usual is not None and usage > _MOST_HELD * usual * running


def cause_of_waiting(s: Situation) -> str | None:
    """Return what the queue of the last seconds waits for; None without one."""
    if not s.waiting or not s.queue.waiting_mean:
        return None
    if _is_deferred(s):
        return "deferred_wait" if _deferred_is_long(s) else None
    cause = _limit_of_running(s)
    return "prefill_bound" if cause != "prefill_bound" and is_compute_bound(s, cause) else cause


def _limit_of_running(s: Situation) -> str:
    """Return what keeps the head of the queue from being admitted."""
    if _seats_are_taken(s):
        kv_is_tight = s.queue.kv_usage_mean is not None and s.queue.kv_usage_mean >= _KV_TIGHT
        return "kv_bound" if s.minute.counted > 0 and kv_is_tight else "seat_bound"
    if steps_are_full(s):
        return "prefill_bound"
    if s.queue.has_room is False or (s.queue.kv_usage_mean or 0.0) >= _KV_FULL or _preempts(s):
        return "kv_bound"
    return _by_elimination(s) or "queue_not_kv"


def _preempts(s: Situation) -> bool:
    """Whether preemptions are many per finished request: the pool is full again and again."""
    return s.minute.counted > 1 and s.minute.counted >= _MANY * s.thresholds.thrash_ratio * s.minute.finished


def _is_deferred(s: Situation) -> bool:
    deferred, waiting = s.queue.deferred_mean, s.queue.waiting_mean
    return (
        deferred is not None and bool(waiting) and deferred >= s.thresholds.deferred_share * (waiting or 0.0)
    )


def _deferred_is_long(s: Situation) -> bool:
    """Whether that takes a good part of the time that requests run, by Little's law: a fast load does not."""
    deferred, running = s.queue.deferred_mean or 0.0, s.queue.running_mean or 0.0
    return deferred >= _DEFERRED_LONG * running


def deferred_holds_the_pool(s: Situation) -> bool:
    """Whether more requests wait for a connector, with blocks held for their prompts, than run."""
    deferred, running = s.queue.deferred_mean or 0.0, s.queue.running_mean or 0.0
    return deferred >= max(1.0, running)


def _seats_are_taken(s: Situation) -> bool:
    """Whether running reached the known limit, and stays there but for one."""
    if s.seats is None or s.queue.running_most is None or s.queue.running_most < s.seats:
        return False
    return s.queue.seats_share is not None and s.queue.seats_share >= s.thresholds.seats_share


def is_compute_bound(s: Situation, limit: str = "kv_bound") -> bool:
    """Whether faster prompts would help more than a higher limit of the requests that run.

    With `k` times the requests a step takes `1 - a + (k - 1) w` times as long, where `w` is the share of it
    that grows with its work and `a` that of contexts computed again, which ends: it does `k` times as much
    in it. With prompts `n` times as fast, which take the share `p` of it, a step takes `1 - p + p / n` times
    as long. Where clients wait for their answers, no speed shortens the queue: only a higher limit does.
    """
    prompts, waiting = s.steps.prompt_share, s.queue.waiting_mean
    running = s.queue.running_mean
    if prompts is None or prompts < _LEAST_PROMPTS or not running or waiting is None or _is_kept_empty(s):
        return False
    again = s.steps.again_share if limit == "kv_bound" else 0.0
    work = max(prompts, (s.steps.work_share or 0.0) - again)
    k = _room_to_grow(s, limit, running)
    absorbed = 0.0
    if _as_many_come_as_finish(s):
        absorbed = min(waiting, (k - 1) * running) / (waiting + running)
        k = min(k, 1 + waiting / running)
    more, faster = k / (1 - again + (k - 1) * work), 1 / (1 - prompts + prompts / _TIMES)
    return faster - more > absorbed * max(faster, more)


def _is_kept_empty(s: Situation) -> bool:
    """Whether the head of the queue is so long that much of the pool stays free for it."""
    usage = s.queue.kv_usage_mean
    return s.queue.has_room is False and usage is not None and usage < _KV_WASTED


def _room_to_grow(s: Situation, limit: str, running: float) -> float:
    """Return how many times as many requests could run if only this limit were higher.

    More blocks help until the seats are taken, more seats until the pool is full.
    """
    if limit == "seat_bound":
        return min(_TIMES, 1 / max(s.queue.kv_usage_mean or 0.0, 1 / _TIMES))
    return _TIMES if s.seats is None else min(_TIMES, max(1.0, s.seats / running))


def _as_many_come_as_finish(s: Situation) -> bool:
    """Whether the number of requests hardly changes: clients wait for answers before they send again."""
    start = s.history.recent_start(s.thresholds.window)
    running, waiting = (s.history.columns[name] for name in ("requests_running", "requests_waiting"))
    change = running[-1] + waiting[-1] - running[start] - waiting[start]
    return abs(change) < _STEADY * max(1.0, s.minute.finished)


def steps_are_full(s: Situation) -> bool:
    """Whether prompts take the steps: their token budget or, while no token is generated, all their time."""
    budget = s.number("max_num_batched_tokens")
    tokens = s.steps.tokens
    if budget is not None and tokens is not None and tokens >= s.thresholds.budget_share * budget:
        return True
    return _only_prompts(s)


def _only_prompts(s: Situation) -> bool:
    """Whether no step generates a token while KV usage grows."""
    start = s.history.recent_start(s.thresholds.queue_window)
    usage = s.history.columns["kv_usage"]
    generated = s.history.increase("generation_tokens", start)
    return generated == 0 and bool(s.running) and usage[-1] > usage[start]


def _by_elimination(s: Situation) -> str | None:
    """What is left where vLLM says that most of the queue waits for capacity, and seats are free.

    The tokens of a step and the blocks of the pool remain; steps that are far from full leave the blocks.
    """
    if s.queue.deferred_mean is None or s.seats is None or s.queue.running_most is None:
        return None
    if s.queue.running_most >= s.seats or s.steps.tokens is None:
        return None
    budget = s.number("max_num_batched_tokens") or _LEAST_BUDGET
    if s.steps.tokens < _FAR_FROM_FULL * budget and not s.steps.computes_prompt:
        return "kv_bound"
    return "prefill_bound" if s.queue.has_room else None
