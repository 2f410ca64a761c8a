"""One target's way from body to reading: the same for a live server and for a recording.

Holds what is remembered of the target between polls. Does no I/O and reads no clock: whoever feeds it
says what time it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from exporter.analysis.history import History
from exporter.analysis.signals import Signals, Windows, compute, stale
from exporter.config import AnalysisConfig
from exporter.vllm.exposition import CacheConfig, EngineKey, Exposition, ExpositionError, Reader

__all__ = ["UNREADABLE", "EngineReading", "Pipeline", "TargetReading"]

# The name of the error of a body that is no metrics text.
UNREADABLE: Final = "unreadable_body"
# An engine that was in no good body for this long is forgotten, with all its series.
FORGET_SECONDS: Final = 3600.0
# More engines than this are never remembered for one target, however its label sets change.
MAX_REMEMBERED: Final = 256


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What is known of one engine after a poll.

    Attributes:
        seen_at: time of the last good body that had it.
        missing: the last good body did not have it.
        signals: None values are unknown; all measured ones are once they are too old.
        kv_polls: polls by KV usage since the engine was first seen, one more than the histogram's bounds.
        kv_sum: sum of the polled usage.
        restarts: new processes seen behind this engine.
    """

    key: EngineKey
    seen_at: float
    missing: bool
    signals: Signals
    untrusted: Mapping[str, str]
    duplicates: frozenset[str]
    cache: CacheConfig | None
    version: tuple[int, ...]
    kv_polls: tuple[int, ...]
    kv_sum: float
    restarts: int


@dataclass(frozen=True, slots=True)
class TargetReading:
    """What is known of a target after a poll.

    Attributes:
        t: time of the poll.
        up: whether this poll succeeded.
        error: why it did not, a word; None when it did.
        good_at: time of the last poll that succeeded, None before the first.
        max_age: seconds after which measured values are unknown.
        unreadable: lines of known names in this body that could not be read.
        engines: those known, in the order of their keys.
    """

    t: float
    up: bool
    error: str | None
    good_at: float | None
    max_age: float
    unreadable: int = 0
    engines: Mapping[EngineKey, EngineReading] = field(default_factory=dict)


class Pipeline:
    """What is remembered of one target.

    Attributes:
        facts: what is known of the server by vLLM's flag names.
    """

    def __init__(self, analysis: AnalysisConfig, facts: Mapping[str, object], interval: float) -> None:
        """Begin with nothing known.

        Args:
            analysis: windows and ages.
            facts: what the operator told of the server.
            interval: seconds between polls, as intended.
        """
        self.facts = facts
        self._least_age = analysis.max_age
        self._max_age = 0.0
        self.paced(interval)
        self._windows = Windows(analysis.window, analysis.long_window)
        self._reader = Reader()
        self._histories: dict[EngineKey, History] = {}
        self._engines: dict[EngineKey, EngineReading] = {}
        self._good_at: float | None = None

    def paced(self, interval: float) -> None:
        """Say that polls are `interval` seconds apart from now on: a reading holds for three of them."""
        self._max_age = max(self._least_age, 3 * interval)

    def feed(self, t: float, body: bytes | None, error: str | None = None) -> TargetReading:
        """Take the outcome of one poll: a body, or the reason why there is none.

        Args:
            t: when it was there; never less than before.
            body: of an answer with status 200.
            error: a word, when `body` is None.
        """
        if body is not None:
            try:
                exposition = self._reader.read(body)
            except ExpositionError:
                error = UNREADABLE
            else:
                self._good_at = t
                self._take(t, exposition)
                return TargetReading(
                    t, True, None, t, self._max_age, exposition.unreadable, engines=self._engines
                )
        self._engines = {key: self._aged(t, engine) for key, engine in self._engines.items()}
        return TargetReading(
            t, False, error or "unknown", self._good_at, self._max_age, engines=self._engines
        )

    def _take(self, t: float, exposition: Exposition) -> None:
        engines = {}
        for key, snapshot in exposition.engines.items():
            history = self._histories.get(key)
            if history is None:
                if len(self._histories) >= MAX_REMEMBERED:
                    continue
                history = self._histories[key] = History()
            history.observe(t, snapshot, exposition.start_time, whole=not exposition.truncated)
            sharing = sum(1 for other in exposition.engines if other.replica == key.replica)
            engines[key] = self._reading(t, key, history, sharing)
        for key, engine in self._engines.items():
            if key in engines:
                continue
            if t - engine.seen_at > FORGET_SECONDS:
                del self._histories[key]
            else:
                engines[key] = self._aged(t, engine, missing=True)
        self._engines = dict(sorted(engines.items())) if len(engines) > 1 else engines

    def _reading(self, t: float, key: EngineKey, history: History, sharing: int) -> EngineReading:
        snapshot = history.snapshot
        assert snapshot is not None  # noqa: S101 (it was observed a line above)
        return EngineReading(
            key=key,
            seen_at=t,
            missing=False,
            signals=compute(history, self.facts, engines=sharing, windows=self._windows),
            untrusted=snapshot.untrusted,
            duplicates=snapshot.duplicates,
            cache=snapshot.cache,
            version=snapshot.version,
            kv_polls=tuple(history.kv_polls),
            kv_sum=history.kv_sum,
            restarts=history.restarts,
        )

    def _aged(self, t: float, engine: EngineReading, *, missing: bool | None = None) -> EngineReading:
        """An engine without a new body: as it was, until its values are too old."""
        missing = engine.missing if missing is None else missing
        # A body that lacks the engine says that its old values no longer hold; a failed poll says nothing.
        expired = missing or t - engine.seen_at > self._max_age
        if not expired and missing == engine.missing:
            return engine
        return replace(engine, missing=missing, signals=stale(engine.signals) if expired else engine.signals)
