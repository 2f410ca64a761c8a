"""Reads the recordings of real servers, and runs them through the pipeline."""

import functools
import gzip
import re
from dataclasses import replace
from pathlib import Path

from exporter.analysis.history import History
from exporter.analysis.pipeline import EngineReading, Pipeline, TargetReading
from exporter.config import AnalysisConfig
from exporter.vllm.recording import Header, Poll, Writer, read

TESTS = Path(__file__).parents[1]
RECORDINGS = TESTS / "recordings"
EXPOSITIONS = sorted((TESTS / "expositions").glob("*.txt.gz"))
EXHAUSTION = "0.26.0-exhaustion"
CALM = "0.26.0-calm"
QUEUEING = "0.26.0-queueing"
RESTART = "0.26.0-restart"
TWO_ENGINES = "0.26.0-two-engines"
TWO_API_SERVERS = "0.26.0-two-api-servers"


@functools.cache
def _load(name: str) -> tuple[Header, tuple[Poll, ...]]:
    header, *polls = read(RECORDINGS / f"{name}.jsonl.gz")
    return header, tuple(replace(poll, t=poll.t - polls[0].t) for poll in polls)


def header(name: str) -> Header:
    """Return the first line of a recording."""
    return _load(name)[0]


def polls(name: str) -> tuple[Poll, ...]:
    """Return the polls of a recording, with their times in seconds from the first one."""
    return _load(name)[1]


def write_recording(path: Path, *polls: Poll, header: Header | None = None) -> Path:
    """Write polls to a file; returns its path."""
    with Writer(path, header or Header("f")) as writer:
        for poll in polls:
            writer.write(poll)
    return path


def idle(version: str, kind: str = "idle") -> bytes:
    """Return the body of a server that had no requests yet."""
    return (RECORDINGS / f"{version}-{kind}.txt").read_bytes()


def exposition(path: Path) -> bytes:
    """Return the body that a release's own metric code printed."""
    return gzip.decompress(path.read_bytes())


def pipeline(name: str) -> Pipeline:
    """Create a pipeline for a recording, with the settings that the operator passed."""
    return Pipeline(AnalysisConfig(), header(name).config, header(name).interval)


def history(fed: Pipeline, number: str = "0") -> History:
    """Return a pipeline's history of the engine of this name."""
    return next(one.history for key, one in fed._engines.items() if key.engine == number)


@functools.cache
def replayed(name: str) -> tuple[TargetReading, ...]:
    """Run a recording through a new pipeline: one reading per poll."""
    fresh = pipeline(name)
    return tuple(fresh.feed(poll.t, poll.body, poll.error) for poll in polls(name))


def at(readings: tuple[TargetReading, ...], t: float) -> TargetReading:
    """Return the reading of the last poll at or before `t`."""
    return max((one for one in readings if one.t <= t + 1e-6), key=lambda one: one.t)


def only(reading: TargetReading) -> EngineReading:
    """Return the only engine of a target."""
    (engine,) = reading.engines.values()
    return engine


def value(body: bytes, name: str, **labels: str) -> float | None:
    """Return the sum of a series' samples in a body, read by a regular expression; None without any."""
    found = []
    for series, number in re.findall(rf"^vllm:{name}{{([^}}]*)}} (\S+)$", body.decode(), re.MULTILINE):
        if all(f'{label}="{wanted}"' in series for label, wanted in labels.items()):
            found.append(float(number))
    return sum(found) if found else None
