"""A machine does what its fault says, and its traffic is the same for every server."""

from dataclasses import replace

import pytest

from bench.judge.machine import Fault, Machine
from bench.judge.traffic import Clients, Phase, Traffic
from exporter.simulation.settings import Engine
from exporter.simulation.timing import NANOSECONDS, StepTime
from exporter.simulation.workload import Lengths

STEP = StepTime(fixed=20_000_000, per_token=0, per_sequence=0)
ENGINE = Engine(num_gpu_blocks=1001, max_num_seqs=64, step_time=STEP)
PHASE = Phase(20.0, clients=4, prompts=Lengths.between(100, 100), outputs=Lengths.between(100, 100))
CLOSED = Traffic((PHASE, replace(PHASE, clients=8)), closed=True)


def between(machine, begin, end):
    """What was finished, and the tokens per second, between two seconds."""
    first, last = machine.until(begin), machine.until(end)
    return last.finished - first.finished, (last.output_tokens - first.output_tokens) / (end - begin)


def test_clients_are_as_many_as_their_phase_says():
    """4, then 8: each is in the engine but for its pause of 50 ms."""
    machine = Machine(ENGINE, CLOSED)
    assert machine.until(15.0).running == pytest.approx(4, abs=1)
    assert machine.until(35.0).running == pytest.approx(8, abs=1)


def test_clients_leave_when_there_are_fewer():
    """8, then 2."""
    fewer = Traffic((replace(PHASE, clients=8), replace(PHASE, clients=2)), closed=True)
    assert Machine(ENGINE, fewer).until(35.0).running <= 2


def test_an_open_load_is_the_same_from_any_second_on():
    """What arrives after 10 s does not depend on what was there before."""
    load = Traffic((replace(PHASE, rate=(2.0, 4.0)),), seed=3)

    def times(since):
        arrivals, found = load.arrivals(since), []
        while (at := arrivals.next_at()) is not None:
            found.append((at, arrivals.take().prompt_tokens))
        return found

    assert times(10.0) == [arrival for arrival in times(0.0) if arrival[0] >= 10 * NANOSECONDS]
    assert len(times(0.0)) == pytest.approx(60, abs=20)  # 20 s at 3 a second


def test_four_requests_generate_200_tokens_a_second():
    """Four tokens in each step of 20 ms, and ten times fewer on an engine ten times slower."""
    machine = Machine(ENGINE, CLOSED, Fault("slow", 12.0, 10.0))
    assert between(machine, 4.0, 12.0)[1] == pytest.approx(200, rel=0.05)
    assert between(machine, 13.0, 19.0)[1] == pytest.approx(20, rel=0.15)


def test_a_stall_ends_where_it_is_over():
    """Nothing happens for 5 s, then the work goes on."""
    machine = Machine(ENGINE, CLOSED, Fault("stall", 5.0, until=10.0))
    assert between(machine, 5.0, 10.0) == (0, 0)
    assert between(machine, 11.0, 19.0)[1] > 150


def test_behind_a_closed_door_running_requests_finish_and_nothing_else():
    """An answer takes 2 s."""
    last = Machine(ENGINE, CLOSED, Fault("door", 5.0)).until(15.0)
    assert (last.running, last.waiting) == (0, 4)


def test_a_leak_of_all_free_blocks_lets_nothing_in():
    """The blocks of finished requests come back, so that some requests go on; the pool reads full."""
    machine = Machine(ENGINE, CLOSED, Fault("leak", 5.0, 1.0))
    assert machine.until(30.0).kv_usage > 0.9


def test_after_a_restart_counters_go_on():
    """The samples are sums over both processes; nothing is there in between."""
    machine = Machine(ENGINE, CLOSED, Fault("restart", 5.0, 4.0))
    before = machine.until(4.9)
    down = machine.until(7.0)
    assert (machine.up, down.running, down.output_tokens >= before.output_tokens) == (False, 0, True)
    assert machine.until(15.0).output_tokens > down.output_tokens
    assert machine.up


def test_clients_without_patience_come_again():
    """An answer of 2 s and a patience of 1 s: nothing ever finishes, and each second four give up."""
    last = Machine(ENGINE, replace(CLOSED, patience=1.0)).until(15.0)
    assert last.finished == 0
    assert last.aborted == pytest.approx(4 * 13, abs=8)


def test_clients_whose_server_is_gone_send_again():
    """All that waited for an answer."""
    clients = Clients(CLOSED)
    for _ in range(4):
        assert clients.next_at() is not None
        clients.take()
    assert clients.next_at() is None or clients.next_at() >= 20 * NANOSECONDS
    clients.lose_all(NANOSECONDS)
    assert NANOSECONDS <= clients.next_at() <= 3 * NANOSECONDS
