"""One poll after its bytes are there: read the body, remember, compute the signals, judge."""

import statistics
import sys
import time
from pathlib import Path

from bench import Row
from exporter.analysis.history import History
from exporter.analysis.limits import Limits
from exporter.analysis.signals import compute
from exporter.config import AnalysisConfig
from exporter.engine import Engine
from exporter.pipeline import Pipeline
from exporter.recording import Header, Poll, read
from exporter.vllm.exposition import Reader

RECORDING = Path(__file__).parent.parent / "tests" / "recordings" / "0.26.0-exhaustion.jsonl.gz"
ROUNDS = 5


def run() -> list[Row]:
    """Replay a recorded preemption storm of one engine some times, each time by fresh eyes.

    By turns: up to the signals only, and all that a poll costs, the verdict and its advice included.
    """
    header, *polls = read(RECORDING)
    signals: list[float] = []
    verdicts: list[float] = []
    all_: list[float] = []
    for _ in range(ROUNDS):
        signals += _up_to_signals(header, polls)
        verdicts += _verdicts(header, polls)
        all_ += _whole(header, polls)
    return [
        Row("body to signals, median", statistics.median(signals) * 1e6, "us", bar=350, side="at most"),
        Row("verdict, findings and advice, median", statistics.median(verdicts) * 1e6, "us", 150, "at most"),
        Row("body to verdict and advice, median", statistics.median(all_) * 1e6, "us"),
        Row("the dearest of a hundred", statistics.quantiles(all_, n=100)[-1] * 1e6, "us"),
    ]


def _up_to_signals(header: Header, polls: list[Poll]) -> list[float]:
    reader, history = Reader(), History()
    seconds = []
    for poll in polls:
        start = time.perf_counter()
        exposition = reader.read(poll.body)
        (snapshot,) = exposition.engines.values()
        history.observe(poll.t, snapshot, exposition.start_time)
        compute(history, header.config)
        seconds.append(time.perf_counter() - start)
    return seconds


def _verdicts(header: Header, polls: list[Poll]) -> list[float]:
    """What judging costs beyond the signals, which it computes first: they are computed twice to see that."""
    reader, engine, limits = Reader(), Engine(AnalysisConfig()), Limits(header.config)
    seconds = []
    for poll in polls:
        exposition = reader.read(poll.body)
        (snapshot,) = exposition.engines.values()
        engine.observe(poll.t, snapshot, exposition.start_time, whole=True)
        start = time.perf_counter()
        compute(engine.history, header.config)
        computed = time.perf_counter()
        engine.judge(limits, sharing=1, lora=exposition.lora, imbalanced=False)
        seconds.append(time.perf_counter() - computed - (computed - start))
    return seconds


def _whole(header: Header, polls: list[Poll]) -> list[float]:
    pipeline = Pipeline(AnalysisConfig(), header.config, header.interval)
    seconds = []
    for poll in polls:
        start = time.perf_counter()
        pipeline.feed(poll.t, poll.body, poll.error)
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    rows = run()
    for row in rows:
        print(f"{row.what}: {row.figure:.0f} {row.unit}")
    sys.exit(not all(row.holds for row in rows))
