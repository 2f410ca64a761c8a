"""Alerts in words: one table of names, severities, labels and texts for both routes.

Prometheus' rules and the direct push raise the same alerts. Whatever a person reads in either is built
here from the catalogue; the rules put template expressions where the direct push has values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlencode

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Finding, Severity, Verdict
from exporter.analysis.words import WORDS

__all__ = [
    "DASHBOARDS",
    "FIXES_SHOWN",
    "IDENTITY",
    "NUMBERS",
    "PAGE_SHARE",
    "RUNBOOK_BASE",
    "WORST_ENGINE",
    "Alert",
    "PageBy",
    "alerts",
    "dashboard_url",
    "description",
    "fix_line",
    "runbook_url",
    "subject",
]

PageBy = Literal["model", "engine"]
Scope = Literal["engine", "model", "target"]

RUNBOOK_BASE: Final = (
    "https://github.com/vllm-preemption-exporter/vllm-preemption-exporter/blob/main/docs/runbooks"
)
# What makes two alerts the same one, beside the alert's name. Where a scrape comes from (job, instance,
# container, endpoint) is no part of it.
IDENTITY: Final[Mapping[Scope, tuple[str, ...]]] = {
    "engine": ("cluster", "namespace", "pod", "model_name", "engine"),
    "model": ("cluster", "namespace", "model_name"),
    "target": ("cluster", "namespace", "pod"),
}
# The dashboard that an alert links to, by what it names.
DASHBOARDS: Final[Mapping[str, str]] = {
    "engine": "vllm-pressure-engine",
    "model": "vllm-pressure-fleet",
    "target": "vllm-pressure-engine",
    "exporter": "vllm-pressure-exporter",
}
# A page names the best fixes; the others stand in the runbook.
FIXES_SHOWN: Final = 3
# A model pages when this share of its engines, and at least one, are in a critical verdict.
PAGE_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert that may be raised.

    Attributes:
        name: ``VllmPreemptionThrash``; of a whole model ``VllmModelPreemptionThrash``.
        entry: the verdict or finding that it is about.
        scope: whether it names an engine, a model, or a target of which no engine can be read.
        severity: who is told; only ``critical`` pages.
        critical_only: raised only where the verdict is critical, which some are only at their worst.
    """

    name: str
    entry: Verdict | Finding
    scope: Scope
    severity: Severity
    critical_only: bool = False

    @property
    def summary(self) -> str:
        """One sentence without numbers."""
        return self.entry.summary


NUMBERS: Final = tuple(
    WORDS[name]
    for name in (
        "kv_usage_max_ratio",
        "requests_running",
        "requests_waiting",
        "preemptions_per_second",
        "preemptions_per_finished_request",
        "generation_tokens_per_second",
    )
)
"""The numbers of a description; each is an exported metric too."""
WORST_ENGINE: Final = "worst engine: "
"""What stands before the numbers of several engines, which are the highest among them."""


def alerts(page_by: PageBy = "model") -> tuple[Alert, ...]:
    """All alerts, verdicts in order of precedence first.

    Args:
        page_by: ``model``: a critical verdict pages by the alert of the model, and the one that names the
            engine is a warning; ``engine``: the alert of the engine pages, and there is none of the model.
    """
    table = catalogue.load()
    of_verdicts = (alert for verdict in table.verdicts.values() for alert in _of_verdict(verdict, page_by))
    return (*of_verdicts, *(alert for finding in table.findings.values() for alert in _of_finding(finding)))


def _of_verdict(verdict: Verdict, page_by: PageBy) -> Iterator[Alert]:
    if verdict.alert is None:
        return
    by_model = page_by == "model" and verdict.model_alert is not None
    engine = min(verdict.severity, Severity.WARNING) if by_model else verdict.severity
    if by_model and verdict.model_alert is not None:
        yield Alert(verdict.model_alert, verdict, "model", Severity.CRITICAL, critical_only=True)
    elif verdict.critical_when is not None:
        yield Alert(verdict.alert, verdict, "engine", Severity.CRITICAL, critical_only=True)
    yield Alert(verdict.alert, verdict, "engine", engine)
    if verdict.of_target:
        # Where no engine was ever read there is no model to page by.
        yield Alert(verdict.alert, verdict, "target", verdict.severity)


def _of_finding(finding: Finding) -> Iterator[Alert]:
    if finding.alert is not None:
        scopes: Mapping[str, Scope] = {"engine": "engine", "model": "model", "target": "target"}
        yield Alert(finding.alert, finding, scopes[finding.scope], finding.severity)


def runbook_url(alert: Alert, base: str = RUNBOOK_BASE) -> str:
    """Where the runbook stands: every alert has one of its name."""
    return f"{base.rstrip('/')}/{alert.name}.md"


def dashboard_url(alert: Alert, labels: Mapping[str, str], base: str) -> str:
    """A link to the dashboard of an alert, with its variables set from the alert's labels."""
    variables = [(f"var-{name}", labels.get(name, "")) for name in IDENTITY[alert.scope]]
    return f"{base.rstrip('/')}/d/{DASHBOARDS[alert.scope]}?{urlencode(variables)}"


def subject(scope: Scope, *, model: str = "", engine: str = "", where: str = "") -> str:
    """Who it is about: ``demo-7b engine 0 (eu/prod/vllm-0)``. Arguments may be template expressions.

    Args:
        scope: what the alert names.
        model: the model's name.
        engine: the engine's name.
        where: cluster, namespace and pod, as far as they are known, already put together.
    """
    names = {"engine": f"{model} engine {engine}", "model": f"Model {model}", "target": "The vLLM server"}
    return names[scope] + where


def fix_line(rank: int | str, title: str, flag: str | None = None) -> str:
    """One fix in a description: ``1. Cap the seats (--max-num-seqs 16)``."""
    return f"{rank}. {title}" + (f" ({flag})" if flag else "")


def description(entry: Verdict | Finding, who: str, numbers: Sequence[str], fixes: Iterable[str]) -> str:
    """The text of one alert: who, the numbers, what it does to users, what to change.

    Args:
        entry: what it is about.
        who: as `subject` gives it.
        numbers: ``KV usage peak 97%`` and the like, in the order of `NUMBERS`.
        fixes: lines as `fix_line` gives them, best first. Template code that yields such lines does too.
    """
    told = ", ".join(numbers)
    lines = [f"{who}: {told}." if told else f"{who}.", entry.impact]
    advised = list(fixes)
    if advised:
        lines += ["What to change, best first:", *advised]
    return "\n".join(lines)
