"""The truth of servers made by hand, whose bottleneck is obvious."""

from dataclasses import replace

import pytest

from bench.judge.dialects import DIALECTS
from bench.judge.draw import Scenario, View
from bench.judge.machine import Fault, Machine
from bench.judge.traffic import Phase, Traffic
from bench.judge.truth import enlarged, page_is_justified, truth_of
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import Lengths

# Steps of 20 ms and hardly more with many requests: 100 tokens take 2 s, whatever else runs.
STEP = StepTime(fixed=20_000_000, per_token=10_000, per_sequence=10_000)
ROOMY = Engine(num_gpu_blocks=4001, max_num_seqs=64, max_model_len=4096, step_time=STEP)
SHORT = Phase(60.0, prompts=Lengths.between(100, 100), outputs=Lengths.between(100, 100))
VIEW = View(DIALECTS[-1], {"max_num_seqs": 64})
CALM, TROUBLE = 30.0, 90.0


def scenario(engine, traffic, fault=None, kind="overload", view=VIEW):
    """A calm half minute and 90 s of trouble."""
    return Scenario(0, kind, engine, (traffic,), CALM, TROUBLE, fault, view)


def clients(count, **changes):
    """A closed load: 2 clients in the calm, and then more."""
    trouble = replace(SHORT, seconds=TROUBLE, clients=count, **changes)
    return Traffic((replace(SHORT, seconds=CALM, clients=2), trouble), closed=True)


def rate(per_second, **changes):
    """An open load."""
    calm = replace(SHORT, seconds=CALM, rate=(0.5, 0.5))
    return Traffic((calm, replace(SHORT, seconds=TROUBLE, rate=(per_second, per_second), **changes)))


def judged(drawn):
    """The truth about a scenario."""
    machine = Machine(drawn.engine, drawn.traffic[0], drawn.fault)
    return truth_of(drawn, [machine.until(float(t)) for t in range(int(drawn.end) + 1)])


def test_eight_seats_for_twenty_clients_are_short():
    """12 of 20 wait, nothing but seats helps; told or not decides which verdict says so."""
    engine = replace(ROOMY, max_num_seqs=8)
    truth = judged(scenario(engine, clients(20)))
    assert truth.family == "seats"
    assert truth.base.waiting == pytest.approx(12, abs=0.5)
    assert truth.scores["seats"] > 0.9
    assert truth.acceptable == {"seat_bound"}
    assert judged(scenario(engine, clients(20), view=replace(VIEW, facts={}))).acceptable == {"queue_not_kv"}


def test_a_pool_for_four_requests_is_short():
    """100 + 100 tokens take 13 blocks of 16 at most: 52 blocks hold four whole requests."""
    truth = judged(scenario(replace(ROOMY, num_gpu_blocks=53), clients(16)))
    assert truth.family == "pool"
    assert truth.harm > 0.5
    assert "kv_bound" in truth.acceptable
    assert not truth.acceptable & {"seat_bound", "queue_not_kv", "healthy"}


def test_prompts_that_come_faster_than_they_are_computed():
    """A prompt of 2,000 tokens at 1 ms each takes 2 s; one comes each second."""
    engine = replace(ROOMY, step_time=replace(STEP, per_token=1_000_000))
    load = rate(1.0, prompts=Lengths.between(2000, 2000), outputs=Lengths.between(10, 10))
    truth = judged(scenario(engine, load))
    assert truth.family == "compute"
    assert truth.acceptable == {"prefill_bound", "queue_not_kv"}


def test_a_busy_server_with_room_for_all_is_healthy():
    """32 clients on 64 seats: nobody waits, so nothing is asked."""
    truth = judged(scenario(ROOMY, clients(32)))
    assert (truth.family, truth.page, truth.onset) == ("none", "false", None)
    assert "healthy" in truth.acceptable


def test_an_engine_ten_times_slower_is_slow():
    """Requests stay ten times as long, although nobody waits."""
    truth = judged(scenario(ROOMY, clients(8), Fault("slow", CALM, 10.0), "slow"))
    assert truth.family == "fault"
    assert truth.base.work == pytest.approx(truth.ample.work / 10, rel=0.2)
    assert truth.acceptable == {"decode_slow"}


def test_two_adapter_slots_for_many_adapters():
    """What waits has room and seats; a slot is what it lacks."""
    truth = judged(scenario(ROOMY, rate(6.0), Fault("adapters", 0.0, 1), "adapters"))
    assert truth.family == "fault"
    assert truth.acceptable == {"deferred_wait"}


def test_seats_and_pool_short_together():
    """Eight seats, and room for eight: neither alone helps, so both are right."""
    engine = replace(ROOMY, num_gpu_blocks=110, max_num_seqs=8)
    truth = judged(scenario(engine, clients(40)))
    assert {"seat_bound", "kv_bound"} <= truth.acceptable


def test_a_stall_is_certain_and_its_page_due():
    """From the last progress on, which is at most a second after the fault."""
    truth = judged(scenario(ROOMY, clients(8), Fault("stall", CALM), "stall"))
    assert (truth.acceptable, truth.page) == ({"engine_stalled"}, "due")
    assert truth.onset == pytest.approx(CALM, abs=1)


def test_a_page_needs_harm():
    """With room for all no page is justified; where the pool holds a quarter, it is."""
    for blocks, justified in ((4001, False), (53, True)):
        drawn = scenario(replace(ROOMY, num_gpu_blocks=blocks), clients(16))
        machine = Machine(drawn.engine, drawn.traffic[0])
        samples = [machine.until(float(t)) for t in range(121)]
        assert page_is_justified(drawn, samples, 60.0, 120.0) is justified


def test_four_times_the_resource():
    """Prompt tokens cost a quarter; a token that is decoded costs what it did."""
    step = enlarged(ROOMY, "compute").step_time
    assert step.per_token == 2_500
    assert step.per_token + step.per_sequence == STEP.per_token + STEP.per_sequence
    assert enlarged(ROOMY, "pool").usable_blocks == 16_000
    assert enlarged(ROOMY, "seats").max_num_seqs == 256
    with pytest.raises(ValueError, match="expected pool, seats or compute"):
        enlarged(ROOMY, "luck")
