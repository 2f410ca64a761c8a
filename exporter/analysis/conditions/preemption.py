"""Whether preemptions are a storm, a trifle, or none of the KV cache's doing. Pure."""

from typing import Final

from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.conditions.queue import is_long, nothing_finishes
from exporter.analysis.queue_causes import deferred_holds_the_pool, is_compute_bound, steps_are_full
from exporter.analysis.situation import TWICE_MATTERS, Situation

# Fewer finished requests than this say little about a ratio.
LEAST_FINISHED: Final = 3
_STORM_PREEMPTED: Final = 10
# How much less harm is enough to stay critical.
_LESS_TO_STAY: Final = 0.75
# Calm times with this share of the present requests tell what is usual.
AS_MANY: Final = 0.7
# At most this number in the long window comes one by one.
_ONE_BY_ONE: Final = 6
# Not the signals of nearly these names, which are those of five minutes and of one.
_LATELY: Final = "preemptions_per_finished_lately"
_BURST_TOKENS: Final = "generation_tokens_in_burst_per_second"


def preemption_thrash(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Preemptions with little completed work."""
    if not current and (s.long.preempted <= 0 or not _may_be_short(s)):
        return None
    if not s.busy or _is_not_kv(s) or steps_are_full(s) or is_compute_bound(s) or deferred_holds_the_pool(s):
        return None
    # What would open it keeps it too: it is never left for what enters it at the next poll.
    evidence = (current and _still_thrashing(s)) or _burst(s) or _sustained(s) or _starved(s)
    return evidence + _latency_doubled(s) if evidence else None


def _latency_doubled(s: Situation) -> tuple[Evidence, ...]:
    """The time between two tokens, where it is the harm that makes the storm critical."""
    now, usual = s.signals.inter_token_latency_mean_seconds, s.pace.calm_inter_token_seconds
    factor = s.thresholds.latency_grown
    if now is None or usual is None or now < factor * usual:
        return ()
    return some(("inter_token_latency_mean_seconds", now, factor * usual))


def thrash_is_critical(s: Situation, critical: bool) -> bool:
    """Whether the storm does harm that can be named; where no usual level is known, work done twice."""
    if s.tokens_fell or nothing_finishes(s, critical):
        return True
    margin = _LESS_TO_STAY if critical else 1.0
    if _latency_grew(s, s.thresholds.latency_grown * margin):
        return True
    if _usual_is_known(s):
        return False
    again, ratio = s.signals.recomputed_ratio, s.thresholds.thrash_ratio * margin
    return s.minute.preempted >= ratio * s.minute.finished and (again or 0.0) >= TWICE_MATTERS * margin


def _latency_grew(s: Situation, factor: float) -> bool:
    """Whether answers come, or tokens follow each other, slower than in calm times by this factor."""
    now, usual = s.signals.inter_token_latency_mean_seconds, s.pace.calm_inter_token_seconds
    if now is not None and usual is not None and now >= factor * usual:
        return True
    start = s.history.recent_start(s.thresholds.window)
    latency = s.pace.calm_latency
    if latency is None or s.requests is None or s.history.span(start) < s.thresholds.window / 2:
        return False
    return s.requests * s.history.span(start) >= factor * latency * max(1.0, s.minute.finished)


def _usual_is_known(s: Situation) -> bool:
    """Whether calm times with about as many requests were seen."""
    requests = s.requests
    return requests is not None and any(each.requests >= AS_MANY * requests for each in s.pace.calm)


def _burst(s: Situation) -> tuple[Evidence, ...] | None:
    """A storm that begins: seen within seconds by a count, or by what the gauges betray before it moves."""
    thresholds = s.thresholds
    if max(s.burst.preempted, s.inferred) < thresholds.burst_count:
        return None
    evidence = some(
        ("preemptions_in_burst", s.burst.counted, thresholds.burst_count),
        ("preemptions_inferred", s.inferred or None),
        ("requests_finished_in_burst", s.burst.finished),
    )
    if s.burst.counted < thresholds.burst_count:
        return evidence if _fell_at_once(s) or s.falling or s.tokens_fell else None
    if s.tokens_fell:
        return evidence
    outrun = s.burst.counted >= max(1.0, thresholds.thrash_ratio * s.burst.finished)
    return evidence if outrun and not _answers_are_long(s) else None


def _fell_at_once(s: Situation) -> bool:
    """Whether the gauges betrayed them all at once, and the counter has begun to follow."""
    since = s.t - s.thresholds.burst_window
    return s.burst.counted >= 1 and any(
        fall.at > since and fall.inferred >= s.thresholds.burst_count for fall in s.history.falls
    )


def _sustained(s: Situation) -> tuple[Evidence, ...] | None:
    """About one preemption per finished request, where requests finish."""
    thresholds = s.thresholds
    enough = s.minute.preempted >= thresholds.burst_count and s.minute.finished >= LEAST_FINISHED
    if not enough or not _goes_on(s) or s.answers_outlast_window:
        return None
    ratio = s.minute.preempted / s.minute.finished
    # Beside a long queue fewer are no trifle.
    threshold = thresholds.thrash_leave_ratio if is_long(s) else thresholds.thrash_ratio
    if ratio < threshold:
        return None
    return some(
        (_LATELY, ratio, threshold, thresholds.thrash_leave_ratio),
        ("preemptions_per_second", s.signals.preemptions_per_second),
        ("recomputed_ratio", s.signals.recomputed_ratio),
    )


def _starved(s: Situation) -> tuple[Evidence, ...] | None:
    """Any rate of preemptions while little finishes and tokens are far below the engine's own level."""
    if s.long.preempted < LEAST_FINISHED or s.minute.preempted < 1 or s.minute.finished > s.minute.preempted:
        return None
    if s.tokens_fell:
        return some(
            ("preemptions_per_second", s.signals.preemptions_per_second),
            (
                _BURST_TOKENS,
                s.throughput.tokens_per_second,
                s.thresholds.tokens_fallen * (s.throughput.level or 0.0),
            ),
            ("requests_finished_per_second", s.signals.requests_finished_per_second),
        )
    if s.throughput.level is None and s.minute.preempted >= _STORM_PREEMPTED and _preempted_often(s):
        return some(
            ("preemptions_per_second", s.signals.preemptions_per_second),
            ("recomputed_ratio", s.signals.recomputed_ratio),
        )
    return None


def _may_be_short(s: Situation) -> bool:
    """Whether KV was not roomy lately, or a request waited: an engine with little to do is in no storm."""
    start = s.history.recent_start(s.thresholds.burst_window / 2)
    usage = s.history.highest("kv_usage", start)
    return bool(s.history.highest("requests_waiting", start)) or (
        usage is None or usage >= s.thresholds.kv_roomy
    )


def _preempted_often(s: Situation) -> bool:
    """Whether each running request is preempted so often that an answer of any length suffers."""
    rate, running = s.signals.preemptions_per_second, s.signals.requests_running
    return rate is not None and running is not None and rate * s.thresholds.thrash_seconds > running


def _still_thrashing(s: Situation) -> tuple[Evidence, ...] | None:
    """A storm is over when the engine preempts little by what it finishes, and works again."""
    storm = _goes_on(s) and not _answers_are_long(s)
    starved = (
        s.tokens_fell is True
        and _may_be_short(s)
        and max(s.long.counted, s.long.inferred) > 0
        and s.half_minute.finished <= max(1.0, s.half_minute.preempted)
    )
    if not storm and not starved:
        return None
    thresholds, lately = s.thresholds, s.half_minute
    ratio = lately.preempted / lately.finished if storm and lately.finished else None
    level = None if storm or s.throughput.level is None else thresholds.tokens_fallen * s.throughput.level
    return some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        (_LATELY, ratio, thresholds.thrash_ratio, thresholds.thrash_leave_ratio),
        (_BURST_TOKENS, s.throughput.tokens_per_second, level),
    )


def _goes_on(s: Situation) -> bool:
    """Whether preemptions of the last half minute are many by what finished in it."""
    return s.half_minute.preempted >= max(1.0, s.thresholds.thrash_leave_ratio * s.half_minute.finished)


def _answers_are_long(s: Situation) -> bool:
    """Whether tokens flow at the engine's own rate although answers outlast the window.

    An engine that was seen in nothing but trouble has no rate of its own; there it decides how often each
    request is preempted, once enough has finished to know how long an answer takes.
    """
    if not s.answers_outlast_window:
        return False
    if s.throughput.level is not None:
        return not s.tokens_fell
    return s.long.finished >= LEAST_FINISHED and not _preempted_often(s)


def preemption_not_kv(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """Preemptions while the cache was far from full: a reset of the prefix cache, or a priority."""
    if s.preempted_ago is None or s.preempted_ago > s.thresholds.light_for or not _is_not_kv(s):
        return None
    return some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        ("kv_usage_max_ratio", s.signals.kv_usage_max_ratio, s.thresholds.kv_roomy),
    )


def _is_not_kv(s: Situation) -> bool:
    """Whether the highest usage of the last minutes leaves no doubt that KV was not short.

    A shortage takes one request after the other, as few as it can, and all of them only where the cache
    was full before; a reset takes all at any usage.
    """
    if s.inferred > 0 or (s.signals.kv_usage_max_ratio or 0.0) >= s.thresholds.kv_full:
        return False  # full in the last minute: no need to look further back
    since = s.t - s.thresholds.light_for - s.thresholds.window
    start = s.history.window_start(since)
    highest = s.history.highest("kv_usage", start)
    if highest is None or highest >= s.thresholds.kv_full:
        return False
    if highest < s.thresholds.kv_roomy:
        return True
    counted = s.history.increase("preemptions", start)
    at_once = sum(fall.requests for fall in s.history.falls if fall.at >= since and fall.whole)
    return counted is not None and 0 < counted <= at_once


