"""The last ten minutes of a target's engines for charts: a ring of points each, and what changed when.

Pure. A point is the engine's signals after one poll; polls closer together than a point is wide become
one. Unknown is NaN here and null in the JSON. One engine takes at most `MOST_BYTES`, and a target has
at most `MOST_ENGINES` of them, whatever its server prints.
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
# 600 points of one double and eight floats, with room that arrays keep for growing; and the events.
MOST_BYTES: Final = 48 * 1024
# Signal -> digits after the point in the JSON.
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
# Polls a little early still are the next point.
_STEP: Final = 0.9 * SECONDS / POINTS
_GAP: Final = dict.fromkeys(COLUMNS, math.nan)


class Change(NamedTuple):
    """A verdict that was entered, or a severity that changed."""

    t: float
    verdict: str
    severity: str


class Track:
    """One engine's last ten minutes.

    Attributes:
        times: of the points, in seconds of the readings' clock.
        columns: by signal, as long as `times`.
        changes: of the verdict; the first is the one that held when the ten minutes began.
        restarts: when new processes were seen.
    """

    __slots__ = ("_restarted", "changes", "columns", "restarts", "times")

    def __init__(self) -> None:
        self.times = array("d")
        self.columns = {name: array("f") for name in COLUMNS}
        self.changes: deque[Change] = deque(maxlen=MOST_EVENTS)
        self.restarts: deque[float] = deque(maxlen=MOST_EVENTS)
        self._restarted = 0

    def add(self, t: float, engine: EngineReading, max_age: float) -> None:
        """Take what is known of the engine after a poll."""
        if engine.seen_at == t:
            self._point(t, {name: getattr(engine.signals, name) for name in COLUMNS})
        elif engine.missing or t - engine.seen_at > max_age:
            self._gap(t)
        judgement = engine.judgement
        said = Change(t, judgement.verdict, judgement.severity.value)
        if not self.changes or self.changes[-1][1:] != said[1:]:
            self.changes.append(said)
        if engine.restarts > self._restarted:
            self.restarts.append(t)
        self._restarted = engine.restarts
        self._trim(t - SECONDS)

    def extent(self, name: str) -> tuple[float, float] | None:
        """Least and greatest known value of a column, None where nothing is known."""
        known = [value for value in self.columns[name] if not math.isnan(value)]
        return (min(known), max(known)) if known else None

    def as_object(self, start: float, points: int = POINTS) -> dict[str, Any]:
        """For JSON: the last points by column, with all events; times in seconds since `start`."""
        return {
            "t": [round(t - start, 1) for t in self.times[-points:]],
            **{
                name: [_number(value, digits) for value in self.columns[name][-points:]]
                for name, digits in COLUMNS.items()
            },
            "verdicts": [[round(t - start, 1), verdict, severity] for t, verdict, severity in self.changes],
            "restarts": [round(t - start, 1) for t in self.restarts],
        }

    def _point(self, t: float, values: Mapping[str, float | None]) -> None:
        again = bool(self.times) and t - self.times[-1] < _STEP and not self._ends_in_gap()
        if not again:
            self.times.append(t)
        for name, value in values.items():
            column, known = self.columns[name], math.nan if value is None else value
            if again:
                column[-1] = known
            else:
                column.append(known)

    def _gap(self, t: float) -> None:
        if self.times and not self._ends_in_gap():
            self.times.append(t)
            for name, column in self.columns.items():
                column.append(_GAP[name])

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
    """The tracks of one target.

    Attributes:
        start: time of the first reading, None before; times in the JSON count from it.
        tracks: by the engine's name, as `report.engine_names` gives it for the last reading.
    """

    def __init__(self) -> None:
        self.start: float | None = None
        self.tracks: dict[str, Track] = {}
        self._tracks: dict[tuple[str, str], Track] = {}

    def add(self, reading: TargetReading) -> None:
        """Take the reading after a poll; an engine that is forgotten there is forgotten here."""
        if self.start is None:
            self.start = reading.t
        kept: dict[tuple[str, str], Track] = {}
        named: dict[str, Track] = {}
        for name, engine in engine_names(reading).items():
            key = (engine.key.model, engine.key.name)  # names change when two models share one
            track = self._tracks.get(key)
            if track is None:
                if len(kept) >= MOST_ENGINES:
                    continue
                track = Track()
            kept[key] = named[name] = track
            track.add(reading.t, engine, reading.max_age)
        self._tracks, self.tracks = kept, named

    def as_object(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """For JSON: the engines of these names, or all."""
        start = self.start or 0.0
        chosen = self.tracks if names is None else {name: self.tracks.get(name) for name in names}
        return {name: track.as_object(start) for name, track in chosen.items() if track is not None}


def _number(value: float, digits: int) -> float | int | None:
    """As short as JSON can have it; what is no finite number is null."""
    if not math.isfinite(value):
        return None
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded
