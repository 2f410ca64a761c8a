"""Whether preemptions are a storm, a trifle, or none of the KV cache's doing. Pure."""

from typing import Final

from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.situation import Situation

# Fewer finished requests than this say little about a ratio.
_LEAST_FINISHED: Final = 3
# Preemptions that recompute this share of all tokens are a storm even where nothing else is known.
_RECOMPUTED_STORM: Final = 0.8
_STORM_PREEMPTED: Final = 10
# At most so many in the long window come one by one.
_ONE_BY_ONE: Final = 6
# Not the signal of nearly that name, which is the rate of a minute.
_BURST_TOKENS: Final = "generation_tokens_in_burst_per_second"


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
    evidence = some(
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
    return some(
        ("preemptions_per_finished_request", ratio, limits.thrash_ratio),
        ("preemptions_per_second", s.signals.preemptions_per_second),
        ("recomputed_ratio", s.signals.recomputed_ratio),
    )


def _starved(s: Situation) -> tuple[Evidence, ...] | None:
    """Any rate of preemptions while little finishes and tokens are far below the engine's own level."""
    if s.long_preempted < _LEAST_FINISHED or s.minute_preempted < 1 or s.minute_finished > s.minute_preempted:
        return None
    if s.tokens_fell:
        return some(
            ("preemptions_per_second", s.signals.preemptions_per_second),
            (_BURST_TOKENS, s.burst_tokens, s.limits.tokens_fallen * (s.level or 0.0)),
            ("requests_finished_per_second", s.signals.requests_finished_per_second),
        )
    again = s.signals.recomputed_ratio
    if (
        s.level is None
        and s.minute_preempted >= _STORM_PREEMPTED
        and again is not None
        and again >= _RECOMPUTED_STORM
    ):
        return some(
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
    return some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        (
            "preemptions_per_finished_request",
            s.signals.preemptions_per_finished_request,
            s.limits.thrash_leave_ratio,
        ),
        (_BURST_TOKENS, s.burst_tokens),
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
    return some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        ("kv_usage_max_ratio", s.signals.kv_usage_max_ratio, s.limits.kv_roomy),
    )


def _is_not_kv(s: Situation) -> bool:
    """Whether the highest usage of the last minutes leaves no doubt that KV was not short.

    A shortage takes one request after the other, as few as it can, and all of them only where the cache
    was full before; a reset takes all at any usage.
    """
    if s.inferred > 0 or (s.signals.kv_usage_max_ratio or 0.0) >= s.limits.kv_full:
        return False  # full in the last minute: no need to look further back
    since = s.t - s.limits.light_for - s.limits.window
    start = s.history.start_of(since)
    highest = s.history.highest("kv_usage", start)
    if highest is None or highest >= s.limits.kv_full:
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
    return some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        (
            "preemptions_per_finished_request",
            s.signals.preemptions_per_finished_request,
            s.limits.thrash_ratio,
        ),
        ("generation_tokens_per_second", s.signals.generation_tokens_per_second),
        ("seconds_since_preemption", s.preempted_ago),
    )
