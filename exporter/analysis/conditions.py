"""When a verdict holds: one function per verdict, each with its evidence.

Pure. A function gets the situation and whether its verdict is the present one (`held`), for which the
threshold of leaving counts instead of that of entering. It returns the evidence, or None where the
verdict does not hold or cannot be known to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from exporter.analysis.situation import Situation

__all__ = ["CONDITIONS", "Condition", "Evidence"]

# What a verdict needs to be judged at all.
NEEDED: Final = ("requests_running", "requests_waiting", "kv_usage")
# A queue is judged by its cause only while the engine works; a stand-still has verdicts of its own.
_QUEUE_IDLE_SECONDS: Final = 15.0
# Fewer finished requests than this say little about a ratio.
_LEAST_FINISHED: Final = 3
# Preemptions that recompute this share of all tokens are a storm even where nothing else is known.
_RECOMPUTED_STORM: Final = 0.8
_STORM_PREEMPTED: Final = 10
# At most so many in the long window come one by one.
_ONE_BY_ONE: Final = 6
# So many slices in a row are slow, of those of the last minutes whose load was seen before.
_SLOW_SLICES: Final = 4
_SLOW_SPAN: Final = 120.0
_PRESSURE_SPAN: Final = 15.0
# Blocks are filled before tokens are counted; beyond this factor it is not that.
_UNCOUNTED: Final = 2.0
# A queue that waits for KV is left for another only where clearly more is free.
_BARELY: Final = 1.2
_BELOW_FULL: Final = 0.05
# Near the top a ripple of half a per cent reads as seconds to full; a climb moves more than that.
_PRESSURE_RISE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that speaks for a verdict.

    Attributes:
        signal: what it is, in the words of the signals where there is one.
        value: what was seen.
        threshold: what it was held against, None where it is a fact beside.
    """

    signal: str
    value: float
    threshold: float | None = None


Condition = Callable[[Situation, bool], "tuple[Evidence, ...] | None"]


def _some(
    *evidence: tuple[str, float | None] | tuple[str, float | None, float | None],
) -> tuple[Evidence, ...]:
    """Evidence, without what is unknown."""
    return tuple(Evidence(name, value, *rest) for name, value, *rest in evidence if value is not None)


# Life cycle and data.


