"""Options that several commands share, and the configuration that they make up."""

import argparse
import os
from pathlib import Path
from typing import Final

from exporter.commands._outcome import UsageError
from exporter.config import Config, TargetConfig, flags_given, load
from exporter.config.options import Refused
from exporter.config.options import duration as duration_between

__all__ = ["ACCESS_LOG", "POLLING", "add_for", "add_url", "only_target", "read_configuration"]

ACCESS_LOG: Final = """\
vLLM writes one access-log line per poll, unless it runs with \
--disable-access-log-for-endpoints /metrics"""
POLLING: Final = (
    "target.url", "target.bearer_token_file", "target.tls.ca_file", "engine.args", "poll.interval",
    "poll.timeout",
)  # fmt: skip
"""The options that matter to a command that polls one server; its help shows them."""
_SECONDS: Final = duration_between(0.1, 7 * 86_400.0)


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the server's URL, which overrides ``--target.url``."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="vLLM's metrics, such as http://vllm:8000/metrics (default: --target.url)",
    )


def add_for(
    parser: argparse.ArgumentParser, text: str = "stop after this time", default: str | None = None
) -> None:
    """Add ``--for``, after which a command ends."""
    parser.add_argument(
        "--for", dest="seconds", type=_duration, default=default, metavar="DURATION", help=text
    )


def _duration(text: str) -> float:
    try:
        return _SECONDS.read(text)
    except Refused as problem:
        raise argparse.ArgumentTypeError(problem.endings[0].lstrip(": ")) from None


def read_configuration(options: argparse.Namespace) -> Config:
    """Load from flags, environment and file; a command's URL selects one target. Raises ConfigError."""
    url = getattr(options, "url", None)
    return load(flags_given(options), os.environ, lambda path: Path(path).read_text(encoding="utf-8"), url)


def only_target(config: Config, command: str, url: str = "http://HOST:PORT/metrics") -> TargetConfig:
    """Return the target of a command that is about one server; `url` is the form of the URL that it takes.

    Raises:
        UsageError: the configuration names several servers.
    """
    if config.alone:
        return config.targets[0]
    lists = len(config.targets_dns) + len(config.targets_file_sd)
    targets = f"{len(config.targets)} targets" + (f" and {lists} ways to find more" if lists else "")
    raise UsageError(f"the configuration names {targets}, but {command} needs one: expected its URL, {url}")
