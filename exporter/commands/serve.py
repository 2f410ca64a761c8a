"""``serve``: poll the targets, and serve metrics, page and API until a signal."""

import argparse
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial

from exporter.commands._options import ACCESS_LOG, POLLING, read_configuration
from exporter.commands._outcome import ExitStatus
from exporter.config import Config, ConfigError, TlsConfig, add_flags, describe
from exporter.net import tls
from exporter.net.errors import RefusedError
from exporter.net.secret_files import SecretFile
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
        if problems := [*_unusable_files(config)]:
            raise ConfigError(problems)
        print(describe(config), end="")
        return ExitStatus.OK
    process.run(sidecar.run(config, partial(read_configuration, options)))
    process.ignore_signals()
    return ExitStatus.OK


def _unusable_files(value: object, key: str = "") -> Iterator[str]:
    """Yield why a secret or a certificate that a configuration names cannot be used, each after its key."""
    try:
        if isinstance(value, TlsConfig):
            tls.context(value)
            return
        if isinstance(value, str) and key.endswith("_file"):
            SecretFile(value, "the file").read()
    except RefusedError as problem:
        yield f"{key}: {problem}"
    if isinstance(value, tuple):
        parts = {f"{key}[{number}]": each for number, each in enumerate(value)}
    else:
        names = [field.name for field in fields(value)] if is_dataclass(value) else []
        parts = {f"{key}.{name}".lstrip("."): getattr(value, name) for name in names}
    for name, part in parts.items():
        yield from _unusable_files(part, name)
