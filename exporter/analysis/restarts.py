"""Distinguishes a new process behind an address from two sources that alternate.

Pure: time is a parameter. A load balancer in front of several pods, or several API processes that
share a port but not their counters, make counters fall and rise again; rates of such a mixture are
meaningless. A restart makes them fall once, and they grow from there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["Restart", "SourceWatch", "Step"]

# Two sources are assumed for this long after they last alternated.
TURNS_SECONDS: Final = 60.0
_REMEMBERED_SOURCES: Final = 8
# A server needs longer than this to start. Counters that fall after a gap in the polls that is this long, and
# unusual for this target, were reset by a restart.
_ABSENCE_SECONDS: Final = 5.0
_ABSENCE_GAPS: Final = 3.0
# A process is not taken for one that began this long before the last body of the other.
_CLOCK_SECONDS: Final = 1.0
# Counters that every working engine increases. If fewer than half of them fall, it is no restart: these are
# broken.
_WITNESSES: Final = ("engine_steps", "prompt_tokens", "generation_tokens", "requests_finished")

Counters = Mapping[str, float]
Step = Literal["same", "new", "returned"]


@dataclass(frozen=True, slots=True)
class Restart:
    """A new process behind the same address, with the last readings of the old one (None: unknown)."""

    at: float  # time of the first good poll of the new process
    kv_usage: float | None  # the last KV usage of the old one
    kv_usage_max: float | None  # the maximum of its last minute
    running: float | None  # its last number of running requests


@dataclass(slots=True)
class SourceWatch:
    """Watches which process an engine's bodies come from.

    There are two kinds of evidence. If bodies have the start of their process (or of its counters), a process
    that returns after another one proves two sources. Otherwise a body that continues the counters of a
    source that was left a moment ago is a turn, and two turns within a minute are the proof.
    """

    # `origin`: start of the process seen last, where a body had it. `resumed`: after a step ``returned``, the
    # last counters of that source. `_origins`: last counters of each process that was left, by its start.
    # `_left`: the same without a start time, with the time it was left. `_stride`: the largest increase of
    # each counter between two polls of the present source. `_turns`: times of the last turns. `_since`: when
    # the present process was first seen. `goes_on`: whether a witness of the last body shows that its process
    # is still the same one, whatever its other counters do.

    origin: float | None = None
    goes_on: bool = False
    resumed: Counters = field(default_factory=dict)
    _origins: dict[float, Counters] = field(default_factory=dict)
    _left: list[tuple[float, Counters]] = field(default_factory=list)
    _stride: dict[str, float] = field(default_factory=dict)
    _turns: list[float] = field(default_factory=list)
    _by_turns_at: float = -math.inf
    _polled_at: float = math.nan
    _since: float = -math.inf
    _gap: float = math.inf

    def by_turns(self, t: float) -> bool:
        """Return whether two sources have alternated within the last minute."""
        return t - self._by_turns_at <= TURNS_SECONDS

    def step(self, t: float, origin: float | None, last: Counters, new: Counters) -> Step:
        """Classify the next body.

        Args:
            t: time of the poll.
            origin: start of the process that printed it, None where the body does not have it.
            last: counters of the previous body.
            new: counters of this body.

        Returns:
            ``new`` for the first body of another process, ``returned`` for one of a process that was left
            and continues from `resumed`, else ``same``.
        """
        polled_at, self._polled_at = self._polled_at, t
        gap = t - polled_at
        absent = gap > max(_ABSENCE_SECONDS, _ABSENCE_GAPS * self._gap)
        self._gap = gap if gap >= 0 else self._gap  # NaN at the first poll
        known, self.origin = self.origin, self.origin if origin is None else origin
        self._since = t if known is None else self._since
        if origin is not None and known is not None and origin != known:
            # A new process can begin only after the last body of the old one.
            later = origin - known >= polled_at - self._since - _CLOCK_SECONDS
            step = self._by_origin(t, known, origin, last, new, later=later, away=gap > _ABSENCE_SECONDS)
            if step is not None:
                self._since = t
                return step
        # A constant start time does not prove a single source: it may be that of a proxy in front of them.
        step = self._by_counters(t, last, new, absent=absent)
        if step == "new" and origin is None:
            self.origin = None  # a truncated body showed the new process, but not its start time
        return step

    def _by_origin(
        self, t: float, known: float, origin: float, last: Counters, new: Counters, *, later: bool, away: bool
    ) -> Step | None:
        """Classify a body with another start time; None if only the start time is inexact.

        Some programs compute it at each poll, and correct it with their clock. Counters that go on prove one
        process, unless there was time for a restart, after which the new process passed the old one.
        """
        resumed = self._origins.pop(origin, None)
        self._origins[known] = dict(last)
        if len(self._origins) > _REMEMBERED_SOURCES:
            del self._origins[next(iter(self._origins))]
        witnesses = [(last[name], new[name]) for name in _WITNESSES if last.get(name) and name in new]
        goes_on = all(after >= before for before, after in witnesses)
        restart = later and (away or not witnesses)
        one_process = goes_on and not restart and (resumed is None or not _behind(last, resumed))
        if one_process and not self.by_turns(t):
            return None
        if resumed is None:
            return "new"
        self.resumed = resumed
        self._by_turns_at = t
        return "returned"

    def _by_counters(self, t: float, last: Counters, new: Counters, *, absent: bool) -> Step:
        """Classify by counters alone.

        Falling counters are a restart or a turn to a source that is behind; rising ones are growth or a turn
        back to the source that is ahead. A turn is a body that continues a source that was left: each of its
        counters is at least what it was then.
        """
        pairs = [(last[name], new[name]) for name in _WITNESSES if last.get(name) and name in new]
        fell = sum(1 for before, after in pairs if after < before)
        self.goes_on = fell < len(pairs)
        falling = fell > 0 and 2 * fell >= len(pairs)
        if not falling and not self._left:
            return "same"
        if falling and absent:  # long enough for a restart, and sources that alternate leave no gap
            self._left = []
            return "new"
        self._left = [one for one in self._left if t - one[0] <= TURNS_SECONDS]
        resumed = self._continued(last, new, falling=falling)
        if resumed is None and not falling:  # plain growth
            self._grow(last, new)
            return "same"
        # The present source is left for a new one or for `resumed`; its strides do not apply there.
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
        """Return the source that this body continues; of several the one that has counted most."""
        sources = [
            source
            for _, source in self._left
            if all(new.get(name, value) >= value for name, value in source.items())
            and (falling or self._jumps(last, source))
        ]
        return max(sources, key=_progress, default=None)

    def _jumps(self, last: Counters, source: Counters) -> bool:
        """Return whether the counters would have to jump to reach a source that is ahead.

        A growing source overtakes, step by step, the values at which a slower one was left. Only a distance
        larger than any increase between two polls so far cannot be growth.
        """
        distances = [(name, source.get(name, 0.0) - last.get(name, 0.0)) for name in _WITNESSES]
        ahead = [(name, distance) for name, distance in distances if distance > 0]
        return bool(ahead) and all(distance > self._stride.get(name, 0.0) for name, distance in ahead)

    def _grow(self, last: Counters, new: Counters) -> None:
        """Note the increase of one poll, and forget the sources that growth has overtaken."""
        for name in _WITNESSES:
            stride = new.get(name, 0.0) - last.get(name, 0.0)
            self._stride[name] = max(stride, self._stride.get(name, 0.0))
        self._left = [one for one in self._left if not _behind(last, one[1]) or _behind(new, one[1])]


def _behind(one: Counters, other: Counters) -> bool:
    """Return whether any counter of one source is below that of the other."""
    return any(one.get(name, 0.0) < other.get(name, 0.0) for name in _WITNESSES)


def _progress(source: Counters) -> float:
    return sum(source.get(name, 0.0) for name in _WITNESSES)
