"""Keeps the history, verdict and advice of one engine, and makes its reading after each poll. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.baseline import Baseline
from exporter.analysis.findings import findings
from exporter.analysis.fixes import Advice, advise
from exporter.analysis.forecast import EngineForecast
from exporter.analysis.gauge_hold import GaugeHold
from exporter.analysis.history import History
from exporter.analysis.kv_demand import KvContext, context_per_request, need
from exporter.analysis.measured import measured, refusal
from exporter.analysis.pace import PaceWatch
from exporter.analysis.preemption_cost import PreemptionCost, preemption_cost
from exporter.analysis.queue_causes import QueueCauses
from exporter.analysis.relief import gateway_limit
from exporter.analysis.server_facts import ServerFacts
from exporter.analysis.signals import Signals, Windows, compute, refused, stale
from exporter.analysis.situation import Situation
from exporter.analysis.verdicts import Judge, Judgement
from exporter.config import AnalysisConfig
from exporter.vllm.exposition import CacheConfig, EngineKey, LoraState, Snapshot

__all__ = ["ENGINE_VERDICTS", "Engine", "EngineReading"]

# All verdicts of an engine; the others are of a target only.
ENGINE_VERDICTS: Final = tuple(
    name for name in catalogue.load().verdicts if name not in {"starting", "reachable"}
)
# Advice and context follow means of a minute; while verdict and findings stay they are renewed this often.
RENEW_SECONDS: Final = 10.0
# An older forecast describes another load.
FORECAST_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The state of one engine after a poll."""

    key: EngineKey
    seen_at: float  # time of the last good body that had it
    missing: bool  # the last good body did not have it
    signals: Signals  # None is unknown, as are all measured ones once they are too old
    judgement: Judgement  # its verdict, with evidence
    untrusted: Mapping[str, str]
    duplicates: frozenset[str]
    cache: CacheConfig | None
    version: tuple[int, ...]
    # Polls per bucket of KV usage since the engine was first seen, one more than the bounds.
    kv_polls: tuple[int, ...]
    kv_sum: float  # sum of the polled usage
    restarts: int  # new processes seen behind this engine
    verdict_seconds: Mapping[str, float]  # seconds in each verdict since the engine was first seen
    findings: tuple[str, ...] = ()  # names of the facts beside the verdict
    advice: Advice = field(default_factory=Advice)  # what to change, and what will not help
    # Requests to allow at once at a gateway; None if unknown or of no use, infinite if a limit would cost
    # throughput by the forecast.
    gateway_limit: float | None = None
    # The known settings of its server, and their sources.
    server_facts: ServerFacts = field(default_factory=ServerFacts)
    # Demand / capacity by resource (``kv``, ``seats``); unknown ones are left out.
    saturation: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, float] = field(default_factory=dict)  # requests/s of its server, by the limit
    forecast: EngineForecast | None = None  # the last one, which the advice rests on if it is trusted

    @property
    def cost(self) -> PreemptionCost:
        """What preemptions cost, by a trusted forecast."""
        return preemption_cost(self.judgement.verdict, self.forecast, self.server_facts)

    @property
    def measured(self) -> tuple[str, ...]:
        """Sentences in numbers: what the readings prove, and what a forecast says that preemptions cost."""
        cost = self.cost.sentence
        said = (*measured(self.judgement.verdict, self.signals), refusal(self.refused), cost)
        return tuple(filter(None, said))


