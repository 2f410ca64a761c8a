"""Whether the engine sleeps, and whether its numbers are there and can be true. Pure."""

from typing import Final

from exporter.analysis.conditions.evidence import Evidence, some
from exporter.analysis.situation import Situation

# What a verdict needs to be judged at all.
NEEDED: Final = ("requests_running", "requests_waiting", "kv_usage")


def sleeping(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """The engine says that it sleeps, whatever else stands still meanwhile."""
    values = s.history.snapshot.values if s.history.snapshot else {}
    for reading in ("sleep_weights_offloaded", "sleep_discard_all"):
        if values.get(reading) == 1:
            return some((reading, 1.0))
    return None


def metrics_missing(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
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
    return tuple(Evidence(name, None, note="absent") for name in NEEDED if name not in there)


def data_untrusted(s: Situation, _current: bool) -> tuple[Evidence, ...] | None:
    """A value that cannot be true, zeros under load, or two sources that answer by turns."""
    if s.history.sources.by_turns(s.t):
        return some(("sources_by_turns", 1.0))
    if _zeros_under_load(s):
        return some(("kv_usage", 0.0), ("requests_running", s.running))
    untrusted = s.history.snapshot.untrusted if s.history.snapshot else {}
    if not untrusted:
        return None
    bad = [name for name in (*NEEDED, "requests_deferred") if name in untrusted]
    # The reader's reason without the name of the reading: ``is nan, expected 0 to 1``.
    return tuple(Evidence(name, None, note=untrusted[name].partition(" ")[2]) for name in bad) or None


def _zeros_under_load(s: Situation) -> bool:
    """Whether requests run for a whole window and get tokens, with no KV and no prompt (vLLM-Omni)."""
    history, values = s.history, s.history.snapshot.values if s.history.snapshot else {}
    counted = (values.get("prompt_tokens"), values.get("prefix_queries") or 0.0)
    if values.get("kv_usage") != 0 or not s.running or counted != (0.0, 0.0):
        return False
    start = history.recent_start(s.thresholds.window)
    full = history.span(start) >= s.thresholds.window and history.share("requests_running", start, 0.5) == 1
    return (
        full
        and history.highest("kv_usage", start) == 0
        and bool(history.increase("generation_tokens", start))
    )
