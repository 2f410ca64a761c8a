"""The exported text by Prometheus' own checker."""

import shutil
import subprocess

import pytest
from prometheus_client import ProcessCollector
from prometheus_client.exposition import generate_latest
from support import bodies, metrics_text, real_recordings
from support.process import ANYWHERE, FAST, Command, until
from support.servers import Server, recorded

from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.config import AnalysisConfig
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import ReadingCollector

pytestmark = pytest.mark.programs


def check(text: bytes) -> tuple[int, str]:
    """Let promtool read a text: its exit status, and all that it finds wrong or advises."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing; `.ci/programs` installs it"
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, timeout=180, check=False
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def text_of(reading: TargetReading | None) -> bytes:
    """All that the exporter shows of a reading and of itself."""
    own, counts = ExporterMetrics(), PollCounts()
    if reading is not None:
        counts.poll(0.0, 0, reading.error, interval=1.0)
    own.collect_error("up")
    shown = ReadingCollector(lambda: reading, lambda: reading.t if reading else 0.0, lambda: 1.7e9)
    return metrics_text.text_of(shown, own, counts).encode() + generate_latest(
        ProcessCollector(registry=None)
    )


def test_a_fault_is_found():
    """The check itself works: it finds a counter without its ending."""
    status, said = check(b"# HELP x X.\n# TYPE x counter\nx 1\n")
    assert status != 0
    assert "_total" in said


STORIES = {
    "nothing": lambda: None,
    "storm": lambda: real_recordings.replayed(real_recordings.EXHAUSTION)[120],
    "storm of 0.32": lambda: real_recordings.replayed("0.32.0-exhaustion")[100],
    "two engines": lambda: real_recordings.replayed(real_recordings.TWO_ENGINES)[-1],
    "two API servers": lambda: real_recordings.replayed(real_recordings.TWO_API_SERVERS)[40],
    "down": lambda: real_recordings.at(real_recordings.replayed(real_recordings.RESTART), 90.0),
    "never up": lambda: real_recordings.replayed(real_recordings.RESTART)[3],
    "no statistics": lambda: fed(real_recordings.idle("0.26.0", "stats-disabled")),
    "idle": lambda: fed(real_recordings.idle("0.32.0")),
    "a strange name": lambda: fed(bodies.body(bodies.engine(model="a{b}=\\'c 模型", kv=0.5, preemptions=1))),
}


def fed(body: bytes) -> TargetReading:
    """The reading of one body, polled twice."""
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
    pipeline.feed(0.0, body)
    return pipeline.feed(1.0, body)


@pytest.mark.parametrize("story", STORIES)
def test_promtool_accepts_the_text(story):
    """Without a single piece of advice."""
    assert check(text_of(STORIES[story]())) == (0, "")


def test_promtool_accepts_what_the_command_serves(tmp_path):
    """The very bytes that a scrape gets."""
    with (
        Server(recorded()) as upstream,
        Command(tmp_path, "--target.url", upstream.url, *ANYWHERE, *FAST) as command,
    ):
        until(lambda: command.metric("vllm_pressure_up"), "the first poll")
        text = command.get("/metrics")
        command.stop()
    assert check(text.encode()) == (0, "")
