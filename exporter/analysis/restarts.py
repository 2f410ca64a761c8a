"""Tell a new process behind an address from two sources that answer by turns.

Pure: time is a parameter. A load balancer in front of several pods, or several API processes that
share a port without sharing their counters, make counters fall and rise again; no rate of such a
mixture means anything. A restart makes them fall once, and what comes after grows from there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["Restart", "SourceWatch", "Step"]

# Two sources are believed in for this long after they were last seen to take turns.
TURNS_SECONDS: Final = 60.0
_REMEMBERED_SOURCES: Final = 8
# No server starts within this; counters that fall after an absence this long and unusual were reset.
_ABSENCE_SECONDS: Final = 5.0
_ABSENCE_GAPS: Final = 3.0
# Counters that every engine at work moves; a fall of one alone is that counter's own matter.
_WITNESSES: Final = ("engine_steps", "prompt_tokens", "generation_tokens", "requests_finished")

Counters = Mapping[str, float]
Step = Literal["same", "new", "returned"]


@dataclass(frozen=True, slots=True)
class Restart:
    """A new process behind the same address, and what the old one last showed (None: unknown).

    Attributes:
        at: time of the first good poll of the new process.
        kv_usage: its last KV usage.
        kv_usage_max: the maximum of its last minute.
        preemptions: what it counted in its last five minutes.
        running: requests that ran when it was last seen.
    """

    at: float
    kv_usage: float | None
    kv_usage_max: float | None
    preemptions: float | None
    running: float | None


@dataclass(slots=True)
class SourceWatch:
    """Watches where an engine's bodies come from.

    Where the body names its process (its start time, or when its counters began), a process that was
    seen before and comes back is proof of two sources. Elsewhere a body that continues the counters of
    a source left a moment ago is a turn, and two turns within a minute are the proof.

    Attributes:
        origin: when the process began that was seen last, where any body told.
        resumed: after a step ``returned``, the counters that source was left with.
    """

    origin: float | None = None
    resumed: Counters = field(default_factory=dict)
    _origins: dict[float, Counters] = field(default_factory=dict)
    _left: list[tuple[float, Counters]] = field(default_factory=list)
    _stride: dict[str, float] = field(default_factory=dict)
    _turns: list[float] = field(default_factory=list)
    _by_turns_at: float = -math.inf
    _polled_at: float = math.nan
    _gap: float = math.inf

    def by_turns(self, t: float) -> bool:
        """Whether two sources were seen to answer by turns within the last minute."""
        return t - self._by_turns_at <= TURNS_SECONDS

    def step(self, t: float, origin: float | None, last: Counters, new: Counters) -> Step:
        """Look at one more body.

        Args:
            t: time of the poll.
            origin: when the process that printed it began, None where the body does not tell.
            last: counters of the body before.
            new: counters of this body.

        Returns:
            ``new`` for the first body of another process, ``returned`` for one of a process that was
            left for another and goes on from `resumed`, else ``same``.
        """
        gap, self._polled_at = t - self._polled_at, t
        absent = gap > max(_ABSENCE_SECONDS, _ABSENCE_GAPS * self._gap)
        self._gap = gap if gap >= 0 else self._gap  # there is none before the first poll
        known, self.origin = self.origin, self.origin if origin is None else origin
        if origin is not None and known is not None and origin != known:
            return self._by_origin(t, known, origin, last)
        # A start time that stays proves no single source: it may be that of a proxy in front of them.
        step = self._by_counters(t, last, new, absent=absent)
        if step == "new" and origin is None:
            self.origin = None  # a body that is cut off told of the new process before its start time
        return step

    def _by_origin(self, t: float, known: float, origin: float, last: Counters) -> Step:
        self._origins[known] = dict(last)
        resumed = self._origins.pop(origin, None)
        if len(self._origins) > _REMEMBERED_SOURCES:
            del self._origins[next(iter(self._origins))]
        if resumed is None:
            return "new"
        self.resumed = resumed
        self._by_turns_at = t
        return "returned"

    def _by_counters(self, t: float, last: Counters, new: Counters, *, absent: bool) -> Step:
        pairs = [(last[name], new[name]) for name in _WITNESSES if last.get(name) and name in new]
        fell = sum(1 for before, after in pairs if after < before)
        falling = fell > 0 and 2 * fell >= len(pairs)
        if not falling and not self._left:
            return "same"
        if falling and absent:
            self._left = []
            return "new"
        self._left = [one for one in self._left if t - one[0] <= TURNS_SECONDS]
        resumed = self._continued(last, new, falling=falling)
        if resumed is None and not falling:
            self._grow(last, new)
            return "same"
        self._left = [*(one for one in self._left if one[1] is not resumed), (t, dict(last))]
        del self._left[:-_REMEMBERED_SOURCES]
        self._stride = {}
        if resumed is None:
            return "new"
        self.resumed = resumed
        self._turns = [at for at in self._turns if t - at <= TURNS_SECONDS] + [t]
        if len(self._turns) > 1:
            self._by_turns_at = t
        return "returned"

    def _continued(self, last: Counters, new: Counters, *, falling: bool) -> Counters | None:
        """The source left a moment ago that this body continues: of several the one that was furthest."""
        sources = [
            source
            for _, source in self._left
            if all(new.get(name, value) >= value for name, value in source.items())
            and (falling or self._jumps(last, source))
        ]
        return max(sources, key=_progress, default=None)

    def _jumps(self, last: Counters, source: Counters) -> bool:
        """Whether the way to a source is further than any stride of the present one: growth is no jump."""
        ways = [(name, source.get(name, 0.0) - last.get(name, 0.0)) for name in _WITNESSES]
        ahead = [(name, way) for name, way in ways if way > 0]
        return bool(ahead) and all(way > self._stride.get(name, 0.0) for name, way in ahead)

    def _grow(self, last: Counters, new: Counters) -> None:
        """Note how far one poll takes this source, and forget those that it has overtaken by growing."""
        for name in _WITNESSES:
            stride = new.get(name, 0.0) - last.get(name, 0.0)
            self._stride[name] = max(stride, self._stride.get(name, 0.0))
        self._left = [one for one in self._left if not _behind(last, one[1]) or _behind(new, one[1])]


def _behind(one: Counters, other: Counters) -> bool:
    """Whether any counter of one source has yet to reach that of the other."""
    return any(one.get(name, 0.0) < other.get(name, 0.0) for name in _WITNESSES)


def _progress(source: Counters) -> float:
    return sum(source.get(name, 0.0) for name in _WITNESSES)
