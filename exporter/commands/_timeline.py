"""A recording through the analysis, and the line per poll that `demo` prints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from exporter.analysis.forecast_policy import ForecastPolicy
from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.analysis.words import WORDS
from exporter.commands._forecasts import forecast_due
from exporter.config import Config, parse_facts
from exporter.publish.inert import inert
from exporter.publish.status import engine_names
from exporter.vllm.answers import from_header
from exporter.vllm.recording import Header, read

__all__ = ["FORECASTS", "SIGNALS", "describe_poll", "feed_recording"]

FORECASTS: Final = 2
"""The most that `replay` makes of one recording; each takes a few seconds."""

SIGNALS: Final = (
    "requests_running", "requests_waiting", "kv_usage_ratio", "kv_usage_max_ratio", "preemptions_per_second",
    "preemptions_total", "generation_tokens_per_second",
)  # fmt: skip


def feed_recording(
    path: Path, config: Config, *, forecasts: int = 0
) -> Iterator[tuple[float, TargetReading, Pipeline]]:
    """Yield, for each poll, its seconds since the first one, the reading after it, and the pipeline.

    The header's ``config`` counts as the operator's configuration, its ``arguments`` as the server's argument
    line, its ``probes`` as the server's answers.

    Args:
        path: of the recording.
        config: the operator's.
        forecasts: the most that are made on the way, by the policy of the sidecar.

    Raises:
        RecordingError: a line cannot be read; all polls before it were yielded.
        OSError: the file cannot be read.
    """
    items = read(path)
    header = next(items)
    assert isinstance(header, Header)  # noqa: S101 (as read() promises)
    configured = config.facts_of(config.targets[0]) if config.alone else {}
    facts = {**configured, **parse_facts(header.config, strict=False)[0]}
    arguments = {**(config.engine.args or {}), **parse_facts(header.arguments, strict=False)[0]}
    pipeline = Pipeline(config.analysis, facts, header.interval, arguments)
    answers = from_header(header.probes)
    policy = ForecastPolicy(forecasts)
    origin: float | None = None
    for poll in items:
        assert not isinstance(poll, Header)  # noqa: S101 (only the first item is one)
        origin = poll.t if origin is None else origin
        t = poll.t - origin
        reading = pipeline.feed(t, poll.body, poll.error, answers)
        if forecasts and forecast_due(t, reading, pipeline, policy, config.whatif):
            reading = pipeline.reconsidered(reading)
        yield t, reading, pipeline


def describe_poll(t: float, reading: TargetReading) -> str:
    """Return a line per engine for people, for a poll at `t` seconds; a dash means unknown."""
    state = "up" if reading.up else f"down ({inert(reading.error or '')})"
    engines = engine_names(reading)
    if not engines:
        return f"{t:9.1f}s  {state}"
    lines = []
    for name, engine in engines.items():
        known = engine.signals.known()
        numbers = "  ".join(WORDS[signal].phrase(known.get(signal, "-")) for signal in SIGNALS)
        lines.append(f"{t:9.1f}s  {state}  engine {inert(name)}  {numbers}")
    return "\n".join(lines)