class Engine:
    """One engine: its history, and its last reading, which is None before the first poll was judged."""

    def __init__(self, thresholds: AnalysisConfig) -> None:
        """Start with an empty history."""
        self.history = History()
        self.reading: EngineReading | None = None
        # Whether its server is known to run no more; its counters go on if it comes back.
        self.ended = False
        self.use(thresholds)
        self._baseline = Baseline()
        self._pace = PaceWatch()
        self._hold = GaugeHold()
        self._causes = QueueCauses()
        self._judge = Judge()
        self._t: float | None = None
        self._verdict_seconds = dict.fromkeys(ENGINE_VERDICTS, 0.0)
        self._advice = Advice()
        self._gateway_limit: float | None = None
        self._context: KvContext | None = None
        self._renewed_for: object = None
        self._renewed_at = 0.0
        self._advise: Callable[[], tuple[Advice, float | None]] | None = None
        self._forecast: EngineForecast | None = None

    def use(self, thresholds: AnalysisConfig) -> None:
        """Judge by these thresholds from now on."""
        self._thresholds = thresholds
        self._windows = Windows(thresholds.window, thresholds.long_window)

    def observe(self, t: float, snapshot: Snapshot, start_time: float | None, *, whole: bool) -> None:
        """Add one body; `judge` follows when all engines have theirs."""
        if self.ended:
            self.ended, self._t = False, None  # the time away belongs to no verdict
        snapshot = self._hold.fill(t, snapshot)
        self.history.observe(t, snapshot, start_time, whole=whole)
        frozen = self._judge.verdict in _FREEZING
        self._baseline.observe(self.history, frozen=frozen)
        self._pace.observe(self.history, frozen=frozen)

    def set_forecast(self, forecast: EngineForecast | None) -> None:
        """Rank the fixes by a forecast from the next poll on, or by cost without one."""
        self._forecast, self._renewed_for = forecast, None

    def reconsidered(self) -> EngineReading | None:
        """Return the last reading with the fixes ranked by the forecast that was set since."""
        if self.reading is None or self._advise is None or self.reading.missing:
            return self.reading
        advice, limit = self._advise()
        return replace(self.reading, advice=advice, gateway_limit=limit, forecast=self._forecast)

    @property
    def gone(self) -> bool:
        """Whether it has ended, or only counters that stand still are left of it."""
        return self.ended or self._hold.gone

    def judge(
        self, server_facts: ServerFacts, *, sharing: int, lora: LoraState | None, imbalanced: bool
    ) -> None:
        """Make the reading after a good body that had this engine.

        `sharing` data-parallel engines share the block count of the server. With `imbalanced` one engine of
        the model carries far more than its share.
        """
        history = self.history
        t = history.times[-1]
        self._spend(t)
        signals = compute(
            history, server_facts.facts, engines=sharing, windows=self._windows, level=self._baseline.level
        )
        situation = Situation(
            history, signals, self._baseline, server_facts.facts, self._thresholds, lora, self._pace
        )
        situation.queue_cause = self._causes.observe(situation)
        judgement = self._judge.judge(situation)
        names = findings(situation)
        self._renew(situation, judgement.verdict, names, imbalanced=imbalanced)
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
            findings=names,
            advice=self._advice,
            gateway_limit=self._gateway_limit,
            server_facts=server_facts,
            saturation=_saturation(situation, self._context),
            refused=self._refused(signals),
            forecast=self._forecast,
        )

    def _refused(self, signals: Signals) -> dict[str, float]:
        refuses = bool(signals.requests_refused_per_second)
        return refused(self.history, self.history.recent_start(self._windows.short)) if refuses else {}

    def mark_stale(self, t: float, max_age: float, *, missing: bool, answered: bool = False) -> None:
        """Renew the reading after a poll without data of this engine: it stays as it is until it is too old.

        A body that lacks the engine invalidates the old values at once; a failed poll does not. After a
        response that is no metrics text (`answered`) the metrics are missing, but the server is reachable.
        """
        reading = self.reading
        if reading is None or self.ended:
            return
        self._spend(t)
        if missing or t - reading.seen_at > max_age:
            judgement = self._judge.gone(t) if missing or answered else self._judge.lost(t)
            reading = replace(
                reading,
                missing=missing,
                signals=stale(reading.signals),
                judgement=judgement,
                findings=(),
                advice=Advice(),
                gateway_limit=None,
                saturation={},
                forecast=None,
            )
        self.reading = replace(reading, verdict_seconds=self._verdict_seconds)

    def _spend(self, t: float) -> None:
        """Add the time since the last poll to the verdict of that time."""
        verdict = self._judge.verdict
        if self._t is not None and verdict is not None and t > self._t:
            # A new mapping, because earlier readings keep theirs.
            spent = self._verdict_seconds
            self._verdict_seconds = {**spent, verdict: spent[verdict] + t - self._t}
        self._t = t

    def _renew(self, s: Situation, verdict: str, names: tuple[str, ...], *, imbalanced: bool) -> None:
        """Renew advice and context, which follow the load slowly, when a reason or their time has come."""
        made, restart = self._forecast, self.history.restart
        of_old_process = made is not None and restart is not None and restart.at > made.at
        if made is not None and (of_old_process or s.t - made.at > FORECAST_SECONDS):
            self.set_forecast(None)
        reason = (verdict, names, imbalanced, s.server_facts)
        self._advise = partial(self._advice_of, s, verdict, names, imbalanced=imbalanced)
        if reason != self._renewed_for or s.t - self._renewed_at >= RENEW_SECONDS:
            self._advice, self._gateway_limit = self._advise()
            self._context = context_per_request(s)
            self._renewed_for, self._renewed_at = reason, s.t

    def _advice_of(
        self, s: Situation, verdict: str, names: tuple[str, ...], *, imbalanced: bool
    ) -> tuple[Advice, float | None]:
        """Return what to change, and the limit for a gateway."""
        advice = advise(s, verdict, names, imbalanced=imbalanced, forecast=self._forecast)
        return advice, gateway_limit(s, verdict, self._forecast)


# An engine in these verdicts does not update its own baseline.
_FREEZING: Final = frozenset({"preemption_thrash", "engine_stalled", "scheduler_deadlock", "decode_slow"})


def _saturation(s: Situation, context: KvContext | None) -> dict[str, float]:
    """Return demand / capacity over the window of rates; a healthy full engine is below 1."""
    known = {
        "kv": need(s, context),
        "seats": s.demand / s.seats if s.seats and s.demand is not None else None,
    }
    return {name: value for name, value in known.items() if value is not None}
