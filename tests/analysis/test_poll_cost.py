"""The work of a poll, counted in calls: a machine's speed does not change it."""

import sys

from support.real_recordings import CALM, EXHAUSTION, RECORDINGS

from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig
from exporter.vllm.recording import read

# The first polls of a recording, in which windows fill and series are parsed.
SETTLED = 40


def calls_per_poll(name: str) -> float:
    """Return the mean number of calls, of Python and of C functions, of the polls after the first ones."""
    header, *polls = read(RECORDINGS / f"{name}.jsonl.gz")
    pipeline = Pipeline(AnalysisConfig(), header.config, header.interval)
    for poll in polls[:SETTLED]:
        pipeline.feed(poll.t, poll.body, poll.error)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    rest = polls[SETTLED : SETTLED + 20]
    sys.setprofile(count)
    try:
        for poll in rest:
            pipeline.feed(poll.t, poll.body, poll.error)
    finally:
        sys.setprofile(None)
    return calls / len(rest)


def test_a_poll_in_calm_times_costs_less_than_one_of_a_storm():
    """Most facts of a situation are computed only when a verdict reads them."""
    calm, storm = calls_per_poll(CALM), calls_per_poll(EXHAUSTION)
    assert calm < 800
    assert calm < storm < 1200
