"""``rules``: print the Prometheus rules that ship with the exporter, adapted to an installation."""

import argparse
from dataclasses import fields, replace

from exporter.commands._outcome import ExitStatus, UsageError
from exporter.config import Config
from exporter.rules import native, options, sidecar
from exporter.rules.form import Group, adapted, alert_names, rule_file

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [--native] [OPTION ...]"
    options.add_arguments(parser)


def run(given: argparse.Namespace, _config: Config) -> int:
    """Print the rules."""
    if given.thresholds and not given.native:
        raise UsageError("--threshold needs --native: the exporter's thresholds are in its configuration")
    names = [each.name for each in fields(options.Options)]
    installation = options.Options(**{name: getattr(given, name) for name in names})
    groups: tuple[Group, ...]
    if given.native:
        groups = native.groups(installation, replace(options.Thresholds(), **dict(given.thresholds)))
        head, name = native.HEAD, "vllm-native"
    else:
        groups, head, name = sidecar.groups(installation), sidecar.HEAD, "vllm-pressure"
    known = alert_names(groups)
    if unknown := sorted(set(given.disabled) - set(known)):
        raise UsageError(f"unknown alert {', '.join(unknown)}; expected one of {', '.join(known)}")
    resource = name if given.format == "prometheusrule" else ""
    print(rule_file(adapted(groups, installation), head, resource), end="")
    return ExitStatus.OK
