"""``rules``: print the rules that ship with the exporter, adapted to an installation."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import replace

from exporter.publish.alerts.table import RUNBOOK_BASE
from exporter.rules import native, sidecar
from exporter.rules.form import Group, adapted, alert_names, prometheus, prometheusrule
from exporter.rules.options import Options, Thresholds, add_arguments

__all__ = ["OptionsError", "default", "printed"]


class OptionsError(ValueError):
    """Options that cannot be used together; says what was wanted and what was got."""


def printed(given: argparse.Namespace) -> str:
    """The rules as the options want them.

    Raises:
        OptionsError: an alert to disable does not exist, or a threshold has no rule.
    """
    options = Options(
        selector=given.selector,
        job=given.job,
        server_label=given.server_label,
        page_by=given.page_by,
        runbook_base=given.runbook_base or RUNBOOK_BASE,
        dashboard_base=given.dashboard_base,
        labels=dict(given.labels),
        disabled=frozenset(given.disabled),
    )
    if given.thresholds and not given.native:
        raise OptionsError("--threshold needs --native: the exporter's thresholds stand in its configuration")
    groups = _groups(options, native_rules=given.native, thresholds=dict(given.thresholds))
    _check_disabled(options.disabled, alert_names(groups))
    groups = adapted(groups, options)
    head = native.HEAD if given.native else sidecar.HEAD
    if given.format == "prometheusrule":
        return prometheusrule(groups, head, "vllm-native" if given.native else "vllm-pressure")
    return prometheus(groups, head)


def default(*, native_rules: bool = False) -> str:
    """What the command prints without further options: the committed files."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return printed(parser.parse_args(["--native"] if native_rules else []))


def _groups(options: Options, *, native_rules: bool, thresholds: Mapping[str, float]) -> tuple[Group, ...]:
    if native_rules:
        return native.groups(options, replace(Thresholds(), **thresholds))
    return sidecar.groups(options)


def _check_disabled(disabled: Iterable[str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(disabled) - set(known))
    if unknown:
        raise OptionsError(f"no such alert: {', '.join(unknown)}; there are {', '.join(known)}")
