"""Scenarios of a simulated server, in acts: for the demo, dashboards, rules and tests.

Pure data, and the requests of an act. All times are seconds. An act with `down` starts a new process: the
requests of the old one are lost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final

from exporter.simulation.arrivals import Arrivals, ClosedLoop, Trace
from exporter.simulation.rng import Rng
from exporter.simulation.settings import Engine
from exporter.simulation.timing import NANOSECONDS, StepTime, nanoseconds
from exporter.simulation.workload import Lengths, Request, random_requests

__all__ = ["RECORDED", "SCENARIOS", "Act", "Life", "Scenario", "Server", "arrivals_of", "lives"]


@dataclass(frozen=True, slots=True)
class Server:
    """One server process."""

    engine: Engine  # the settings of each of its engines
    engines: int = 1  # data-parallel engines in it
    gpus: int = 1  # tensor parallelism


@dataclass(frozen=True, slots=True)
class Act:
    """A time in which the load changes evenly."""

    name: str  # in a word
    about: str  # what happens, for the user of the demo
    seconds: float  # its length, ``down`` included
    # Requests per second at the start and at the end, for all engines of the server together.
    rate: tuple[float, float] = (0.0, 0.0)
    # Instead of a rate: requests in flight at each engine; a client sends one after the other.
    clients: int | None = None
    prompts: Lengths = field(default_factory=lambda: Lengths.between(50, 550))
    outputs: Lengths = field(default_factory=lambda: Lengths.between(100, 500))
    shares: tuple[float, ...] = (1.0,)  # each engine's share of the rate
    server: Server | None = None  # the server from here on; None keeps the last one
    down: float = 0.0  # time without a server, before a new process starts
    patience: float | None = None  # seconds after which a client gives up; None never


@dataclass(frozen=True, slots=True)
class Scenario:
    """Acts in a loop."""

    about: str  # what it shows
    acts: tuple[Act, ...]  # in order; the first one has a server
    # The verdict that an exporter must reach by the end of an act, by the act's name.
    verdict: Mapping[str, str]
    finding: str = ""  # the finding that it must report as well, or ""

    @property
    def seconds(self) -> float:
        """The length of one round."""
        return sum(act.seconds for act in self.acts)

    def act_at(self, seconds: float) -> Act:
        """Return the act at a time since the start."""
        within = seconds % self.seconds
        for act in self.acts[:-1]:
            if within < act.seconds:
                return act
            within -= act.seconds
        return self.acts[-1]


@dataclass(frozen=True, slots=True)
class Life:
    """One server process."""

    start: float  # time at which it starts to respond
    end: float | None  # time at which it is killed, None for never
    server: Server  # its settings
    # Returns its acts, each with the time at which it begins; endless unless it is killed.
    acts: Callable[[], Iterator[tuple[float, Act]]]


def lives(scenario: Scenario) -> Iterator[Life]:
    """Yield the server's processes one after the other, without end; the first act must have a server."""
    server = scenario.acts[0].server
    if server is None:
        raise ValueError("the first act of a scenario needs a server")
    if not any(act.down for act in scenario.acts):
        yield Life(0.0, None, server, partial(_timed, scenario.acts))
        return
    times = _timed(scenario.acts)
    begin, act = next(times)
    while True:
        server = act.server or server
        lived = [(begin + act.down, replace(act, seconds=act.seconds - act.down))]
        for begin, act in times:
            if act.down:
                break
            lived.append((begin, act))
        yield Life(lived[0][0], begin, server, partial(iter, lived))


def _timed(acts: Sequence[Act]) -> Iterator[tuple[float, Act]]:
    begin = 0.0
    for turn in count():
        for number, act in enumerate(acts):
            # The first process is up from the start.
            yield begin, replace(act, down=0.0) if not turn and not number else act
            begin += act.seconds


def arrivals_of(life: Life, engine: int, seed: int) -> Arrivals:
    """Return the arrivals at one engine of a process; times count from the start of the process.

    A closed loop lasts for the whole life: a life whose first act has clients has no other kind of act.
    """
    dice = Rng(seed * 1000 + engine + round(life.start) * 7919)
    _, act = next(life.acts())
    if act.clients is not None:
        return ClosedLoop(random_requests(act.prompts, act.outputs, dice.fork()), act.clients)
    return Trace(_requests(life.acts(), life.start, engine, dice))