def preemption_light(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Some preemptions, and work gets done."""
    if not _preempts_lately(s, current) or _hardly_any(s, current):
        return None
    if is_long(s) and not _few_but_many_per_request(s):  # then the queue says more
        return None
    return _light_evidence(s)


def _few_but_many_per_request(s: Situation) -> bool:
    """Whether they come one by one in an engine of a few large requests, of which little finishes."""
    if s.queue_cause not in {None, "kv_bound", "queue_not_kv"}:
        return False
    ratio = s.thresholds.thrash_leave_ratio
    return 1 < s.long.preempted <= _ONE_BY_ONE and s.long.preempted >= ratio * s.long.finished


def light_is_warning(s: Situation) -> bool:
    """Whether a long queue makes it more than a trifle."""
    return is_long(s)


def preemption_rare(s: Situation, current: bool) -> tuple[Evidence, ...] | None:
    """Fewer preemptions per finished request than `analysis.light_ratio`: a queue, if any, comes first."""
    return _light_evidence(s) if _preempts_lately(s, current) else None


def _preempts_lately(s: Situation, current: bool) -> bool:
    """Whether the last preemption is not long ago; where they come one by one, held until one stays away."""
    ago = s.preempted_ago
    if not s.busy or ago is None:
        return False
    if ago <= s.thresholds.light_for or not current:
        return ago <= s.thresholds.light_for
    before = s.history.window_start(s.t - ago - s.thresholds.light_for / 2)
    counted = s.history.columns["preemptions"]
    earlier = counted[before] - counted[s.history.recent_start(s.thresholds.long_window)]
    return ago <= 2 * s.thresholds.light_for and 0 < earlier <= _ONE_BY_ONE


def _hardly_any(s: Situation, current: bool) -> bool:
    ratio = s.thresholds.light_ratio / (2 if current else 1)
    return s.long.finished > 0 and s.long.preempted < ratio * s.long.finished


def _light_evidence(s: Situation) -> tuple[Evidence, ...]:
    return some(
        ("preemptions_per_second", s.signals.preemptions_per_second),
        (
            "preemptions_per_finished_request",
            s.signals.preemptions_per_finished_request,
            s.thresholds.thrash_ratio,
        ),
        ("generation_tokens_per_second", s.signals.generation_tokens_per_second),
        ("seconds_since_preemption", s.preempted_ago),
    )
