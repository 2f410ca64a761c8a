"""Engines that start anew, vanish and mislead, through the real loop with a clock of the test's own."""

import asyncio
import gc
import tracemalloc

import pytest
from support import bodies

from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig
from exporter.runtime.pace import Pace
from exporter.runtime.poller import Watcher
from exporter.vllm.client import Answer

# Against the running program, with time-outs to wait for: a minute together.
pytestmark = pytest.mark.long


class World:
    """A server, and a clock that moves when somebody waits; polls until the answers end."""

    def __init__(self, answers) -> None:
        self.now = 1000.0
        self.answers = iter(answers)
        self.readings = []

    async def fetch(self) -> Answer:
        """The next answer; a number of seconds is a pause before it."""
        for answer in self.answers:
            if isinstance(answer, float):
                self.now += answer
                continue
            self.now += 0.01
            if isinstance(answer, str):
                return Answer(None, answer, "", 0.01)
            return Answer(answer, None, "", 0.01)
        raise asyncio.CancelledError

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def watched(answers):
    """The readings of all polls."""
    world = World(answers)
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
    watcher = Watcher(
        world, pipeline, Pace(1.0, lambda: 0.0), lambda outcome: world.readings.append(outcome.reading),
        lambda: world.now, world.sleep,
    )  # fmt: skip
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watcher.run())
    return world.readings


def preemptions(readings, engine="0"):
    """The own counter after each poll that knew the engine; it never falls."""
    found = [
        one.signals.preemptions_total
        for reading in readings
        for key, one in reading.engines.items()
        if key.engine == engine and one.signals.preemptions_total is not None
    ]
    assert found == sorted(found)
    return found


def body(count, start=1000.0, **more):
    """One engine with so many preemptions."""
    values = {"running": 3, "waiting": 1, "kv": 0.5, "preemptions": count, "finished": 10 + count} | more
    return bodies.body(bodies.engine(**values), start_time=start)


def test_a_hundred_restarts_are_counted_and_lose_nothing():
    """Each process counts from zero; what it had counted before it was first seen is its own too."""
    answers = []
    for life in range(101):
        answers += [body(count, 1000.0 + life) for count in (2, 5, 9)] + ["connection_refused"]
    readings = watched(answers)
    assert readings[-1].restarts == 100
    assert preemptions(readings)[-1] == 9 - 2 + 100 * 9


def test_counters_that_start_anew_every_second_only_ever_rise():
    """A server that is killed after each poll: every value that it shows is new work."""
    readings = watched([body(5, 1000.0 + life, finished=300 - life) for life in range(200)])
    assert preemptions(readings)[-1] == 199 * 5
    assert readings[-1].restarts == 199


def test_counters_that_fall_without_a_reason_only_ever_rise():
    """No start time tells of a new process: what fell began anew, unless two sources answer by turns."""
    counts = [n % 7 for n in range(300)]
    readings = watched(
        [bodies.body(bodies.engine(running=3, waiting=0, kv=0.5, preemptions=n)) for n in counts]
    )
    total = preemptions(readings)[-1]
    assert 0 <= total <= sum(counts)


def test_an_engine_that_vanishes_and_returns_goes_on_counting():
    """It is missing, not zero; what it preempted meanwhile is counted when it is back."""
    two = lambda count: bodies.body(  # noqa: E731
        bodies.engine("0", running=1, waiting=0, kv=0.5, preemptions=1),
        bodies.engine("1", running=1, waiting=0, kv=0.5, preemptions=count),
        start_time=1000.0,
    )
    one = bodies.body(bodies.engine("0", running=1, waiting=0, kv=0.5, preemptions=1), start_time=1000.0)
    readings = watched([*[two(3)] * 5, *[one] * 60, *[two(11)] * 5])
    assert preemptions(readings, "1")[-1] == 8
    gone = readings[40].engines
    assert [engine.missing for engine in gone.values()] == [False, True]
    assert [engine.missing for engine in readings[-1].engines.values()] == [False, False]


@pytest.mark.parametrize("pause", [60.0, 3600.0, 86_400.0])
def test_a_pause_of_the_machine_loses_nothing_and_alarms_nobody(pause):
    """A laptop's lid, a stopped container: what was counted meanwhile is there, and no stall is made up."""
    before = [body(n, generation_tokens=100 * n, steps=n) for n in range(120)]
    after = [body(1000 + n, generation_tokens=100_000 + 100 * n, steps=1000 + n) for n in range(5)]
    readings = watched([*before, pause, *after])
    assert preemptions(readings)[-1] == 1004
    (engine,) = readings[120].engines.values()
    assert engine.judgement.verdict not in ("engine_stalled", "scheduler_deadlock", "data_untrusted")
    assert readings[-1].restarts == 0


def test_ever_new_label_sets_are_forgotten():
    """A server that names other engines at every poll costs no more memory after a while."""

    def answers(first, polls):
        for number in range(first, first + polls):
            yield bodies.body(
                *(
                    bodies.engine(f"{number}-{one}", running=1, waiting=0, kv=0.1, preemptions=1)
                    for one in range(100)
                )
            )

    world = World([])
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)

    def poll(first, polls):
        for answer in answers(first, polls):
            world.now += 1
            reading = pipeline.feed(world.now, answer)
        return reading

    tracemalloc.start()
    try:
        poll(0, 20)  # engines that are gone make room for others from the third poll on
        gc.collect()  # garbage in cycles comes and goes
        before = tracemalloc.get_traced_memory()[0]
        reading = poll(20, 20)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(reading.engines) <= 256
    assert grown < 5 << 20, grown
