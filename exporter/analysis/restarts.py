"""Tell a new process behind an address from two sources that answer by turns.

Pure: time is a parameter. A load balancer in front of several pods, or several API processes that
share a port without sharing their counters, make counters fall and rise again; no rate of such a
mixture means anything. A restart makes them fall once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["Restart", "SourceWatch", "Step"]

# Two sources are believed in for this long after they were last seen to take turns.
TURNS_SECONDS: Final = 60.0
_REMEMBERED_ORIGINS: Final = 8
# Counters that every engine at work moves; a fall of one alone is that counter's own matter.
_WITNESSES: Final = ("engine_steps", "prompt_tokens", "generation_tokens", "requests_finished")

Step = Literal["same", "new", "returned"]


@dataclass(frozen=True, slots=True)
class Restart:
    """A new process behind the same address, and what the old one last showed (None: unknown).

    Attributes:
        at: time of the first good poll of the new process.
        last_seen: time of the last good poll of the old one.
        kv_usage: its last KV usage.
        kv_usage_max: the maximum of its last minute.
        preemptions: what it counted in its last five minutes.
        running: requests that ran when it was last seen.
    """

    at: float
    last_seen: float
    kv_usage: float | None
    kv_usage_max: float | None
    preemptions: float | None
    running: float | None


@dataclass(slots=True)
class SourceWatch:
    """Watches where an engine's bodies come from.

    Where the body names its process (its start time, or when its counters began), a process that was
    seen before and comes back is proof of two sources. Elsewhere it is counters that fall and are back
    above where they were, twice within a minute.
    """

    origin: float | None = None
    before_fall: dict[str, float] = field(default_factory=dict)
    _seen: dict[float, float] = field(default_factory=dict)
    _fell_at: float = -math.inf
    _returns: list[float] = field(default_factory=list)
    _by_turns_at: float = -math.inf

    def by_turns(self, t: float) -> bool:
        """Whether two sources were seen to answer by turns within the last minute."""
        return t - self._by_turns_at <= TURNS_SECONDS

    def step(
        self, t: float, origin: float | None, last: Mapping[str, float], new: Mapping[str, float]
    ) -> Step:
        """Look at one more body.

        Args:
            t: time of the poll.
            origin: when the process that printed it began, None where the body does not tell.
            last: counters of the body before.
            new: counters of this body.

        Returns:
            ``new`` for the first body of another process, ``returned`` when counters are back above
            `before_fall`, so that their fall was none, else ``same``.
        """
        known, self.origin = self.origin, origin if origin is not None else self.origin
        if origin is None or known is None:
            step = self._by_counters(t, last, new)
        elif origin == known:
            step = "same"
        else:
            if t - self._seen.get(origin, -math.inf) <= TURNS_SECONDS:
                self._by_turns_at = t
            step = "new"
        if self.origin is not None:
            self._seen[self.origin] = t
            if len(self._seen) > _REMEMBERED_ORIGINS:
                del self._seen[min(self._seen, key=self._seen.__getitem__)]
        return step

    def _by_counters(self, t: float, last: Mapping[str, float], new: Mapping[str, float]) -> Step:
        if self.before_fall and t - self._fell_at <= TURNS_SECONDS and self._is_back(new):
            self._returns = [at for at in self._returns if t - at <= TURNS_SECONDS] + [t]
            if len(self._returns) > 1:
                self._by_turns_at = t
            return "returned"
        pairs = [(last[name], new[name]) for name in _WITNESSES if last.get(name) and name in new]
        fell = sum(1 for before, after in pairs if after < before)
        if not fell or 2 * fell < len(pairs):
            return "same"
        self.before_fall = dict(last)
        self._fell_at = t
        return "new"

    def _is_back(self, new: Mapping[str, float]) -> bool:
        return all(new.get(name, value) >= value for name, value in self.before_fall.items())
