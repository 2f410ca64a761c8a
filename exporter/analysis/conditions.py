"""When a verdict holds: one function per verdict, each with its evidence.

Pure. A function gets the situation and whether its verdict is the present one (`held`), for which the
threshold of leaving counts instead of that of entering. It returns the evidence, or None where the
verdict does not hold or cannot be known to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
# A slice of the past counts as slow if it was this much of the factor.
_SLOW_SLICES: Final = 4
_PRESSURE_SPAN: Final = 15.0
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
    if held:
        return _still_thrashing(s)
    return _burst(s) or _sustained(s) or _starved(s)


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
        return evidence if s.falling or s.tokens_fell else None
    if s.tokens_fell:
        return evidence
    outrun = s.burst_counted >= max(1.0, limits.thrash_ratio * s.burst_finished)
    return evidence if outrun and not _answers_are_long(s) else None


def _sustained(s: Situation) -> tuple[Evidence, ...] | None:
    """About one preemption per finished request, where requests finish."""
    limits = s.limits
    enough = s.minute_preempted >= limits.burst_count and s.minute_finished >= _LEAST_FINISHED
    if not enough or not s.half_preempted or s.answers_outlast_window:
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
    storm = s.half_preempted >= max(1.0, s.limits.thrash_leave_ratio * s.half_finished)
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


def _answers_are_long(s: Situation) -> bool:
    """Whether tokens flow at the engine's own rate although answers outlast the window."""
    return s.answers_outlast_window and s.level is not None and not s.tokens_fell


def preemption_not_kv(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """Preemptions while the cache was far from full: a reset of the prefix cache, or a priority."""
    if s.preempted_ago is None or s.preempted_ago > s.limits.light_for or not _is_not_kv(s):
        return None
    return _some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        ("kv_usage_max_ratio", s.signals.kv_usage_max_ratio, s.limits.kv_roomy),
    )


def _is_not_kv(s: Situation) -> bool:
    """Whether the highest usage of the last minutes leaves no doubt that KV was not short."""
    start = s.history.start_of(s.t - s.limits.light_for - s.limits.window)
    highest = s.history.highest("kv_usage", start)
    return highest is not None and highest < s.limits.kv_roomy and s.inferred == 0


def preemption_light(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """Some preemptions, and work gets done."""
    if not _preempts_lately(s) or _hardly_any(s):
        return None
    return _light_evidence(s)


def preemption_rare(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """So few preemptions that a queue, if there is one, says more."""
    return _light_evidence(s) if _preempts_lately(s) else None


def _preempts_lately(s: Situation) -> bool:
    return s.busy and s.preempted_ago is not None and s.preempted_ago <= s.limits.light_for


def _hardly_any(s: Situation) -> bool:
    return s.long_finished > 0 and s.long_preempted < s.limits.light_ratio * s.long_finished


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
    if s.waiting_share is None or s.idle > _QUEUE_IDLE_SECONDS:
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
    if not _queues(s, held) or _is_deferred(s) or s.has_room is not False:
        return None
    return _queue_evidence(s) + _some(("kv_free_tokens", s.free_tokens, s.longest))


def seat_bound(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """All seats are taken, by a limit that is known: a plateau of running requests proves none."""
    if not _queues(s, held) or not _seats_are_taken(s, held) or s.has_room is False:
        return None
    return _some(("requests_running", s.running, s.seats)) + _queue_evidence(s)


def prefill_bound(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """Steps are full of prompt tokens while seats and KV are free."""
    budget = s.number("max_num_batched_tokens")
    if (
        not _queues(s, held)
        or _is_deferred(s)
        or _seats_are_taken(s, held)
        or not s.has_room
        or budget is None
    ):
        return None
    start = s.history.start_of(s.t - s.limits.window)
    in_step = s.history.ratio("step_tokens", "engine_steps", start)
    prompts = s.history.ratio("prompt_tokens", "engine_steps", start)
    fullest = max(in_step or 0.0, prompts or 0.0)
    if fullest < s.limits.budget_share * budget:
        return None
    return _some(("tokens_per_step", fullest, s.limits.budget_share * budget)) + _queue_evidence(s)


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
    if usage - then < _PRESSURE_RISE / (2 if held else 1):
        return None
    return _some(("kv_seconds_to_full", seconds, horizon), ("kv_usage_ratio", usage))


def kv_held_no_requests(s: Situation, _held: bool) -> tuple[Evidence, ...] | None:
    """Blocks stay in use with nothing running or waiting, beyond the lease that may explain it."""
    after = max(s.limits.held_after, 2 * (s.number("kv_lease_seconds") or 0.0))
    start = s.history.start_of(s.t - after)
    if s.history.span(start) < after or s.history.highest("requests_running", start) != 0:
        return None
    held = s.history.share("kv_usage", start, s.limits.held_kv)
    if s.history.highest("requests_waiting", start) != 0 or held != 1:
        return None
    return _some(
        ("kv_usage_ratio", s.signals.kv_usage_ratio, s.limits.held_kv), ("seconds_without_requests", after)
    )


def decode_slow(s: Situation, held: bool) -> tuple[Evidence, ...] | None:
    """Each step takes longer than this engine's steps did at about this load."""
    latency, prompts = s.signals.inter_token_latency_mean_seconds, s.signals.prompt_tokens_per_second
    usage = s.kv_queue_mean
    if latency is None or prompts is None or usage is None or not s.running or usage >= s.limits.kv_full:
        return None
    normal = s.baseline.latency(s.running, usage, prompts)
    if normal is None or normal <= 0:
        return None
    factor = 1 + (s.limits.slow_factor - 1) / (2 if held else 1)
    if latency < factor * normal:
        return None
    if not s.baseline.lately(_SLOW_SLICES, lambda each: each.inter_token_seconds >= factor * normal):
        return None
    return _some(
        ("inter_token_latency_mean_seconds", latency, factor * normal), ("requests_running", s.running)
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
