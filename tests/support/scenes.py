"""Plays scenarios of a few lines, second by second, through the whole pipeline.

    stage = Stage(cache={"kv_cache_size_tokens": 100_000}, max_num_seqs=64)
    stage.play(120, running=20, kv=0.5, tokens=600, finished=1)
    storm = stage.play(60, running=14, waiting=6, kv=0.98, tokens=250, finished=0.3, preemptions=1.5)
    assert verdicts(storm[10:]) == {"preemption_thrash"}

A gauge is a number, a counter a rate per second, and either may be a function of the seconds since the
start of the scene. Counters are whole numbers and continue from scene to scene, as in a real server.
"""

from collections.abc import Callable, Iterable, Mapping

from exporter.analysis.fixes import FixAdvice
from exporter.analysis.pipeline import EngineReading, ModelReading, Pipeline, TargetReading
from exporter.analysis.situation import Situation
from exporter.config import AnalysisConfig
from support.bodies import body, engine

Part = float | Callable[[float], float] | None

GAUGES = ("running", "waiting", "kv", "capacity", "deferred")
# Parameter of a scene for a counter -> the parameter of `bodies.engine`.
RATES = {
    "tokens": "generation_tokens",
    "prompts": "prompt_tokens",
    "finished": "finished",
    "preemptions": "preemptions",
    "steps": "steps",
}
# Means in seconds, of every token and of every finished request.
MEANS = ("inter_token", "queue")
LENGTHS = ("prompt_lengths", "output_lengths")
IDLE = {"running": 0, "waiting": 0, "kv": 0, "tokens": 0, "finished": 0}


class Player:
    """One engine with its counters."""

    def __init__(self, name: str, model: str, cache: Mapping[str, object] | None, absent: Iterable[str]):
        self.name, self.model, self.cache, self.absent = name, model, cache, frozenset(absent)
        self.counted = dict.fromkeys(RATES, 0.0)
        self.sums = dict.fromkeys(MEANS, 0.0)

    def step(self, t: float, seconds: float, part: Mapping[str, Part]):
        """Advance by some seconds, and return the values of the exposition then."""
        unknown = part.keys() - {*GAUGES, *RATES, *MEANS, *LENGTHS}
        assert not unknown, f"wanted parts of a scene, got {sorted(unknown)}"
        now = {name: one(t) if callable(one) else one for name, one in part.items() if name not in LENGTHS}
        rates = {"preemptions": 0.0, "prompts": 2 * (now.get("tokens") or 0.0), **now}
        rates.setdefault("steps", min(50.0, rates.get("tokens") or 0.0))
        before = {name: int(value) for name, value in self.counted.items()}
        for name in RATES:
            self.counted[name] += (rates.get(name) or 0.0) * seconds
        count = {name: float(int(value + 1e-6)) for name, value in self.counted.items()}
        # A mean covers the events of this step.
        self.sums["inter_token"] += (now.get("inter_token") or 0.03) * (count["tokens"] - before["tokens"])
        self.sums["queue"] += (now.get("queue") or 0.01) * (count["finished"] - before["finished"])
        shown = {name: now[name] for name in GAUGES if now.get(name) is not None}
        shown |= {parameter: count[name] for name, parameter in RATES.items()}
        shown |= {
            "inter_token": (self.sums["inter_token"], count["tokens"]),
            "queue": (self.sums["queue"], count["finished"]),
        }
        shown |= {name: part[name] for name in LENGTHS if name in part}
        known = {name: value for name, value in shown.items() if name not in self.absent}
        return engine(self.name, model=self.model, cache=self.cache, **known)


class Stage:
    """A watched server.

    Attributes:
        now: seconds since the first poll.
        readings: one after each poll.
    """

    def __init__(
        self,
        *,
        interval: float = 1.0,
        engines: Iterable[str] = ("0",),
        model: str = "demo-7b",
        cache: Mapping[str, object] | None = None,
        spell: Callable[[bytes], bytes] | None = None,
        absent: Iterable[str] = (),
        thresholds: AnalysisConfig | None = None,
        **facts: object,
    ) -> None:
        self.interval = interval
        self.pipeline = Pipeline(thresholds or AnalysisConfig(), facts, interval)
        self.now = 0.0
        self.readings: list[TargetReading] = []
        self.process = 1_700_000_000.0
        self.players: dict[str, Player] = {}
        self._new = lambda: {name: Player(name, model, cache, absent) for name in engines}
        self._spell = spell or (lambda text: text)
        self.players = self._new()

    def play(
        self, seconds: float, parts: Mapping[str, Mapping[str, Part]] | None = None, **part: Part
    ) -> list[TargetReading]:
        """Play a scene: each engine has its part, or all have the part given by keywords.

        An engine without a part is not in the bodies.
        """
        begin, scene = self.now, []
        given = parts if parts is not None else dict.fromkeys(self.players, part)
        while self.now < begin + seconds - 1e-9:
            t = self.now - begin
            text = body(
                *(self.players[name].step(t, self.interval, {**IDLE, **one}) for name, one in given.items()),
                start_time=self.process,
            )
            scene.append(self.take(self._spell(text)))
        return scene

    def fail(self, seconds: float, error: str = "connection_refused") -> list[TargetReading]:
        """Fail all polls for some time."""
        begin, scene = self.now, []
        while self.now < begin + seconds - 1e-9:
            scene.append(self.take(None, error))
        return scene

    def take(self, text: bytes | None, error: str | None = None) -> TargetReading:
        """Feed one poll, successful or not."""
        reading = self.pipeline.feed(self.now, text, error)
        self.readings.append(reading)
        self.now += self.interval
        return reading

    def restart(self) -> None:
        """Start a new process: its counters start at zero."""
        self.process += 100.0
        self.players = self._new()


# Results of a scene.


def engine_of(reading: TargetReading, name: str = "0") -> EngineReading:
    """Return an engine by its name."""
    return next(one for key, one in reading.engines.items() if key.name == name)


def model_of(reading: TargetReading) -> ModelReading:
    """Return the only model."""
    (model,) = reading.models.values()
    return model


def verdicts(scene: Iterable[TargetReading], name: str = "0") -> set[str]:
    """Return all verdicts of an engine in a scene."""
    return {engine_of(reading, name).judgement.verdict for reading in scene}


def sequence(scene: Iterable[TargetReading], name: str = "0") -> list[str]:
    """Return the verdicts of an engine in a scene, without consecutive repeats."""
    said: list[str] = []
    for reading in scene:
        verdict = engine_of(reading, name).judgement.verdict
        if said[-1:] != [verdict]:
            said.append(verdict)
    return said


def found(scene: Iterable[TargetReading], name: str = "0") -> set[str]:
    """Return all findings of an engine in a scene."""
    return {finding for reading in scene for finding in engine_of(reading, name).findings}


def fixes(reading: TargetReading, name: str = "0") -> list[str]:
    """Return the fixes advised for an engine, in order of rank."""
    return [advice.fix for advice in engine_of(reading, name).advice.fixes]


def advice(reading: TargetReading, fix: str, name: str = "0") -> FixAdvice:
    """Return one of the fixes advised for an engine."""
    return next(each for each in engine_of(reading, name).advice.fixes if each.fix == fix)


def situation(stage: Stage, name: str = "0") -> Situation:
    """Return an engine's situation after the last poll, as used for its verdict."""
    played = next(one for key, one in stage.pipeline._engines.items() if key.name == name)
    reading = engine_of(stage.readings[-1], name)
    facts = reading.server_facts.facts
    return Situation(
        played.history, reading.signals, played._baseline, facts, AnalysisConfig(), None, played._pace
    )


def withheld(reading: TargetReading, name: str = "0") -> set[str]:
    """Return the rejected fixes."""
    return {each.fix for each in engine_of(reading, name).advice.rejected}


def severities(scene: Iterable[TargetReading]) -> set[str]:
    """Return all severities of engines, models and the target in a scene."""
    return {
        one.severity.value
        for reading in scene
        for one in (
            reading.judgement,
            *(engine.judgement for engine in reading.engines.values()),
            *reading.models.values(),
        )
    }


def first(scene: Iterable[TargetReading], verdict: str, name: str = "0") -> float | None:
    """Return the seconds from the scene's first poll until an engine has a verdict; None if never."""
    begin = None
    for reading in scene:
        begin = reading.t if begin is None else begin
        if engine_of(reading, name).judgement.verdict == verdict:
            return reading.t - begin
    return None
