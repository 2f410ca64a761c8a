"""One engine between polls: its history, its verdict, what is advised; and its reading after each poll.

Does no I/O and reads no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.baseline import Baseline
from exporter.analysis.findings import findings
from exporter.analysis.fixes import Advised, advise
from exporter.analysis.history import History
from exporter.analysis.kv_demand import Held, held_context, need
from exporter.analysis.server_facts import Limits
from exporter.analysis.signals import Signals, Windows, compute, stale
from exporter.analysis.situation import Situation, describe
from exporter.analysis.verdicts import Judge, Judgement
from exporter.config import AnalysisConfig
from exporter.vllm.exposition import CacheConfig, EngineKey, LoraState, Snapshot

__all__ = ["ENGINE_VERDICTS", "Engine", "EngineReading"]

# All verdicts that an engine may have; starting is of a target whose engines nobody has seen.
ENGINE_VERDICTS: Final = tuple(name for name in catalogue.load().verdicts if name != "starting")
# Numbers that follow the load are means of a minute; while verdict and findings stay they are renewed
# this often.
RENEW_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What is known of one engine after a poll.

    Attributes:
        seen_at: time of the last good body that had it.
        missing: the last good body did not have it.
        signals: None values are unknown; all measured ones are once they are too old.
        judgement: its verdict, with evidence.
        findings: facts beside the verdict.
        advised: what to change, and what will not help.
        limits: what is known of its configuration, and from where.
        saturation: need by resource (``kv``, ``seats``), 1 is full; what is unknown is left out.
        verdict_seconds: time in each verdict since the engine was first seen.
        kv_polls: polls by KV usage since the engine was first seen, one more than the histogram's bounds.
        kv_sum: sum of the polled usage.
        restarts: new processes seen behind this engine.
    """

    key: EngineKey
    seen_at: float
    missing: bool
    signals: Signals
    judgement: Judgement
    untrusted: Mapping[str, str]
    duplicates: frozenset[str]
    cache: CacheConfig | None
    version: tuple[int, ...]
    kv_polls: tuple[int, ...]
    kv_sum: float
    restarts: int
    verdict_seconds: Mapping[str, float]
    findings: tuple[str, ...] = ()
    advised: Advised = field(default_factory=Advised)
    limits: Limits = field(default_factory=Limits)
    saturation: Mapping[str, float] = field(default_factory=dict)


class Engine:
    """What is remembered of one engine.

    Attributes:
        history: its past.
        reading: the last reading, None before the first poll was judged.
    """

    def __init__(self, thresholds: AnalysisConfig) -> None:
        """Begin with nothing known."""
        self.history = History()
        self.reading: EngineReading | None = None
        self._thresholds = thresholds
        self._windows = Windows(thresholds.window, thresholds.long_window)
        self._baseline = Baseline()
        self._judge = Judge()
        self._limits = Limits()
        self._t: float | None = None
        self._verdict_seconds = dict.fromkeys(ENGINE_VERDICTS, 0.0)
        self._advised = Advised()
        self._held: Held | None = None
        self._advised_for: object = None
        self._advised_at = 0.0

    def observe(self, t: float, snapshot: Snapshot, start_time: float | None, *, whole: bool) -> None:
        """Take what one body says of this engine; `judge` follows when all engines have taken it."""
        self.history.observe(t, snapshot, start_time, whole=whole)
        self._baseline.observe(self.history, frozen=self._judge.verdict in _FREEZING)

    def judge(
        self, limits: Limits, *, sharing: int, lora: LoraState | None, imbalanced: bool
    ) -> EngineReading:
        """The reading after a good body that had this engine.

        Args:
            limits: what is known of its configuration.
            sharing: data-parallel engines that share the block count of the server.
            lora: the server's adapters.
            imbalanced: whether the model's engines share their load badly.
        """
        history = self.history
        t = history.times[-1]
        self._spend(t)
        signals = compute(
            history, limits.facts, engines=sharing, windows=self._windows, level=self._baseline.level
        )
        situation = describe(history, signals, self._baseline, limits.facts, self._thresholds, lora)
        judgement = self._judge.judge(situation)
        found = findings(situation)
        self._renew(situation, judgement.verdict, found, imbalanced=imbalanced)
        snapshot = history.snapshot
        assert snapshot is not None  # noqa: S101 (it was observed before)
        self.reading = EngineReading(
            key=snapshot.key,
            seen_at=t,
            missing=False,
            signals=signals,
            judgement=judgement,
            untrusted=snapshot.untrusted,
            duplicates=snapshot.duplicates,
            cache=snapshot.cache,
            version=snapshot.version,
            kv_polls=tuple(history.kv_polls),
            kv_sum=history.kv_sum,
            restarts=history.restarts,
            verdict_seconds=self._verdict_seconds,
            findings=found,
            advised=self._advised,
            limits=limits,
            saturation=_saturation(situation, self._held),
        )
        return self.reading

    def age(self, t: float, max_age: float, *, missing: bool, answered: bool = False) -> EngineReading | None:
        """The reading after a poll that brought nothing of this engine: as it was, until it is too old.

        A body that lacks the engine says at once that its old values no longer hold; a failed poll
        says nothing. An answer that is no metrics text says no more, but it is one: the server is there,
        its metrics are not. None where there is no reading yet.
        """
        reading = self.reading
        if reading is None:
            return None
        self._spend(t)
        if missing or t - reading.seen_at > max_age:
            judgement = self._judge.gone(t) if missing or answered else self._judge.lost(t)
            reading = replace(
                reading,
                missing=missing,
                signals=stale(reading.signals),
                judgement=judgement,
                findings=(),
                advised=Advised(),
                saturation={},
            )
        self.reading = replace(reading, verdict_seconds=self._verdict_seconds)
        return self.reading

    def _spend(self, t: float) -> None:
        """Add the time since the last poll to the verdict that was held meanwhile."""
        verdict = self._judge.verdict
        if self._t is not None and verdict is not None and t > self._t:
            # A new mapping, because readings that were given away keep theirs.
            spent = self._verdict_seconds
            self._verdict_seconds = {**spent, verdict: spent[verdict] + t - self._t}
        self._t = t

    def _renew(self, s: Situation, verdict: str, found: tuple[str, ...], *, imbalanced: bool) -> None:
        """Compute anew what follows the load slowly: the advice, and what a request holds."""
        wanted = (verdict, found, imbalanced, s.server_facts)
        if wanted != self._advised_for or s.t - self._advised_at >= RENEW_SECONDS:
            self._advised = advise(s, verdict, found, imbalanced=imbalanced)
            self._held = held_context(s)
            self._advised_for, self._advised_at = wanted, s.t


# An engine in these does not set its own standard.
_FREEZING: Final = frozenset({"preemption_thrash", "engine_stalled", "scheduler_deadlock", "decode_slow"})


def _saturation(s: Situation, held: Held | None) -> dict[str, float]:
    """Need by resource over the window of rates, for autoscalers; full and fine is below 1."""
    known = {
        "kv": need(s, held),
        "seats": s.requests / s.seats if s.seats and s.requests is not None else None,
    }
    return {name: value for name, value in known.items() if value is not None}
