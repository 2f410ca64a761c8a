"""Requests that wait in front of the scheduler."""

from bench.judge.gates import AdapterSlots, ConnectorLoads
from exporter.simulation.arrivals import Trace
from exporter.simulation.run import Run
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import Request

# Each step takes 10 ns.
STEP = StepTime(fixed=10, per_token=0, per_sequence=0)


def engine(blocks, **changes):
    """An engine with so many usable blocks of 4 tokens."""
    return Engine(num_gpu_blocks=blocks + 1, block_size=4, step_time=STEP, **changes)


def request(number, prompt=4, output=2, **changes):
    """A request that arrives at once."""
    return Request(number, prompt, output, arrival=0, **changes)


def run(settings, requests, gate_for):
    """A run of requests behind a gate."""
    return Run(settings, Trace(requests), gate_for)


def finished(simulated, until=None):
    """The numbers of the requests in the order in which they finished."""
    found = []
    while ended := simulated.until(until):
        found += [live.request.id for live in ended]
    return found


def test_requests_of_another_adapter_wait_and_others_overtake_them():
    """One slot: request 1 uses another adapter than 0 and 2, and comes last."""
    simulated = run(
        engine(20), [request(0), request(1), request(2)], lambda _: AdapterSlots(1, lambda r: r.id % 2)
    )
    assert simulated.until(5) == []
    assert (simulated.scheduler.running, simulated.gate.deferred) == (2, 1)
    assert finished(simulated) == [0, 2, 1]
    assert simulated.gate.deferred == 0


def test_requests_of_the_base_model_need_no_slot():
    """None is no adapter."""
    simulated = run(engine(20), [request(0), request(1)], lambda _: AdapterSlots(1, lambda r: r.id or None))
    assert finished(simulated) == [0, 1]


def test_a_load_holds_its_blocks_and_counts_as_deferred():
    """A prompt of 8 tokens takes 2 of 4 blocks while its KV is loaded, for 100 ns."""
    simulated = run(
        engine(4), [request(0, prompt=8)], lambda scheduler: ConnectorLoads(scheduler, lambda *_: 100)
    )
    simulated.until(50)
    assert (simulated.gate.deferred, simulated.scheduler.running, simulated.scheduler.pool.free) == (1, 0, 2)
    assert finished(simulated) == [0]
    assert simulated.scheduler.now == 100 + 2 * 10
    assert simulated.scheduler.pool.free == 4


def test_a_load_that_does_not_fit_waits_for_blocks():
    """Two prompts of 8 tokens on 3 blocks: the second load begins when the first request has its place."""
    simulated = run(
        engine(3),
        [request(0, prompt=8), request(1, prompt=8)],
        lambda scheduler: ConnectorLoads(scheduler, lambda *_: 100),
    )
    simulated.until(50)
    assert (simulated.gate.deferred, simulated.gate.queued) == (1, 1)
    assert finished(simulated) == [0, 1]


def test_a_client_that_gives_up_frees_the_blocks_of_its_load():
    """It waits 30 ns for a load of 100 ns."""
    simulated = run(
        engine(4),
        [request(0, prompt=8, abort_after=30), request(1, prompt=8, abort_after=30)],
        lambda scheduler: ConnectorLoads(scheduler, lambda *_: 100),
    )
    simulated.until(50)
    assert (simulated.gate.deferred, simulated.scheduler.pool.free) == (0, 4)
    assert finished(simulated) == []
