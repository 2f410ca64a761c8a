"""``replay``: run a recording through the analysis of a live server, as fast as possible."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from exporter.commands._history import History
from exporter.commands._outcome import CommandError, ExitStatus
from exporter.commands._timeline import FORECASTS, feed_recording
from exporter.config import Config, add_flags
from exporter.publish.json_text import json_text
from exporter.publish.status import poll_object
from exporter.vllm.recording import RecordingError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s FILE [--format text|json] [OPTION ...]"
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording, plain or gzipped")
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        metavar="text|json",
        help="print changes of verdict and a report (the default), or a JSON object per poll",
    )
    add_flags(parser, ("engine.args",))


def run(options: argparse.Namespace, config: Config) -> int:
    """Print what the recording holds; where a line is invalid, all before it."""
    history = History() if options.format == "text" else None
    try:
        for t, reading, _ in feed_recording(options.file, config, forecasts=FORECASTS):
            if history is not None:
                _print(history.note(t, reading))
            else:
                print(json_text(poll_object(t, reading), separators=(",", ":")))
    except RecordingError as problem:
        _print(history.report() if history is not None else ())
        if sys.stdout is not None:
            sys.stdout.flush()  # before the error
        raise CommandError(f"{options.file}: {problem}") from problem
    _print(history.report() if history is not None else ())
    return ExitStatus.OK


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