def _requests(acts: Iterator[tuple[float, Act]], start: float, engine: int, dice: Rng) -> Iterator[Request]:
    """Yield requests at random times whose rate follows the acts (by thinning: Lewis, Shedler 1979)."""
    numbers = count()
    for begin, act in acts:
        share = act.shares[engine] if len(act.shares) > engine else act.shares[-1]
        most = max(act.rate) * share
        if not most:
            continue
        at, end = nanoseconds(begin - start), nanoseconds(begin - start + act.seconds)
        span, gap = end - at, round(NANOSECONDS / most)
        lengths = random_requests(act.prompts, act.outputs, dice.fork())
        patience = None if act.patience is None else nanoseconds(act.patience)
        first = at
        while (at := at + dice.exponential(gap)) < end:
            rate = act.rate[0] + (act.rate[1] - act.rate[0]) * (at - first) / span
            if dice.below(1 << 32) < rate * share / most * (1 << 32):
                yield replace(next(lengths), id=next(numbers), arrival=at, abort_after=patience)


# The demo of a real server's recording goes by this name.
RECORDED: Final = "recorded"

# A small model on a GPU: with steps of 20 to 30 ms, answers take seconds and a scenario two minutes.
_STEP: Final = StepTime(fixed=18_000_000, per_token=30_000, per_sequence=100_000)
_SMALL: Final = Engine(
    num_gpu_blocks=901, block_size=16, max_num_seqs=64, max_model_len=4096, step_time=_STEP
)
_ROOMY: Final = replace(_SMALL, num_gpu_blocks=4001)
# Two GPUs store the weights once; all the rest is KV cache.
_TP2: Final = replace(_SMALL, num_gpu_blocks=3601)

SCENARIOS: Final[Mapping[str, Scenario]] = {
    "day": Scenario(
        "a day in two minutes: calm, rising, exhaustion, a fix, calm",
        (
            Act("calm", "the cache is large enough for this load: nothing to do", 20, (1.2, 1.2),
                server=Server(_SMALL), down=3),
            Act("rising", "more requests every second: KV usage climbs", 20, (1.2, 4.5)),
            Act("exhaustion", "more than the cache holds: running falls, waiting rises, work is done twice",
                35, (6.0, 6.0)),
            Act("fix applied", "restarted with --tensor-parallel-size 2: four times the cache, the same load",
                25, (6.0, 6.0), server=Server(_TP2, gpus=2), down=3),
            Act("calm again", "the evening: nothing to do", 20, (5.0, 1.0)),
        ),
        {"calm": "healthy", "exhaustion": "preemption_thrash", "fix applied": "healthy",
         "calm again": "healthy"},
    ),
    "calm": Scenario(
        "a server with room for its load",
        (Act("calm", "nothing to do", 600, (1.5, 1.5), server=Server(_ROOMY)),),
        {"calm": "healthy"},
    ),
    "storm": Scenario(
        "a preemption storm in a small pool",
        (Act("storm", "48 clients on a cache for half of them: requests keep preempting each other", 600,
             clients=48, server=Server(_SMALL)),),
        {"storm": "preemption_thrash"},
    ),
    "queue": Scenario(
        "a queue that has nothing to do with the cache: all seats are taken",
        (Act("queue", "24 clients for 8 seats, and KV hardly used: more cache would not help", 600,
             clients=24, server=Server(replace(_ROOMY, max_num_seqs=8))),),
        {"queue": "seat_bound"},
    ),
    "long-prompts": Scenario(
        "prompts so long that the head of the queue waits for KV at half usage",
        (Act("long prompts",
             "each prompt needs over a third of the cache at once: one waits although a quarter is free",
             600, clients=5, prompts=Lengths.between(22_000, 26_000), outputs=Lengths.between(200, 600),
             server=Server(replace(_ROOMY, max_num_batched_tokens=8192, max_model_len=32_768))),),
        {"long prompts": "kv_bound"},
    ),
    "imbalance": Scenario(
        "two data-parallel engines, one with nearly all of the load",
        (Act("imbalance", "engine 0 gets nine requests in ten: the fix is routing, not memory", 600,
             (4.0, 4.0), shares=(0.9, 0.1), server=Server(replace(_ROOMY, num_gpu_blocks=2001), engines=2)),),
        {"imbalance": "healthy"},
        "dp_imbalance",
    ),
    "restart": Scenario(
        "a server that dies every two minutes and comes back",
        (Act("up", "a healthy server", 60, (2.0, 2.0), server=Server(_ROOMY)),
         Act("restarted", "down for 12 s, then a new process", 60, (2.0, 2.0), down=12)),
        {"up": "healthy", "restarted": "healthy"},
        "restarted",
    ),
}  # fmt: skip
