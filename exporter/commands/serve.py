"""``serve``: poll the targets, and serve metrics, page and API until a signal."""

import argparse
from functools import partial

from exporter.commands._options import ACCESS_LOG, POLLING, read_configuration
from exporter.commands._outcome import ExitStatus
from exporter.config import Config, add_flags, describe
from exporter.publish.web.app import make_guard
from exporter.runtime import process, sidecar

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [OPTION ...]"
    parser.epilog = ACCESS_LOG
    parser.add_argument(
        "--config.check", dest="check", action="store_true", help="check the configuration, print it and exit"
    )
    add_flags(parser, (*POLLING, "web.listen_address", "alertmanager.urls", "log.level", "log.format"))


def run(options: argparse.Namespace, config: Config) -> int:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the configuration."""
    if options.check:
        if config.web.config.file:
            make_guard(config.web.config.file)
        print(describe(config), end="")
        return ExitStatus.OK
    process.run(sidecar.run(config, partial(read_configuration, options)))
    process.ignore_signals()
    return ExitStatus.OK
