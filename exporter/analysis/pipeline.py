"""One target's way from body to reading: the same for a live server and for a recording.

Holds what is remembered of the target between polls. Does no I/O and reads no clock: whoever feeds it
says what time it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.engine import Engine, EngineReading
from exporter.analysis.imbalance import ModelWatch
from exporter.analysis.load_profile import Observed, observe
from exporter.analysis.server_facts import Limits, merge
from exporter.analysis.target_verdict import TargetJudgement, TargetState, judge_target
from exporter.config import AnalysisConfig, Fact
from exporter.vllm.answers import NO_ANSWERS, ServerAnswers
from exporter.vllm.exposition import CacheConfig, EngineKey, Exposition, ExpositionError, Reader

__all__ = ["UNREADABLE", "EngineReading", "ModelReading", "Pipeline", "TargetReading"]

# The name of the error of a body that is no metrics text.
UNREADABLE: Final = "unreadable_body"
# An engine that was in no good body for this long is forgotten, with all its series.
FORGET_SECONDS: Final = 3600.0
# More engines than this are never remembered for one target, however its label sets change.
MAX_REMEMBERED: Final = 256
_IMBALANCE: Final = "dp_imbalance"


@dataclass(frozen=True, slots=True)
class ModelReading:
    """What is known of a model as a whole: findings about its engines together, and what to do."""

    findings: tuple[str, ...]
    severity: Severity
    fixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TargetReading:
    """What is known of a target after a poll.

    Attributes:
        t: time of the poll.
        up: whether this poll succeeded.
        error: why it did not, a word; None when it did.
        good_at: time of the last poll that succeeded, None before the first.
        max_age: seconds after which measured values are unknown.
        judgement: the target's own verdict.
        restarts: new server processes seen; one process may be behind several engines.
        unreadable: lines of known names in this body that could not be read, or were too long or too many.
        engines: those known, in the order of their keys.
        models: by name.
    """

    t: float
    up: bool
    error: str | None
    good_at: float | None
    max_age: float
    judgement: TargetJudgement
    restarts: int = 0
    unreadable: int = 0
    engines: Mapping[EngineKey, EngineReading] = field(default_factory=dict)
    models: Mapping[str, ModelReading] = field(default_factory=dict)


class Pipeline:
    """What is remembered of one target.

    Attributes:
        restarts: how many new processes were seen behind the target; changes when one starts anew.
    """

    def __init__(
        self,
        analysis: AnalysisConfig,
        facts: Mapping[str, Fact],
        interval: float,
        arguments: Mapping[str, Fact] | None = None,
    ) -> None:
        """Begin with nothing known.

        Args:
            analysis: windows, ages and thresholds.
            facts: what the operator told of the server, by vLLM's flag names.
            interval: seconds between polls, as intended.
            arguments: what was read of the server's argument line.
        """
        self.restarts = 0
        self._analysis = analysis
        self._facts = facts
        self._arguments = arguments
        self._interval = interval
        self._reader = Reader()
        self._engines: dict[EngineKey, Engine] = {}
        self._models: dict[str, ModelWatch] = {}
        self._limits: dict[CacheConfig | None, Limits] = {}
        self._limits_from = NO_ANSWERS
        self._present = 0
        self._missing: frozenset[EngineKey] = frozenset()
        self._started_at: float | None = None
        self._good_at: float | None = None
        self._verdict: str | None = None

    def paced(self, interval: float) -> None:
        """Say that polls are `interval` seconds apart from now on: a reading holds for three of them."""
        self._interval = interval

    def loads(self) -> Mapping[EngineKey, Observed]:
        """What was asked lately of each engine that is known well enough; computed when it is asked for."""
        loads = {}
        for key, engine in self._engines.items():
            if engine.reading is not None and key not in self._missing:
                seen = observe(engine.history, engine.reading.signals.kv_capacity_tokens, self._analysis)
                if seen is not None:
                    loads[key] = seen
        return loads

    def feed(
        self, t: float, body: bytes | None, error: str | None = None, answers: ServerAnswers = NO_ANSWERS
    ) -> TargetReading:
        """Take the outcome of one poll: a body, or the reason why there is none.

        Args:
            t: when it was there; never less than before.
            body: of an answer with status 200.
            error: a word, when `body` is None.
            answers: those of the server about its configuration, as far as they are known.
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
        else:
            error = error or "unknown"
        if exposition is None:
            for key, engine in self._engines.items():
                engine.age(t, self._max_age, missing=key in self._missing, answered=body is not None)
        unreadable = exposition.unreadable + exposition.dropped if exposition else 0
        return self._reading(t, error, answered=body is not None, unreadable=unreadable)

    @property
    def _max_age(self) -> float:
        return max(self._analysis.max_age, 3 * self._interval)

    def _take(self, t: float, exposition: Exposition, answers: ServerAnswers) -> None:
        for key, snapshot in exposition.engines.items():
            if key not in self._engines:
                if len(self._engines) >= MAX_REMEMBERED:
                    continue
                self._engines[key] = Engine(self._analysis)
                self._engines = dict(sorted(self._engines.items()))
            self._engines[key].observe(t, snapshot, exposition.start_time, whole=not exposition.truncated)
        present = [key for key in self._engines if key in exposition.engines]
        fresh = any(_just_restarted(self._engines[key], t) for key in present)
        self.restarts += fresh  # one process, however many engines it has
        self._present = len(present)
        self._watch_models(present)
        for key in present:
            self._engines[key].judge(
                self._limits_of(exposition.engines[key].cache, answers),
                sharing=self._sharing(key),
                lora=exposition.lora,
                imbalanced=self._models[key.model].imbalanced,
            )
        self._miss(t, exposition)

    def _watch_models(self, present: list[EngineKey]) -> None:
        models = {key.model for key in present}
        self._models = {model: self._models.get(model) or ModelWatch() for model in models}
        for model, watch in self._models.items():
            watch.observe(
                [self._engines[key].history for key in present if key.model == model], self._analysis
            )

    def _miss(self, t: float, exposition: Exposition) -> None:
        """Age the engines that a good body lacks, and forget those that have been gone for long.

        A body that was cut off says nothing of the engines it does not name.
        """
        absent = {key: engine for key, engine in self._engines.items() if key not in exposition.engines}
        self._missing = frozenset(absent) if not exposition.truncated else self._missing & frozenset(absent)
        for key, engine in absent.items():
            if t - engine.history.times[-1] > FORGET_SECONDS:
                del self._engines[key]
            else:
                engine.age(t, self._max_age, missing=key in self._missing)

    def _sharing(self, key: EngineKey) -> int:
        """Engines that share the server's block count: all that are remembered, for it is told at start."""
        return sum(1 for other in self._engines if other.replica == key.replica)

    def _limits_of(self, cache: CacheConfig | None, answers: ServerAnswers) -> Limits:
        """What is known of an engine's configuration; computed anew only when one of the sources changes."""
        if self._limits_from is not answers or len(self._limits) >= MAX_REMEMBERED:
            self._limits_from, self._limits = answers, {}
        limits = self._limits.get(cache)
        if limits is None:
            version = {} if answers.version is None else {"vllm_version": answers.version}
            limits = merge(self._facts, self._arguments, answers.server_info, answers.models, cache, version)
            self._limits[cache] = limits
        return limits

    def _reading(self, t: float, error: str | None, *, answered: bool, unreadable: int) -> TargetReading:
        judgement = judge_target(self._state(t, answered=answered), self._verdict)
        self._verdict = judgement.verdict
        engines = {key: engine.reading for key, engine in self._engines.items() if engine.reading is not None}
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

    def _state(self, t: float, *, answered: bool) -> TargetState:
        grace = self._facts.get("startup_grace_seconds", self._analysis.startup_grace)
        return TargetState(
            answered=answered,
            since_good=None if self._good_at is None else t - self._good_at,
            since_start=t - (self._started_at or 0.0),
            grace=float(grace),
            patience=max(self._analysis.max_age, 2 * self._interval),
            engines=self._present if self._good_at == t else 0,
            missing=len(self._missing),
        )


def _just_restarted(engine: Engine, t: float) -> bool:
    restart = engine.history.restart
    return restart is not None and restart.at == t


def _model(name: str) -> ModelReading:
    finding = catalogue.load().findings[name]
    return ModelReading((finding.name,), finding.severity, finding.fixes)


_MODELS: Final = {True: _model(_IMBALANCE), False: ModelReading((), Severity.NONE, ())}
