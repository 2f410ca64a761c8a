"""Turns the polls of one target into readings, for a live server and a recording alike.

Keeps the state of the target between polls. Does no I/O and reads no clock: time is a parameter.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.engine import Engine, EngineReading
from exporter.analysis.forecast import EngineForecast
from exporter.analysis.imbalance import ImbalanceWatch
from exporter.analysis.load_profile import LoadProfile
from exporter.analysis.profiling import profile
from exporter.analysis.server_facts import ServerFacts, merge
from exporter.analysis.target_verdict import TargetJudgement, judge_target
from exporter.config import AnalysisConfig, Fact
from exporter.vllm.answers import NO_ANSWERS, ServerAnswers
from exporter.vllm.exposition import (
    MAX_ENGINES,
    CacheConfig,
    EngineKey,
    Exposition,
    ExpositionError,
    Reader,
)

__all__ = ["UNREADABLE", "EngineReading", "ModelReading", "Pipeline", "TargetReading"]

# The error of a body that is no metrics text.
UNREADABLE: Final = "unreadable_body"
# An engine that no good body had for this long is forgotten, with all its series.
FORGET_SECONDS: Final = 3600.0
# The most engines of one target, however its label sets change.
MAX_REMEMBERED: Final = MAX_ENGINES  # at least those of one page, or there would be no room for them
# Start times of the last processes: one that returns is another server behind the same address.
_REMEMBERED_PROCESSES: Final = 8
# A server whose polls fail is not unreachable before this number of them: a busy one misses some.
_PATIENCE_POLLS: Final = 4.5


@dataclass(frozen=True, slots=True)
class ModelReading:
    """Findings about the engines of one model together, and their fixes."""

    findings: tuple[str, ...]
    severity: Severity
    fixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TargetReading:
    """The state of a target after a poll."""

    t: float  # time of the poll
    up: bool  # whether this poll succeeded
    error: str | None  # why it failed, in one word; None if it succeeded
    good_at: float | None  # time of the last poll that succeeded, None before the first
    max_age: float  # seconds after which measured values are unknown
    judgement: TargetJudgement  # the target's own verdict
    restarts: int = 0  # new server processes seen; one process may have several engines
    unreadable: int = 0  # lines of known names in this body that are invalid, too long or too many
    # The known ones, in the order of their keys.
    engines: Mapping[EngineKey, EngineReading] = field(default_factory=dict)
    models: Mapping[str, ModelReading] = field(default_factory=dict)  # by name

    @property
    def severity(self) -> Severity:
        """The worst of the target, its engines and its models."""
        engines = (engine.judgement.severity for engine in self.engines.values())
        models = (model.severity for model in self.models.values())
        return max([self.judgement.severity, *engines, *models])


class Pipeline:
    """The state of one target; `restarts` counts the new server processes seen."""

    def __init__(
        self,
        analysis: AnalysisConfig,
        facts: Mapping[str, Fact],
        interval: float,
        arguments: Mapping[str, Fact] | None = None,
    ) -> None:
        """Start without history.

        Args:
            analysis: windows, ages and thresholds.
            facts: settings of the server from the configuration, by vLLM's flag names.
            interval: intended seconds between polls.
            arguments: settings from the server's argument line.
        """
        self.restarts = 0
        self._analysis = analysis
        self._facts = facts
        self._arguments = arguments
        self._interval = interval
        self._reader = Reader()
        self._engines: dict[EngineKey, Engine] = {}
        self._models: dict[str, ImbalanceWatch] = {}
        self._merged: dict[CacheConfig | None, ServerFacts] = {}
        self._merged_answers = NO_ANSWERS
        self._present = 0
        self._missing: frozenset[EngineKey] = frozenset()
        self._process: float | None = None  # start time on the last page that had one
        self._processes: deque[float] = deque(maxlen=_REMEMBERED_PROCESSES)
        self._failed = False  # since the last good poll
        self._started_at: float | None = None
        self._good_at: float | None = None
        self._verdict: str | None = None

    def set_interval(self, interval: float) -> None:
        """Set the seconds between polls from now on; a reading stays valid for three of them."""
        self._interval = interval

    def set_forecast(self, key: EngineKey, forecast: EngineForecast | None) -> None:
        """Rank the fixes of an engine by a forecast from its next poll on; ignored if it is gone."""
        if key in self._engines:
            self._engines[key].set_forecast(forecast)

    def reconsidered(self, reading: TargetReading) -> TargetReading:
        """Return the last reading with the fixes ranked by the forecasts that were set since."""
        engines = {
            key: self._engines[key].reconsidered() or engine for key, engine in reading.engines.items()
        }
        return replace(reading, engines=engines)

    def load(self, key: EngineKey) -> LoadProfile | None:
        """Compute the load profile of an engine; None without enough history."""
        engine = self._engines.get(key)
        if engine is None or engine.reading is None or key in self._missing or engine.ended:
            return None
        return profile(engine.history, engine.reading.signals.kv_capacity_tokens, self._analysis)

    def use(self, analysis: AnalysisConfig) -> None:
        """Judge by other thresholds from now on, with the same history."""
        self._analysis = analysis
        for engine in self._engines.values():
            engine.use(analysis)

    def loads(self) -> Mapping[EngineKey, LoadProfile]:
        """Compute the load profile of each engine with enough history."""
        loads = {key: self.load(key) for key in self._engines}
        return {key: load for key, load in loads.items() if load is not None}

    def feed(
        self, t: float, body: bytes | None, error: str | None = None, answers: ServerAnswers = NO_ANSWERS
    ) -> TargetReading:
        """Process one poll: a body, or the error.

        Args:
            t: time of the response; never less than before.
            body: of a response with status 200.
            error: in one word, when `body` is None.
            answers: the server's responses about its configuration so far.
        """
        self._started_at = t if self._started_at is None else self._started_at
        exposition = None
        if body is not None:
            try:
                exposition = self._reader.read(body)
            except ExpositionError:
                error = UNREADABLE
            else:
                self._good_at, error = t, None
                self._take(t, exposition, answers)
                self._failed = False
        else:
            error = error or "unknown"
        if exposition is None:
            self._failed = True
            for key, engine in self._engines.items():
                engine.mark_stale(t, self._max_age, missing=key in self._missing, answered=body is not None)
        unreadable = exposition.unreadable + exposition.dropped if exposition else 0
        return self._reading(t, error, answered=body is not None, unreadable=unreadable)

    @property
    def _max_age(self) -> float:
        return max(self._analysis.max_age, 3 * self._interval)

    def _take(self, t: float, exposition: Exposition, answers: ServerAnswers) -> None:
        before = self._engines.keys() - exposition.engines.keys()
        old = self._engines.keys() & exposition.engines.keys()
        for key, snapshot in exposition.engines.items():
            if key not in self._engines:
                self._make_room(exposition)
                self._engines[key] = Engine(self._analysis)
            self._engines[key].observe(t, snapshot, exposition.start_time, whole=not exposition.truncated)
        if len(self._engines) > len(before) + len(old):
            self._engines = dict(sorted(self._engines.items()))
        present = [
            key for key, engine in self._engines.items() if key in exposition.engines and not engine.gone
        ]
        self._end_old(t, exposition, present, another=bool(before) and not old)
        self._present = len(present)
        self._watch_models(present)
        for key in present:
            self._engines[key].judge(
                self._facts_of(exposition.engines[key].cache, answers),
                # All known engines share the block count, which vLLM sets at its start.
                sharing=sum(
                    other.replica == key.replica and not engine.ended
                    for other, engine in self._engines.items()
                ),
                lora=exposition.lora,
                imbalanced=self._models[key.model].imbalanced,
            )
        self._miss(t, present, truncated=exposition.truncated)

    def _make_room(self, exposition: Exposition) -> None:
        """Forget the engine that is missing for longest, if there are too many."""
        if len(self._engines) >= MAX_REMEMBERED:
            absent = (key for key in self._engines if key not in exposition.engines)
            del self._engines[min(absent, key=lambda key: self._engines[key].history.times[-1])]

    def _end_old(self, t: float, exposition: Exposition, present: list[EngineKey], *, another: bool) -> None:
        """Count a new process, and end the engines that it, or Ray, no longer has: nobody misses them.

        `another`: the page has only engines that the one before it did not have. That is another model at the
        same address, if the process is new too, or the server was away.
        """
        start = exposition.start_time
        moved = None not in (start, self._process) and start != self._process and start not in self._processes
        if start is not None and start != self._process:
            self._process = start
            self._processes.append(start)
        restarts = [self._engines[key].history.restart for key in present]
        # One process, whatever the number of its engines.
        new = any(restart is not None and restart.at == t for restart in restarts)
        new = new or (bool(present) and another and (moved or (start is None and self._failed)))
        self.restarts += new
        replicas = {key.replica for key in present}
        replicated = {key.model for key in present if key.replica}
        for key, engine in self._engines.items():
            # Ray restarts a replica under a new name: one that vanishes beside others is gone for good.
            replaced = bool(key.replica) and key.replica not in replicas and key.model in replicated
            if key not in exposition.engines and not exposition.truncated:
                engine.ended |= replaced or (new and (another or key.replica in replicas))

    def _watch_models(self, present: list[EngineKey]) -> None:
        models = {key.model for key in present}
        self._models = {model: self._models.get(model) or ImbalanceWatch() for model in models}
        for model, watch in self._models.items():
            histories = [self._engines[key].history for key in present if key.model == model]
            watch.observe(histories, self._analysis)

    def _miss(self, t: float, present: list[EngineKey], *, truncated: bool) -> None:
        """Mark the engines that a good body lacks as stale, and forget those that are gone for long.

        A truncated body proves nothing about the engines that it does not name.
        """
        absent = {key: engine for key, engine in self._engines.items() if key not in present}
        missing = frozenset(key for key, engine in absent.items() if not engine.ended)
        self._missing = missing if not truncated else self._missing & missing
        for key, engine in absent.items():
            if t - engine.history.times[-1] > FORGET_SECONDS:
                del self._engines[key]
            else:
                engine.mark_stale(t, self._max_age, missing=key in self._missing)

    def _facts_of(self, cache: CacheConfig | None, answers: ServerAnswers) -> ServerFacts:
        """Merge the settings of an engine's server, again only when one of the sources has changed."""
        if self._merged_answers is not answers or len(self._merged) >= MAX_REMEMBERED:
            self._merged_answers, self._merged = answers, {}
        facts = self._merged.get(cache)
        if facts is None:
            version = {} if answers.version is None else {"vllm_version": answers.version}
            facts = merge(self._facts, self._arguments, answers.server_info, answers.models, cache, version)
            self._merged[cache] = facts
        return facts

    def _reading(self, t: float, error: str | None, *, answered: bool, unreadable: int) -> TargetReading:
        grace = float(self._facts.get("startup_grace_seconds", self._analysis.startup_grace))
        judgement = judge_target(
            self._verdict,
            answered=answered,
            since_good=None if self._good_at is None else t - self._good_at,
            grace_left=grace - (t - (self._started_at or 0.0)),
            patience=max(self._analysis.max_age, _PATIENCE_POLLS * self._interval),
            engines=self._present if self._good_at == t else 0,
            missing=len(self._missing),
        )
        self._verdict = judgement.verdict
        engines = {
            key: engine.reading
            for key, engine in self._engines.items()
            if engine.reading is not None and not engine.gone
        }
        models = {name: _MODELS[watch.imbalanced] for name, watch in self._models.items()}
        return TargetReading(
            t=t,
            up=error is None,
            error=error,
            good_at=self._good_at,
            max_age=self._max_age,
            judgement=judgement,
            restarts=self.restarts,
            unreadable=unreadable,
            engines=engines,
            models=models,
        )


_IMBALANCE: Final = catalogue.load().findings["dp_imbalance"]
_MODELS: Final = {
    True: ModelReading((_IMBALANCE.name,), _IMBALANCE.severity, _IMBALANCE.fixes),
    False: ModelReading((), Severity.NONE, ()),
}
