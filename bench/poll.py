"""Measures one poll after its bytes arrived: read the body, remember, compute the signals, judge.

Also measures the parts one by one, to show where the time goes.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench import Row
from bench.reader import micro
from exporter.analysis.baseline import Baseline
from exporter.analysis.engine import Engine
from exporter.analysis.findings import findings
from exporter.analysis.history import History
from exporter.analysis.pace import PaceWatch
from exporter.analysis.pipeline import Pipeline
from exporter.analysis.queue_causes import QueueCauses
from exporter.analysis.server_facts import ServerFacts
from exporter.analysis.signals import Windows, compute
from exporter.analysis.situation import Situation
from exporter.analysis.verdicts import Judge
from exporter.config import AnalysisConfig
from exporter.vllm.exposition import _OTHER_LINES, Reader
from exporter.vllm.recording import Header, Poll, read

RECORDING = Path(__file__).parent.parent / "tests" / "recordings" / "0.26.0-exhaustion.jsonl.gz"
ROUNDS = 5

Result = TypeVar("Result")


def run() -> list[Row]:
    """Replay a recorded preemption storm of one engine several times, each time from an empty history.

    In turns: up to the signals only, and a whole poll including the verdict and its advice.
    """
    header, *polls = read(RECORDING)
    signals: list[float] = []
    verdicts: list[float] = []
    all_: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        signals += _up_to_signals(header, polls)
        verdicts += _verdicts(header, polls)
        all_ += _whole(header, polls)
        _parts(header, polls, parts)
    return [
        Row.of("body to signals", micro(signals), "us", 350, "at most"),
        Row.of("verdict, findings and advice", micro(verdicts), "us", 150, "at most"),
        Row.of("body to verdict and advice", micro(all_), "us"),
        Row("body to verdict and advice, p99", statistics.quantiles(all_, n=100)[-1] * 1e6, "us"),
        *(Row.of(f"of it: {what}", micro(seconds), "us") for what, seconds in parts.items()),
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
    """Measure the cost of judging without the signals: the signals are computed twice for that."""
    reader, engine, limits = Reader(), Engine(AnalysisConfig()), ServerFacts(header.config)
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


def _parts(header: Header, polls: list[Poll], parts: dict[str, list[float]]) -> None:
    """Measure the steps of `Engine.judge` and those before it."""
    reader, history, baseline, judge = Reader(), History(), Baseline(), Judge()
    pace, causes = PaceWatch(), QueueCauses()
    limits, windows = AnalysisConfig(), Windows()

    def timed(what: str, step: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = step()
        parts[what].append(time.perf_counter() - start)
        return result

    for poll in polls:
        timed("find the relevant lines", partial(_OTHER_LINES.findall, poll.body))
        exposition = timed("read the body, including that", partial(reader.read, poll.body))
        (snapshot,) = exposition.engines.values()
        timed("remember", partial(history.observe, poll.t, snapshot, exposition.start_time))
        baseline.observe(history, frozen=False)
        timed("pace", partial(pace.observe, history, frozen=False))
        signals = timed("signals", partial(compute, history, header.config, windows=windows))
        situation = timed(
            "situation", partial(Situation, history, signals, baseline, header.config, limits, None, pace)
        )
        situation.queue_cause = timed("cause of the queue", partial(causes.observe, situation))
        timed("verdict", partial(judge.judge, situation))
        timed("findings", partial(findings, situation))


if __name__ == "__main__":
    rows = run()
    for row in rows:
        print(f"{row.what}: {row.figure:.0f} {row.unit}")
    sys.exit(not all(row.holds for row in rows))
