"""The options of an installation, and the arguments of the command for them.

Imports almost nothing, because every command builds this parser.
"""

import argparse
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Final

from exporter.config import AnalysisConfig
from exporter.config.labels import LABEL_NAME, is_label_name

__all__ = ["JOB", "NATIVE_JOB", "THRESHOLDS", "Options", "Thresholds", "add_arguments"]

JOB: Final = "vllm-preemption-exporter"
NATIVE_JOB: Final = "vllm"
# A name that is reserved for examples.
DASHBOARD_BASE: Final = "https://grafana.example.com"
_OWN_LABELS: Final = frozenset({"alertname", "severity"})
_MATCHER: Final = LABEL_NAME + r'\s*(?:=|!=|=~|!~)\s*"(?:[^"\\\n]|\\.)*"'
_SELECTOR: Final = re.compile(rf"{_MATCHER}(?:\s*,\s*{_MATCHER})*")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an installation, as the command's arguments of the same names."""

    selector: str = ""  # label matchers for every series, as between braces
    job: str = ""  # of the scrape of the exporter (of vLLM, for the rules without the sidecar)
    server_label: str = "pod"  # the label that distinguishes servers; ``instance`` outside Kubernetes
    page_by: str = "model"  # whether the model or each engine pages
    runbook_base: str = ""  # where the runbooks are, if not where the exporter's are
    dashboard_base: str = ""  # where Grafana is
    labels: Sequence[tuple[str, str]] = ()  # added to every alert
    disabled: Collection[str] = ()  # alerts that are left out


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of native rules; each is an option of `rules --native --threshold NAME=VALUE`."""

    # Preemptions per finished request that make a storm; healthy runs had 0.08.
    preemptions_per_request: float = AnalysisConfig().thrash_ratio
    # Harm that makes a storm page: tokens per second below this share of the engine's level in calm times,
    # or latency above this many times that level.
    tokens_fallen: float = AnalysisConfig().tokens_fallen
    latency_grown: float = AnalysisConfig().latency_grown
    preemptions: float = AnalysisConfig().burst_count  # fewer within two minutes are no storm
    # A storm preempts each running request more often than once in this time; answers of 32k tokens are
    # preempted every twenty minutes in full health.
    seconds_between: float = AnalysisConfig().thrash_seconds
    kv_full: float = AnalysisConfig().kv_full  # KV usage within two minutes from which the pool is full
    kv_room: float = 0.8  # KV usage within two minutes up to which the pool has room
    # Share of the waiting requests that wait for something other than capacity.
    deferred_share: float = AnalysisConfig().deferred_share
    # Fewer running requests are no plateau: such numbers are normal where requests are long.
    seats: float = 4.0


_SHARES: Final = frozenset({"kv_full", "kv_room", "deferred_share", "tokens_fallen"})
THRESHOLDS: Final = tuple(each.name for each in fields(Thresholds))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    # fmt: off
    add("--native", action="store_true",
        help="the rules on vLLM's own series, for servers without the exporter")
    add("--selector", type=_selector, default="", metavar="MATCHERS",
        help="matchers for every series, such as 'cluster=~\"eu.*\"'")
    add("--job", default="", help=f"the scrape job (default: {JOB}, with --native {NATIVE_JOB})")
    add("--server-label", type=_label, default="pod", metavar="LABEL",
        help="the label that distinguishes servers (default: pod); instance outside Kubernetes")
    add("--label", dest="labels", type=_pair, action="append", default=[], metavar="NAME=VALUE",
        help="a label for every alert, such as team=llm; may be repeated")
    add("--page-by", choices=("model", "engine"), default="model", metavar="model|engine",
        help="page when a tenth of a model's engines are in trouble (the default), or for each engine")
    add("--disable", dest="disabled", action="append", default=[], metavar="ALERT",
        help="leave an alert out; may be repeated")
    add("--threshold", dest="thresholds", type=_threshold, action="append", default=[], metavar="NAME=VALUE",
        help=f"with --native; may be repeated: {', '.join(THRESHOLDS)}")
    add("--runbook-base", default="", metavar="URL", help="URL of the runbooks")
    add("--dashboard-base", default=DASHBOARD_BASE, metavar="URL",
        help=f"URL of Grafana (default: {DASHBOARD_BASE})")
    add("--format", choices=("prometheus", "prometheusrule"), default="prometheus",
        metavar="prometheus|prometheusrule",
        help="a rule file (the default), or a resource of the Prometheus operator")
    # fmt: on


def _selector(text: str) -> str:
    if text and not _SELECTOR.fullmatch(text.strip()):
        raise argparse.ArgumentTypeError(f'wanted label matchers such as cluster=~"eu.*", got {text!r}')
    return text.strip()


def _label(text: str) -> str:
    if not is_label_name(text):
        raise argparse.ArgumentTypeError(f"wanted the name of a label, got {text!r}")
    return text


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not is_label_name(name) or name in _OWN_LABELS:
        raise argparse.ArgumentTypeError(
            f"wanted NAME=VALUE of a label that is not the rules' own, got {text!r}"
        )
    return name, value


def _threshold(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if name not in THRESHOLDS or not 0 <= number < float("inf"):
        names = ", ".join(THRESHOLDS)
        raise argparse.ArgumentTypeError(f"wanted NAME=NUMBER with a name of {names}, got {text!r}")
    if name in _SHARES and number > 1:
        raise argparse.ArgumentTypeError(
            f"{name} is a share: wanted 0 to 1, got {value}; its alert could never fire"
        )
    return name, number
