"""Keeps the last ten minutes of a target's engines for the charts: points, changes of verdict, restarts.

A point has the engine's signals after one poll; polls closer together than `_STEP` share a point. Unknown is
NaN here and null in the JSON. One engine takes at most `MOST_BYTES`; a target keeps at most `MOST_ENGINES`.
Pure.
"""

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from exporter.analysis.pipeline import EngineReading, TargetReading
from exporter.publish.status import engine_names

__all__ = ["COLUMNS", "MOST_BYTES", "MOST_ENGINES", "POINTS", "SECONDS", "Change", "Timeline", "Track"]

SECONDS: Final = 600.0
POINTS: Final = 600
MOST_ENGINES: Final = 64
MOST_EVENTS: Final = 64
# 600 points of one double and eight floats, spare room of growing arrays, and the events.
MOST_BYTES: Final = 48 * 1024
# Signal -> digits after the decimal point in the JSON.
COLUMNS: Final[Mapping[str, int]] = {
    "kv_usage_ratio": 3,
    "kv_usage_max_ratio": 3,
    "preemptions_per_second": 2,
    "preemptions_inferred_per_second": 2,
    "requests_running": 0,
    "requests_waiting": 0,
    "generation_tokens_per_second": 1,
    "generation_tokens_per_second_recent": 1,
}
# A poll that comes a little early still makes the next point.
_STEP: Final = 0.9 * SECONDS / POINTS


class Change(NamedTuple):
    """A new verdict, or a new severity of the same verdict."""

    t: float
    verdict: str
    severity: str


class Track:
    """One engine's last ten minutes."""

    __slots__ = ("_restarted", "changes", "columns", "restarts", "times")

    def __init__(self) -> None:
        self.times = array("d")  # of the points, in seconds of the readings' clock
        self.columns = {name: array("f") for name in COLUMNS}  # values by signal, one per point
        # Of the verdict; the first one held when the ten minutes began.
        self.changes: deque[Change] = deque(maxlen=MOST_EVENTS)
        self.restarts: deque[float] = deque(maxlen=MOST_EVENTS)  # times of restarts
        self._restarted = 0

    def add(self, t: float, engine: EngineReading, max_age: float) -> None:
        """Add the engine's reading after a poll."""
        if engine.seen_at == t:
            self._add_point(t, engine)
        elif (engine.missing or t - engine.seen_at > max_age) and self.times and not self._ends_in_gap():
            self._add_unknown(t)
        judgement = engine.judgement
        change = Change(t, judgement.verdict, judgement.severity.value)
        if not self.changes or self.changes[-1][1:] != change[1:]:
            self.changes.append(change)
        if engine.restarts > self._restarted:
            self.restarts.append(t)
        self._restarted = engine.restarts
        self._trim(t - SECONDS)

    def extent(self, name: str) -> tuple[float, float] | None:
        """Return the least and the greatest known value of a column; None if all are unknown."""
        known = [value for value in self.columns[name] if not math.isnan(value)]
        return (min(known), max(known)) if known else None

    def as_object(self, start: float, points: int = POINTS) -> dict[str, Any]:
        """Return the last points by column, and all events, for JSON; times are in seconds since `start`."""
        return {
            "t": [round(t - start, 1) for t in self.times[-points:]],
            **{
                name: [_number(value, digits) for value in self.columns[name][-points:]]
                for name, digits in COLUMNS.items()
            },
            "verdicts": [[round(t - start, 1), verdict, severity] for t, verdict, severity in self.changes],
            "restarts": [round(t - start, 1) for t in self.restarts],
        }

    def _add_point(self, t: float, engine: EngineReading) -> None:
        if not self.times or t - self.times[-1] >= _STEP or self._ends_in_gap():
            self._add_unknown(t)
        for name, column in self.columns.items():
            value = getattr(engine.signals, name)
            column[-1] = math.nan if value is None else value

    def _add_unknown(self, t: float) -> None:
        self.times.append(t)
        for column in self.columns.values():
            column.append(math.nan)

    def _ends_in_gap(self) -> bool:
        return all(math.isnan(column[-1]) for column in self.columns.values())

    def _trim(self, oldest: float) -> None:
        cut = max(len(self.times) - POINTS, bisect_left(self.times, oldest))
        if cut > 0:
            del self.times[:cut]
            for column in self.columns.values():
                del column[:cut]
        while len(self.changes) > 1 and self.changes[1].t <= oldest:
            self.changes.popleft()
        while self.restarts and self.restarts[0] < oldest:
            self.restarts.popleft()


class Timeline:
    """The tracks of one target."""

    def __init__(self) -> None:
        # Time of the first reading, None before it; times in the JSON count from it.
        self.start: float | None = None
        self.tracks: dict[str, Track] = {}  # by the engine's name, as in `engine_names` of the last reading
        self._tracks: dict[tuple[str, str], Track] = {}

    def add(self, reading: TargetReading) -> None:
        """Add the reading after a poll; engines that are not in it are forgotten."""
        if self.start is None:
            self.start = reading.t
        kept: dict[tuple[str, str], Track] = {}
        named: dict[str, Track] = {}
        for name, engine in engine_names(reading).items():
            key = (engine.key.model, engine.key.name)  # names change when a second model has the same one
            track = self._tracks.get(key)
            if track is None:
                if len(kept) >= MOST_ENGINES:
                    continue
                track = Track()
            kept[key] = named[name] = track
            track.add(reading.t, engine, reading.max_age)
        self._tracks, self.tracks = kept, named

    def as_object(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the engines of these names, or all, for JSON."""
        start = self.start or 0.0
        chosen = self.tracks if names is None else {name: self.tracks.get(name) for name in names}
        return {name: track.as_object(start) for name, track in chosen.items() if track is not None}


def _number(value: float, digits: int) -> float | int | None:
    """Round a number and drop a fraction of 0; None if it is not finite."""
    if not math.isfinite(value):
        return None
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded
