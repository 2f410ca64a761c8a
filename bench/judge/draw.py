"""A scenario drawn from a seed: a server, its load, perhaps a fault, and how the exporter sees it."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.judge.dialects import DIALECTS, Dialect
from bench.judge.machine import Fault
from bench.judge.traffic import Phase, Traffic
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime, nanoseconds
from exporter.simulation.workload import Lengths, Request

__all__ = ["Scenario", "View", "draw"]


@dataclass(frozen=True, slots=True)
class View:
    """How the exporter sees the server.

    Attributes:
        dialect: The release of vLLM.
        facts: What the operator told.
        interval: Seconds between polls.
        jitter: Each poll is late by up to this many seconds.
        missed: Share of the polls that time out.
        outage: First and last second of a time in which all of them do.
        since: Second of the first poll.
        api_servers: Processes behind the port.
    """

    dialect: Dialect
    facts: Mapping[str, Any]
    interval: float = 1.0
    jitter: float = 0.0
    missed: float = 0.0
    outage: tuple[float, float] | None = None
    since: float = 0.0
    api_servers: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario.

    Attributes:
        seed: What it was drawn from.
        kind: What it was meant to be; the truth may be something else.
        engine: The settings of each engine.
        traffic: What is sent to each engine; more than one with data parallelism.
        calm: Seconds before the trouble.
        trouble: Seconds of the trouble.
        fault: What goes wrong at the first engine.
        view: How the exporter sees it.
    """

    seed: int
    kind: str
    engine: Engine
    traffic: tuple[Traffic, ...]
    calm: float
    trouble: float
    fault: Fault | None
    view: View

    @property
    def end(self) -> float:
        """Seconds at which the trouble phase ends."""
        return self.calm + self.trouble


_MOST_REQUESTS: Final = 5000


class _Draw:
    """The dice of one scenario, and the server that they gave."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed * 2654435761 + 1)
        self.calm = self.even(60, 120)
        self.trouble = self.even(100, 180)
        self.answers = self.log(40, 500)
        self.questions = self.log(50, 4000)
        self.seats = self.pick(8, 16, 24, 32, 48, 64, 96, 128)
        self.per_seat = self.log(0.3, 5)  # requests that fit into the pool, per seat

    def even(self, least: float, most: float) -> float:
        return self.dice.uniform(least, most)

    def log(self, least: float, most: float) -> float:
        return math.exp(self.dice.uniform(math.log(least), math.log(most)))

    def pick(self, *choices: Any) -> Any:
        return self.dice.choice(choices)

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def lengths(self, mean: float) -> Lengths:
        """Lengths around a mean: even, with a long tail, or of two kinds."""
        shape = self.pick("even", "tail", "two")
        if shape == "even":
            return _between(0.4 * mean, 1.6 * mean)
        if shape == "tail":
            return Lengths(
                (_range(0.2, 1.0, mean, 70), _range(1.0, 2.0, mean, 22), _range(2.0, 4.0, mean, 8))
            )
        return Lengths((_range(0.1, 0.5, mean, 60), _range(1.4, 2.4, mean, 40)))

    def engine(self, dialect: Dialect, prompts: Lengths, outputs: Lengths) -> Engine:
        block = self.pick(16, 16, 16, 32, 64)
        held = prompts.mean + outputs.mean * 0.6 + block / 2
        fixed_blocks = round(self.even(0.5, 4) * held / block) if self.chance(0.08) else 0
        fits = max(1.6, self.per_seat * self.seats)
        # The longest request must fit, with some room.
        longest = prompts.ranges[-1][1] + outputs.ranges[-1][1]
        blocks = max(fits * (held / block + fixed_blocks), 1.1 * (longest / block + fixed_blocks))
        step = round(self.log(5e6, 40e6))
        running = min(self.seats, fits)
        # Time to compute a prompt, as a share of the time that its answer takes of the engine.
        share = self.log(0.03, 2.5)
        # One token of a step costs little beside reading the weights.
        per_token = min(share * outputs.mean * step / running / prompts.mean, step / 8)
        budget = self.pick(512, 2048, 2048, 8192)
        return Engine(
            num_gpu_blocks=int(blocks) + 2,
            block_size=block,
            blocks_per_request=fixed_blocks,
            max_num_seqs=self.seats,
            max_num_batched_tokens=max(budget, self.seats),
            max_model_len=int(self.pick(1, 1, 4) * longest) + 16,
            watermark=self.pick(0.0, 0.0, 0.0, 0.01, 0.05) if dialect.number >= (0, 24) else 0.0,
            enable_prefix_caching=self.chance(0.75),
            reserve_full_prompt=dialect.number >= (0, 19) and self.chance(0.9),
            async_scheduling=dialect.number >= (0, 14) and self.chance(0.8),
            step_time=StepTime(step, round(per_token), round(self.log(1e4, 2e5))),
        )

    def view(self, dialect: Dialect, engine: Engine) -> View:
        told = self.chance(0.5)
        facts: dict[str, Any] = {}
        if told:
            facts["max_num_seqs"] = engine.max_num_seqs
        if told and self.chance(0.7):
            facts["max_num_batched_tokens"] = engine.max_num_batched_tokens
        if self.chance(0.8):
            facts["max_model_len"] = engine.max_model_len
        if told and engine.watermark:
            facts["watermark"] = engine.watermark
        interval = self.pick(1.0, 1.0, 1.0, 1.0, 2.0, 5.0)
        begin = self.even(20, self.calm + self.trouble - 30)
        outage = (begin, begin + self.pick(1, 3, 4) * interval) if self.chance(0.15) else None
        return View(
            dialect,
            facts,
            interval=interval,
            outage=outage,
            jitter=self.pick(0.0, 0.05, 0.3),
            missed=self.pick(0.0, 0.0, 0.0, 0.02),
            since=self.pick(0.0, 0.0, 0.0, 0.0, 0.9 * self.calm, self.calm + 20),
            api_servers=self.pick(1, 1, 1, 2),
        )


def _between(least: float, most: float) -> Lengths:
    return Lengths.between(max(1, round(least)), max(2, round(most)))


def _range(least: float, most: float, mean: float, weight: int) -> tuple[int, int, int]:
    low = max(1, round(least * mean))
    return low, max(low, round(most * mean)), weight


def requests_per_second(engine: Engine, prompts: Lengths, outputs: Lengths) -> tuple[float, float]:
    """Return what the engine can finish per second, and how many requests run then, by arithmetic."""
    held = prompts.mean + outputs.mean * 0.6 + engine.block_size / 2
    fits = engine.usable_blocks / (held / engine.block_size + engine.blocks_per_request)
    running = max(1.0, min(engine.max_num_seqs, fits))
    step = engine.step_time.fixed + running * (engine.step_time.per_token + engine.step_time.per_sequence)
    seconds = (outputs.mean * step / running + prompts.mean * engine.step_time.per_token) / 1e9
    return 1 / seconds, running


# Kinds and how often each is drawn.
_KINDS: Final = {
    "steady": 12,
    "busy": 12,
    "overload": 36,
    "prompts": 8,
    "slow": 8,
    "stall": 4,
    "leak": 3,
    "door": 2,
    "unfittable": 2,
    "down": 2,
    "restart": 3,
    "connector": 4,
    "adapters": 4,
    "impatient": 4,
    "skewed": 4,
    "cold": 4,
    "pause": 3,
}


def draw(seed: int, kind: str | None = None) -> Scenario:
    """Draw the scenario of a seed; always the same one."""
    for attempt in range(50):
        drawn = _Draw(seed * 64 + attempt)
        chosen = kind or random.Random(seed).choices(list(_KINDS), list(_KINDS.values()))[0]
        scenario = _scenario(drawn, seed, chosen)
        if scenario is not None:
            return scenario
    raise ValueError(f"seed {seed}: no scenario of a bearable size in 50 attempts")


def _scenario(drawn: _Draw, seed: int, kind: str) -> Scenario | None:
    dialect = drawn.pick(*DIALECTS)
    while kind in ("adapters", "connector") and dialect.number < (0, 20):
        dialect = drawn.pick(*DIALECTS)
    prompts, outputs = drawn.lengths(drawn.questions), drawn.lengths(drawn.answers)
    engine = drawn.engine(dialect, prompts, outputs)
    if kind == "cold":
        engine = replace(engine, num_gpu_blocks=6 * engine.num_gpu_blocks)
    if kind in ("slow", "stall", "pause", "door", "adapters", "restart", "down"):
        engine = replace(engine, num_gpu_blocks=2 * engine.num_gpu_blocks)
    traffic = _load(drawn, kind, engine, prompts, outputs, seed)
    if traffic is None:
        return None
    fault = _fault(drawn, kind)
    longest = max(p.prompts.ranges[-1][1] + p.outputs.ranges[-1][1] for p in traffic.phases)
    engine = replace(engine, max_model_len=max(longest + 16, engine.max_model_len or 0))
    if kind == "cold":
        cold = _cold(drawn, engine)
        if cold is None:
            return None
        traffic = replace(traffic, single=(cold,))
        longest = max(longest, cold.prompt_tokens + cold.output_tokens)
        engine = replace(engine, max_model_len=max(longest + 16, engine.max_model_len or 0))
    if kind == "unfittable":
        engine, traffic = _unfittable(drawn, engine, traffic)
    traffics = (traffic,)
    if kind == "skewed":
        others = drawn.pick(1, 1, 3)
        light = [_load(drawn, "steady", engine, prompts, outputs, seed + 7 * n + 7) for n in range(others)]
        traffics += tuple(t for t in light if t is not None)
    view = drawn.view(dialect, engine)
    if fault is not None:  # a fault is seen against what was before
        view = replace(view, since=0.0)
    return Scenario(seed, kind, engine, traffics, drawn.calm, drawn.trouble, fault, view)


# The load in trouble, divided by what the engine can do.
_PRESSURE: Final[Mapping[str, tuple[float, float]]] = {
    "steady": (0.2, 0.6),
    "busy": (0.6, 0.95),
    "overload": (1.15, 3.0),
    "prompts": (1.1, 2.5),
    "slow": (0.2, 0.6),
    "stall": (0.3, 1.5),
    "leak": (0.3, 0.8),
    "door": (0.3, 0.8),
    "unfittable": (0.3, 0.8),
    "down": (0.3, 0.8),
    "restart": (0.2, 0.5),
    "connector": (0.3, 0.8),
    "adapters": (0.4, 0.9),
    "impatient": (1.3, 3.0),
    "skewed": (1.2, 2.5),
    "cold": (0.2, 0.7),
    "pause": (0.2, 0.6),
}


def _load(
    drawn: _Draw, kind: str, engine: Engine, prompts: Lengths, outputs: Lengths, seed: int
) -> Traffic | None:
    """Draw what is sent: a calm phase and the trouble; None where it would be too much to simulate."""
    capacity, running = requests_per_second(engine, prompts, outputs)
    now = drawn.even(*_PRESSURE[kind])
    before = min(now, drawn.even(0.15, 0.6))
    if kind in _FAULTS and drawn.chance(0.5):
        before = now  # the load stays as it is
    closed = kind == "impatient" or (kind not in ("prompts", "adapters") and drawn.chance(0.4))
    calm = Phase(drawn.calm, prompts=prompts, outputs=outputs)
    trouble = replace(calm, seconds=drawn.trouble)
    if kind == "prompts":
        return _prompts(drawn, engine, calm, trouble, seed)
    if closed:
        calm = replace(calm, clients=max(1, round(before * running)))
        trouble = replace(trouble, clients=max(1, round(now * running)))
    else:
        calm = replace(calm, rate=(before * capacity,) * 2)
        shape = drawn.pick("step", "step", "ramp", "burst") if kind == "overload" else "step"
        first = before if shape == "ramp" else now
        trouble = replace(
            trouble, rate=(first * capacity, (2 * now - before if shape == "ramp" else now) * capacity)
        )
        if shape == "burst":
            burst = round(now * capacity * drawn.trouble * 0.8)
            trouble = replace(trouble, rate=(before * capacity,) * 2, burst=burst)
    if _requests(calm, trouble, capacity) > _MOST_REQUESTS:
        return None
    patience = None
    if kind == "impatient":
        patience = drawn.even(0.5, 1.5) * running / capacity * now
    texts = drawn.pick(0, 0, 1, 8) if engine.enable_prefix_caching else 0
    return Traffic(
        (calm, trouble),
        closed,
        patience,
        texts,
        round(drawn.even(0.2, 0.8) * prompts.mean) if texts else 0,
        seed=seed,
    )


def _prompts(drawn: _Draw, engine: Engine, calm: Phase, trouble: Phase, seed: int) -> Traffic | None:
    """Prompts many times as long, answers short: computing them is what is short."""
    longer = drawn.log(3, 20)
    capacity_tokens = engine.usable_blocks * engine.block_size
    mean = min(calm.prompts.mean * longer, capacity_tokens / 12)
    prompts, outputs = drawn.lengths(mean), drawn.lengths(max(8.0, calm.outputs.mean / 5))
    before, _ = requests_per_second(engine, calm.prompts, calm.outputs)
    capacity, _ = requests_per_second(engine, prompts, outputs)
    rate = drawn.even(*_PRESSURE["prompts"]) * capacity
    calm = replace(calm, rate=(drawn.even(0.15, 0.5) * before,) * 2)
    trouble = replace(trouble, rate=(rate, rate), prompts=prompts, outputs=outputs)
    return (
        None if _requests(calm, trouble, capacity) > _MOST_REQUESTS else Traffic((calm, trouble), seed=seed)
    )


def _requests(calm: Phase, trouble: Phase, capacity: float) -> float:
    """About how many requests there will be."""
    rates = [max(phase.rate) or capacity for phase in (calm, trouble)]
    return sum(rate * p.seconds for rate, p in zip(rates, (calm, trouble), strict=True)) + trouble.burst


_FAULTS: Final[Mapping[str, Callable[[_Draw], Fault]]] = {
    "slow": lambda d: Fault("slow", d.calm, d.log(4, 100)),
    "stall": lambda d: Fault("stall", d.calm + d.even(0, 10)),
    "pause": lambda d: _pause(d.calm + d.even(0, 10), d.even(8, 50)),
    "leak": lambda d: Fault("leak", d.calm, d.pick(0.7, 0.9, 1.0)),
    "door": lambda d: Fault("door", d.calm),
    "down": lambda d: Fault("down", d.calm),
    "restart": lambda d: Fault("restart", d.calm, d.even(5, 40)),
    "connector": lambda d: Fault("connector", d.calm, d.log(10, 100)),
    "adapters": lambda d: Fault("adapters", 0.0, d.pick(1, 2, 3)),
}


def _pause(at: float, seconds: float) -> Fault:
    return Fault("stall", at, until=at + seconds)


def _fault(drawn: _Draw, kind: str) -> Fault | None:
    make = _FAULTS.get(kind)
    return None if make is None else make(drawn)


def _cold(drawn: _Draw, engine: Engine) -> Request | None:
    """Draw a prompt that takes whole steps for a while; None if that is too short or too long."""
    prompt = round(engine.usable_blocks * engine.block_size * drawn.even(0.3, 0.6))
    step = engine.step_time
    seconds = prompt * (step.per_token + step.fixed / engine.max_num_batched_tokens) / 1e9
    if not 15 < seconds < drawn.trouble:
        return None
    return Request(0, prompt, 50, arrival=nanoseconds(drawn.calm + drawn.even(0, 20)))


def _unfittable(drawn: _Draw, engine: Engine, traffic: Traffic) -> tuple[Engine, Traffic]:
    """One request arrives that the whole pool cannot hold, by its prompt or with its answer."""
    blocks = engine.usable_blocks - engine.blocks_per_request - engine.watermark_blocks
    tokens = blocks * engine.block_size
    answer = (8 + engine.watermark_blocks) * engine.block_size
    prompt = round(tokens * drawn.even(1.05, 1.5)) if drawn.chance(0.6) else tokens - 4 * engine.block_size
    request = Request(0, prompt, answer, arrival=nanoseconds(drawn.calm + 2))
    return replace(engine, max_model_len=2 * (prompt + answer), reserve_full_prompt=True), replace(
        traffic, single=(request,)
    )