def sleeping(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    values = s.history.snapshot.values if s.history.snapshot else {}
    for reading in ("sleep_weights_offloaded", "sleep_discard_all"):
        if values.get(reading) == 1:
            return _some((reading, 1.0))
    return None


def metrics_missing(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """A gauge that a verdict needs is not there.

    With several API processes the gauges appear with the first request: before it nothing is missing.
    """
    snapshot = s.history.snapshot
    if snapshot is None:
        return None
    there = [name for name in NEEDED if name in snapshot.values or name in snapshot.untrusted]
    if len(there) == len(NEEDED):
        return None
    seen = any(name in s.history.seen for name in NEEDED)
    worked = any(
        snapshot.values.get(name) for name in ("prompt_tokens", "generation_tokens", "requests_finished")
    )
    if not seen and not worked:
        return None
    return _some(*((name, 0.0, 1.0) for name in NEEDED if name not in there))


def data_untrusted(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """A value that cannot be true, or two sources that answer by turns."""
    if s.history.sources.by_turns(s.t):
        return _some(("sources_by_turns", 1.0))
    untrusted = s.history.snapshot.untrusted if s.history.snapshot else {}
    bad = [name for name in (*NEEDED, "requests_deferred") if name in untrusted]
    return _some(*((name, 0.0) for name in bad)) if bad else None


# Lost progress.


def engine_stalled(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """Requests run, and steps, tokens and KV usage have all stood still: a long prefill moves KV usage."""
    if not s.running or not _progress_is_known(s) or s.idle < s.limits.stall_after:
        return None
    return _some(("progress_idle_seconds", s.idle, s.limits.stall_after), ("requests_running", s.running))


def scheduler_deadlock(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """Nothing runs, something waits, nothing moves, for longer than the pause after a mass preemption."""
    if not _nothing_gets_in(s):
        return None
    return _some(("progress_idle_seconds", s.idle, s.limits.deadlock_after), ("requests_waiting", s.waiting))


def unfittable_request(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """As a deadlock, and the configuration lets in requests that the pool can never hold."""
    capacity, longest = s.signals.kv_capacity_tokens, s.number("max_model_len")
    if capacity is None or longest is None or longest <= capacity or not _nothing_gets_in(s):
        return None
    return _some(
        ("max_model_len", longest, capacity),
        ("progress_idle_seconds", s.idle, s.limits.deadlock_after),
        ("requests_waiting", s.waiting),
    )


def _nothing_gets_in(s: Situation) -> bool:
    if s.running is None or s.running > 0 or not s.waiting or not _progress_is_known(s):
        return False
    start = s.history.start_of(s.t - s.limits.deadlock_after)
    stood = (
        s.history.highest("requests_running", start) == 0
        and s.history.share("requests_waiting", start, 0.5) == 1
    )
    return stood and s.idle >= s.limits.deadlock_after


def _progress_is_known(s: Situation) -> bool:
    values = s.history.snapshot.values if s.history.snapshot else {}
    return "generation_tokens" in values or "engine_steps" in values


# Preemption.


def preemption_thrash(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """Preemptions with little completed work."""
    if not s.busy or _is_not_kv(s):
        return None
    # What would open it keeps it too: it is never left for what enters it at the next poll.
    return (held and _still_thrashing(s)) or _burst(s) or _sustained(s) or _starved(s) or None


def _burst(s: Situation) -> tuple[Evidence, ...] | None:
    """A storm that begins: seen within seconds by a count, or by what the gauges betray before it moves."""
    limits = s.limits
    if max(s.burst_preempted, s.inferred) < limits.burst_count:
        return None
    evidence = _some(
        ("preemptions_in_burst", s.burst_counted, limits.burst_count),
        ("preemptions_inferred", s.inferred or None),
        ("requests_finished_in_burst", s.burst_finished),
    )
    if s.burst_counted < limits.burst_count:
        return evidence if _fell_at_once(s) or s.falling or s.tokens_fell else None
    if s.tokens_fell:
        return evidence
    outrun = s.burst_counted >= max(1.0, limits.thrash_ratio * s.burst_finished)
    return evidence if outrun and not _answers_are_long(s) else None


def _fell_at_once(s: Situation) -> bool:
    """Whether the gauges betrayed them all at once, and the counter has begun to follow."""
    since = s.t - s.limits.burst_window
    return s.burst_counted >= 1 and any(
        fall.at > since and fall.inferred >= s.limits.burst_count for fall in s.history.falls
    )


def _sustained(s: Situation) -> tuple[Evidence, ...] | None:
    """About one preemption per finished request, where requests finish."""
    limits = s.limits
    enough = s.minute_preempted >= limits.burst_count and s.minute_finished >= _LEAST_FINISHED
    if not enough or not _goes_on(s) or s.answers_outlast_window:
        return None
    ratio = s.minute_preempted / s.minute_finished
    if ratio < limits.thrash_ratio:
        return None
    return _some(
        ("preemptions_per_finished_request", ratio, limits.thrash_ratio),
        ("preemptions_per_second", s.signals.preemptions_per_second),
        ("recomputed_ratio", s.signals.recomputed_ratio),
    )


def _starved(s: Situation) -> tuple[Evidence, ...] | None:
    """Any rate of preemptions while little finishes and tokens are far below the engine's own level."""
    if s.long_preempted < _LEAST_FINISHED or s.minute_preempted < 1 or s.minute_finished > s.minute_preempted:
        return None
    if s.tokens_fell:
        return _some(
            ("preemptions_per_second", s.signals.preemptions_per_second),
            ("generation_tokens_per_second", s.burst_tokens, s.limits.tokens_fallen * (s.level or 0.0)),
            ("requests_finished_per_second", s.signals.requests_finished_per_second),
        )
    again = s.signals.recomputed_ratio
    if (
        s.level is None
        and s.minute_preempted >= _STORM_PREEMPTED
        and again is not None
        and again >= _RECOMPUTED_STORM
    ):
        return _some(
            ("recomputed_ratio", again, _RECOMPUTED_STORM),
            ("preemptions_per_second", s.signals.preemptions_per_second),
        )
    return None


def _still_thrashing(s: Situation) -> tuple[Evidence, ...] | None:
    """A storm is over when the engine preempts little by what it finishes, and works again."""
    storm = _goes_on(s) and not _answers_are_long(s)
    starved = s.tokens_fell is True and s.long_preempted > 0 and s.half_finished <= max(1.0, s.half_preempted)
    if not storm and not starved:
        return None
    return _some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        (
            "preemptions_per_finished_request",
            s.signals.preemptions_per_finished_request,
            s.limits.thrash_leave_ratio,
        ),
        ("generation_tokens_per_second", s.burst_tokens),
    )


def _goes_on(s: Situation) -> bool:
    """Whether preemptions of the last half minute are many by what finished in it."""
    return s.half_preempted >= max(1.0, s.limits.thrash_leave_ratio * s.half_finished)


def _answers_are_long(s: Situation) -> bool:
    """Whether tokens flow at the engine's own rate although answers outlast the window.

    An engine that was seen in nothing but trouble has no rate of its own; there the share of the work
    that is done twice decides, once enough has finished to know how long an answer takes.
    """
    if not s.answers_outlast_window:
        return False
    if s.level is not None:
        return not s.tokens_fell
    again = s.signals.recomputed_ratio
    return s.long_finished >= _LEAST_FINISHED and again is not None and again < _RECOMPUTED_STORM


def preemption_not_kv(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """Preemptions while the cache was far from full: a reset of the prefix cache, or a priority."""
    if s.preempted_ago is None or s.preempted_ago > s.limits.light_for or not _is_not_kv(s):
        return None
    return _some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        ("kv_usage_max_ratio", s.signals.kv_usage_max_ratio, s.limits.kv_roomy),
    )


def _is_not_kv(s: Situation) -> bool:
    """Whether the highest usage of the last minutes leaves no doubt that KV was not short.

    A shortage takes one request after the other, as few as it can, and all of them only where the cache
    was full before; a reset takes all at any usage.
    """
    since = s.t - s.limits.light_for - s.limits.window
    start = s.history.start_of(since)
    highest = s.history.highest("kv_usage", start)
    if highest is None or s.inferred > 0 or highest >= s.limits.kv_full:
        return False
    if highest < s.limits.kv_roomy:
        return True
    counted = s.history.increase("preemptions", start)
    at_once = sum(fall.requests for fall in s.history.falls if fall.at >= since and fall.whole)
    return counted is not None and 0 < counted <= at_once


def preemption_light(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """Some preemptions, and work gets done."""
    if not _preempts_lately(s, held) or _hardly_any(s, held):
        return None
    return _light_evidence(s)


def preemption_rare(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """So few preemptions that a queue, if there is one, says more."""
    return _light_evidence(s) if _preempts_lately(s, held) else None


def _preempts_lately(s: Situation, held: bool) -> bool:
    """Whether the last preemption is not long ago; where they come one by one, held until one stays away."""
    ago = s.preempted_ago
    if not s.busy or ago is None:
        return False
    if ago <= s.limits.light_for or not held:
        return ago <= s.limits.light_for
    before = s.history.start_of(s.t - ago - s.limits.light_for / 2)
    counted = s.history.columns["preemptions"]
    earlier = counted[before] - counted[s.history.start_of(s.t - s.limits.long_window)]
    return ago <= 2 * s.limits.light_for and 0 < earlier <= _ONE_BY_ONE


def _hardly_any(s: Situation, held: bool) -> bool:
    ratio = s.limits.light_ratio / (2 if held else 1)
    return s.long_finished > 0 and s.long_preempted < ratio * s.long_finished


def _light_evidence(s: Situation) -> tuple[Evidence, ...]:
    return _some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        (
            "preemptions_per_finished_request",
            s.signals.preemptions_per_finished_request,
            s.limits.thrash_ratio,
        ),
        ("generation_tokens_per_second", s.signals.generation_tokens_per_second),
        ("seconds_since_preemption", s.preempted_ago),
    )


# Queue.


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
    return _some(
        ("requests_waiting", s.waiting),
        ("waiting_share", s.waiting_share, s.limits.queue_share),
        ("queue_time_mean_seconds", s.signals.queue_time_mean_seconds),
        ("kv_usage_ratio", s.signals.kv_usage_ratio),
    )


def kv_bound(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """The head of the queue does not fit into the free blocks."""
    if not _queues(s, held) or _is_deferred(s) or not (s.has_room is False or (held and _barely_room(s))):
        return None
    return _queue_evidence(s) + _some(("kv_free_tokens", s.free_tokens, s.longest))


def _barely_room(s: Situation) -> bool:
    """Whether what is free is so little more than the longest prompts that it may be too little again."""
    if s.free_tokens is not None and s.longest is not None:
        return s.free_tokens < _BARELY * s.longest
    return s.kv_queue_mean is not None and s.kv_queue_mean >= s.limits.kv_full - _BELOW_FULL


def seat_bound(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """All seats are taken, by a limit that is known: a plateau of running requests proves none."""
    if not _queues(s, held) or not _seats_are_taken(s, held) or s.has_room is False:
        return None
    return _some(("requests_running", s.running, s.seats)) + _queue_evidence(s)


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
    return _some(("tokens_per_step", fullest, s.limits.budget_share * budget))


def _only_prefill(s: Situation) -> tuple[Evidence, ...] | None:
    """No step puts out a token, and KV usage grows: whatever the budget, prompts take all of it."""
    start = s.history.start_of(s.t - s.limits.queue_window)
    usage = s.history.columns["kv_usage"]
    put_out = s.history.increase("generation_tokens", start)
    if put_out != 0 or not s.running or not usage[-1] > usage[start]:
        return None
    return _some(("generation_tokens", put_out, 0.0), ("kv_usage_growth", usage[-1] - usage[start], 0.0))


def deferred_wait(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """Most of the queue waits for something that is not capacity."""
    if not _queues(s, held) or not _is_deferred(s):
        return None
    return _some(("requests_deferred", s.signals.requests_deferred)) + _queue_evidence(s)


def queue_not_kv(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """A queue with room in KV whose cause the metrics do not prove."""
    return _queue_evidence(s) if _queues(s, held) and s.has_room else None


# Pressure.


def kv_pressure_rising(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """The cache will be full within minutes."""
    seconds, usage = s.signals.kv_seconds_to_full, s.signals.kv_usage_ratio
    if seconds is None or usage is None or s.span < _PRESSURE_SPAN:
        return None
    horizon = s.limits.pressure_horizon * (1.5 if held else 1.0)
    if seconds > horizon or usage < s.limits.pressure_kv:
        return None
    then = s.history.columns["kv_usage"][s.history.start_of(s.t - s.limits.window)]
    if usage - then < _PRESSURE_RISE / (2 if held else 1) or _grows_by_prefill(s, usage - then):
        return None
    return _some(("kv_seconds_to_full", seconds, horizon), ("kv_usage_ratio", usage))


def _grows_by_prefill(s: Situation, growth: float) -> bool:
    """Whether most of the growth is a prompt that is being computed, which ends with the prompt.

    A prompt is counted with its first output; what grows beyond all that was counted is not done yet.
    """
    start = s.history.start_of(s.t - s.limits.window)
    counted = [s.history.increase(name, start) for name in ("generation_tokens", "prompt_tokens")]
    if None in counted:
        return False
    tokens = sum(filter(None, counted))
    capacity = s.signals.kv_capacity_tokens
    return tokens == 0 or (capacity is not None and growth * capacity > _UNCOUNTED * tokens)


def kv_held_no_requests(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """Blocks stay in use with nothing running or waiting, beyond the lease that may explain it."""
    after = s.limits.held_after + (s.number("kv_lease_seconds") or 0.0)
    since = s.t - s.history.worked_at
    if since < after or s.running != 0 or s.waiting != 0:
        return None
    start = s.history.start_of(s.t - s.limits.held_after)
    if s.history.share("kv_usage", start, s.limits.held_kv) != 1:
        return None
    return _some(
        ("kv_usage_ratio", s.signals.kv_usage_ratio, s.limits.held_kv),
        ("seconds_without_requests", since, after),
    )


def decode_slow(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """Each step takes longer than this engine's steps did at about this load."""
    usage = s.kv_queue_mean
    if usage is None or usage >= s.limits.kv_full or not s.busy:
        return None
    paces = s.baseline.paces(s.t - _SLOW_SPAN)
    factor = 1 + (s.limits.slow_factor - 1) / (2 if held else 1)
    if len(paces) < _SLOW_SLICES or median(each.factor for each in paces) < factor:
        return None
    if not held and any(each.factor < factor for each in paces[-_SLOW_SLICES:]):
        return None
    last = paces[-1]
    return _some(
        ("inter_token_latency_mean_seconds", last.seconds, factor * last.normal),
        ("requests_running", s.running),
    )


def runaway_generation(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """Very long answers: tokens flow, nothing finishes, nothing waits."""
    after = s.limits.runaway_after
    start = s.history.start_of(s.t - after)
    running = s.history.mean("requests_running", start)
    generated = s.history.increase("generation_tokens", start)
    finished = s.history.increase("requests_finished", start)
    if not running or generated is None or finished is None or s.history.span(start) < after:
        return None
    busy = s.history.share("requests_running", start, 0.5) == 1
    if not busy or finished > 0 or s.waiting or generated < s.limits.runaway_tokens * running:
        return None
    return _some(
        ("tokens_per_running_request", generated / running, s.limits.runaway_tokens),
        ("generation_tokens_per_second", s.signals.generation_tokens_per_second),
    )


def kv_full_ok(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """A cache that is full with work getting done."""
    mean = s.signals.kv_usage_mean_ratio
    full = s.limits.kv_full - (0.05 if held else 0.0)
    if mean is None or mean < full or not s.busy or s.span < s.limits.queue_window:
        return None
    return _some(("kv_usage_mean_ratio", mean, full))


CONDITIONS: Final[Mapping[str, Condition]] = {
    "sleeping": sleeping,
    "metrics_missing": metrics_missing,
    "data_untrusted": data_untrusted,
    "unfittable_request": unfittable_request,
    "engine_stalled": engine_stalled,
    "scheduler_deadlock": scheduler_deadlock,
    "preemption_thrash": preemption_thrash,
    "preemption_not_kv": preemption_not_kv,
    "preemption_light": preemption_light,
    "deferred_wait": deferred_wait,
    "kv_bound": kv_bound,
    "seat_bound": seat_bound,
    "prefill_bound": prefill_bound,
    "queue_not_kv": queue_not_kv,
    "kv_pressure_rising": kv_pressure_rising,
    "kv_held_no_requests": kv_held_no_requests,
    "decode_slow": decode_slow,
    "runaway_generation": runaway_generation,
    "kv_full_ok": kv_full_ok,
}
