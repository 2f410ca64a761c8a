"""A recording through the same pipeline as a live server, as fast as it can; time is the file's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.analysis.words import WORDS
from exporter.config import Config, parse_facts
from exporter.publish.status import engine_names, poll_object
from exporter.vllm.answers import from_header
from exporter.vllm.recording import Header, read

__all__ = ["as_json", "as_text", "feeds", "readings"]

_SHOWN: Final = (
    "requests_running",
    "requests_waiting",
    "kv_usage_ratio",
    "kv_usage_max_ratio",
    "preemptions_per_second",
    "preemptions_total",
    "generation_tokens_per_second",
)


def readings(path: Path, config: Config) -> Iterator[tuple[float, TargetReading]]:
    """Each poll's time from the first poll, and what was known after it; see `feeds`."""
    for t, reading, _ in feeds(path, config):
        yield t, reading


def feeds(path: Path, config: Config) -> Iterator[tuple[float, TargetReading, Pipeline]]:
    """Each poll's time from the first poll, what was known after it, and the pipeline that knows more.

    The header's ``config`` counts as the operator's configuration, its ``probes`` as the server's answers.

    Raises:
        RecordingError: a line cannot be read; all before it was yielded.
        OSError: the file cannot be read.
    """
    items = read(path)
    header = next(items)
    assert isinstance(header, Header)  # noqa: S101 (what read() promises)
    told, _ = parse_facts(header.config, strict=False)
    pipeline = Pipeline(
        config.analysis, {**config.targets[0].facts, **told}, header.interval, config.engine.args
    )
    answers = from_header(header.probes)
    origin: float | None = None
    for poll in items:
        assert not isinstance(poll, Header)  # noqa: S101 (only the first item is one)
        origin = poll.t if origin is None else origin
        t = poll.t - origin
        yield t, pipeline.feed(t, poll.body, poll.error, answers), pipeline


def as_json(t: float, reading: TargetReading) -> str:
    """One line of JSON Lines."""
    return json.dumps(poll_object(t, reading), separators=(",", ":"), allow_nan=False)


def as_text(t: float, reading: TargetReading) -> str:
    """One line per engine for people; a dash is unknown."""
    state = "up" if reading.up else f"down ({_inert(reading.error or '')})"
    engines = engine_names(reading)
    if not engines:
        return f"{t:9.1f}s  {state}"
    return "\n".join(
        f"{t:9.1f}s  {state}  engine {_inert(name)}  {_numbers(engine.signals.known())}"
        for name, engine in engines.items()
    )


def _inert(text: str) -> str:
    """A text from outside as it may go to a terminal: escape sequences are shown, not obeyed."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


def _numbers(signals: dict[str, Any]) -> str:
    return "  ".join(WORDS[name].phrase(signals.get(name, "-")) for name in _SHOWN)
