"""A simulated storm reads like a real one: the server and the load of a recording, at its pace of steps."""

import functools
from statistics import fmean

import pytest
from support import real_recordings

from bench.judge.dialects import DIALECTS, Dialect
from bench.judge.draw import Scenario, View
from bench.judge.machine import Machine
from bench.judge.traffic import Phase, Traffic
from bench.judge.trial import play
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import Lengths
from exporter.vllm.exposition import Reader

# The middle of each storm, in seconds.
STORMS = {
    "0.26.0-exhaustion": (30, 90),
    "0.26.0-exhaustion-no-prefix-cache": (20, 60),
    "0.32.0-exhaustion": (36, 89),
}
LOAD = Phase(120.0, clients=32, prompts=Lengths.between(50, 300), outputs=Lengths.between(400, 1000))


@functools.cache
def real(name):
    """Time and values of each poll of the middle of a recorded storm."""
    reader, (begin, end), found = Reader(), STORMS[name], []
    for poll in real_recordings.polls(name):
        if poll.body is not None:
            (snapshot,) = reader.read(poll.body).engines.values()
            if begin <= poll.t <= end:
                found.append((poll.t, snapshot.values))
    return found


def increase(polls, reading):
    """What a counter gained per second."""
    (begin, first), (end, last) = polls[0], polls[-1]
    return (last[reading] - first[reading]) / (end - begin)


def engine(name):
    """The recorded server: 200 blocks of 32 tokens, 32 seats, and steps as long as its steps were."""
    step = 1e9 / increase(real(name), "engine_steps")
    return Engine(
        num_gpu_blocks=200,
        block_size=32,
        max_num_seqs=32,
        max_model_len=2048,
        enable_prefix_caching="no-prefix" not in name,
        # A batch of 11 makes two thirds of the step; a prompt token costs a tenth of the fixed part.
        step_time=StepTime(round(step * 0.55), round(step * 0.006), round(step * 0.02)),
    )


@pytest.mark.parametrize("name", STORMS)
def test_a_simulated_storm_reads_like_the_real_one(name):
    """Preemptions per finished request, tokens per second, running, waiting and KV usage agree."""
    polls = real(name)
    machine = Machine(engine(name), Traffic((LOAD,), closed=True))
    begin, end = STORMS[name]
    samples = [machine.until(half / 2) for half in range(2 * begin, 2 * end)]
    first, last = samples[0], samples[-1]
    tokens = (last.output_tokens - first.output_tokens) / (last.t - first.t)
    ratio = (last.preemptions - first.preemptions) / (last.finished - first.finished)
    assert ratio == pytest.approx(
        increase(polls, "preemptions") / increase(polls, "requests_finished"), rel=0.1
    )
    assert tokens == pytest.approx(increase(polls, "generation_tokens"), rel=0.15)
    for reading, field, slack in (
        ("requests_running", "running", 1.0),
        ("requests_waiting", "waiting", 1.0),
        # A real pool dips to 0.7 now and then, a simulated one to 0.85.
        ("kv_usage", "kv_usage", 0.06),
    ):
        simulated = fmean(getattr(sample, field) for sample in samples)
        assert simulated == pytest.approx(fmean(values[reading] for _, values in polls), abs=slack), reading


@pytest.mark.parametrize("name", ["0.26.0-exhaustion", "0.32.0-exhaustion"])
def test_a_printed_page_has_the_readings_of_a_real_one(name):
    """Every reading that the exporter finds in a recorded body, and no other."""
    dialect = next(d for d in DIALECTS if name.startswith(d.version))
    assert readings_of(printed(dialect, engine(name))) == set(real(name)[-1][1])


def printed(dialect, settings):
    """The last page of a short scenario."""
    bodies = []

    class Kept(Dialect):
        def translate(self, body, **options):
            bodies.append(super().translate(body, **options))
            return bodies[-1]

    kept = Kept(dialect.version, dialect.renamed, dialect.dropped, dialect.labels_dropped)
    phases = (LOAD, LOAD)
    play(Scenario(0, "overload", settings, (Traffic(phases, closed=True),), 5.0, 15.0, None, View(kept, {})))
    return bodies[-1]


def readings_of(body):
    """What the exporter reads of the one engine of a body."""
    (snapshot,) = Reader().read(body).engines.values()
    return set(snapshot.values)


def test_the_pages_of_all_releases_are_read():
    """Running, waiting and usage are there in each; the deferred are told apart from 0.20 on."""
    for dialect in DIALECTS:
        readings = readings_of(printed(dialect, engine("0.26.0-exhaustion")))
        assert {"requests_running", "requests_waiting", "kv_usage", "preemptions"} <= readings, dialect
        assert ("requests_deferred" in readings) is (dialect.number >= (0, 20)), dialect
