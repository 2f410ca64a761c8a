"""The bundled recording in an endless loop."""

import pytest

from exporter.analysis.history import COUNTERS
from exporter.standin.recording_loop import RecordingLoop, bundled_polls
from exporter.vllm.exposition import Reader


@pytest.fixture(scope="module")
def loop() -> RecordingLoop:
    """The bundled recording without an end."""
    return RecordingLoop(bundled_polls())


def test_counters_of_the_demo_never_fall(loop):
    """Over the end of the recording and the beginning of the next round; a restart would be shown else."""
    reader, before, seconds = Reader(), {}, 0.0
    while seconds < 2.5 * loop.seconds:
        exposition = reader.read(loop.at(seconds))
        (snapshot,) = exposition.engines.values()
        assert exposition.unreadable == 0
        counted = {name: value for name, value in snapshot.values.items() if name in COUNTERS} | {
            f"{name} {bound}": count
            for name, buckets in snapshot.buckets.items()
            for bound, count in buckets.items()
        }
        assert all(value >= before.get(name, 0.0) for name, value in counted.items())
        before = counted
        seconds += 0.7


def test_a_round_of_the_demo_gains_what_the_recording_gained(loop):
    """Neither lost nor doubled at the seam."""
    reader = Reader()
    counts = []
    for rounds in (0, 1, 2):
        (snapshot,) = reader.read(loop.at(rounds * loop.seconds + 0.01)).engines.values()
        counts.append(snapshot.values["preemptions"])
    assert counts[1] - counts[0] == counts[2] - counts[1] > 50
