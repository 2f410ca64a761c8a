"""Names, severities, labels and texts of alerts: one table for both routes.

Prometheus' rules and the direct push raise the same alerts. The texts of both are built here from the
catalogue; the rules have template expressions where the direct push has values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Finding, Scope, Severity, Verdict
from exporter.analysis.fixes import FixAdvice
from exporter.analysis.relief import NOW, limit_words, relief
from exporter.analysis.words import WORDS

__all__ = [
    "DASHBOARDS", "FIXES_HEAD", "FIXES_SHOWN", "GAIN_WORDS", "IDENTITY", "NUMBERS", "PAGE_SHARE",
    "PAIR_WORDS", "RUNBOOK_BASE", "WORST_ENGINE", "Alert", "alerts", "dashboard_url", "description",
    "fix_line", "gain_words", "runbook_url", "subject",
]  # fmt: skip

_REPOSITORY: Final = "https://github.com/vllm-preemption-exporter/vllm-preemption-exporter"
RUNBOOK_BASE: Final = f"{_REPOSITORY}/blob/main/docs/runbooks"
# The labels that identify an alert, besides its name. Labels of the scrape (job, instance, container,
# endpoint) are not among them.
IDENTITY: Final[Mapping[Scope, tuple[str, ...]]] = {
    "engine": ("cluster", "namespace", "pod", "model_name", "engine"),
    "model": ("cluster", "namespace", "model_name"),
    "target": ("cluster", "namespace", "pod"),
}
# The dashboard that an alert links to, by scope.
DASHBOARDS: Final[Mapping[str, str]] = {
    "engine": "vllm-pressure-engine",
    "model": "vllm-pressure-fleet",
    "target": "vllm-pressure-engine",
    "exporter": "vllm-pressure-exporter",
}
FIXES_HEAD: Final = "What to change, in this order; a restart loses what runs and takes minutes:"
# A page lists the best fixes; the others are in the runbook.
FIXES_SHOWN: Final = 3
# A model pages when at least one engine, and this share of its engines, are in a critical verdict.
PAGE_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert that may be raised."""

    name: str  # ``VllmPreemptionThrash``; of a whole model ``VllmModelPreemptionThrash``
    entry: Verdict | Finding  # its verdict or finding
    scope: Scope  # an engine, a model, or a target of which no engine can be read
    severity: Severity  # only ``critical`` pages
    critical_only: bool = False  # raised only while the verdict is critical


NUMBERS: Final = tuple(WORDS[name] for name in (
    "kv_usage_max_ratio", "requests_running", "requests_waiting", "preemptions_per_second",
    "preemptions_per_finished_request", "recomputed_ratio", "generation_tokens_per_second",
))  # fmt: skip
"""The numbers of a description; each is an exported metric too."""
WORST_ENGINE: Final = "worst engine: "
"""What stands before the numbers of several engines, which are the highest among them."""


def alerts(page_by: str = "model") -> tuple[Alert, ...]:
    """Return all alerts: those of verdicts in order of precedence, then those of findings.

    Args:
        page_by: ``model``: a critical verdict pages by the alert of the model, and the one that names the
            engine is a warning; ``engine``: the alert of the engine pages, and the model has none.
    """
    table = catalogue.load()
    of_verdicts = (alert for verdict in table.verdicts.values() for alert in _of_verdict(verdict, page_by))
    of_findings = (
        Alert(finding.alert, finding, finding.scope, finding.severity)
        for finding in table.findings.values()
        if finding.alert is not None
    )
    return (*of_verdicts, *of_findings)


def _of_verdict(verdict: Verdict, page_by: str) -> Iterator[Alert]:
    if verdict.alert is None:
        return
    severity, model_alert = verdict.severity, verdict.model_alert if page_by == "model" else None
    if model_alert is not None:
        yield Alert(model_alert, verdict, "model", Severity.CRITICAL, critical_only=True)
        severity = min(severity, Severity.WARNING)
    elif verdict.critical_when is not None:
        yield Alert(verdict.alert, verdict, "engine", Severity.CRITICAL, critical_only=True)
    yield Alert(verdict.alert, verdict, "engine", severity)
    if verdict.of_target:
        # Without any engine read so far there is no model to page by.
        yield Alert(verdict.alert, verdict, "target", verdict.severity)


def runbook_url(alert: str, base: str | None) -> str:
    """Return the URL of an alert's runbook, which has the alert's name."""
    return f"{(base or RUNBOOK_BASE).rstrip('/')}/{alert}.md"


def dashboard_url(scope: str, base: str, variables: Mapping[str, str]) -> str:
    """Return a link to the dashboard of a scope, with its variables set: quoted values, or templates."""
    query = "&".join(f"var-{name}={value}" for name, value in variables.items())
    return f"{base.rstrip('/')}/d/{DASHBOARDS[scope]}?{query}"


def subject(scope: Scope, *, model: str = "", engine: str = "", where: str = "") -> str:
    """Return the subject of an alert: ``demo-7b engine 0 (eu/prod/vllm-0)``. Names may be templates.

    `where` has cluster, namespace and pod, as far as they are known, as one text.
    """
    names = {"engine": f"{model} engine {engine}", "model": f"Model {model}", "target": "The vLLM server"}
    return names[scope] + where


def fix_line(
    rank: int | str, title: str, flag: str | None = None, *, restarts: bool = False, gain: str = ""
) -> str:
    """Return the line of one fix: ``1. Cap the seats (--max-num-seqs 16) [restart] [tokens/s 1.30x]``."""
    return f"{rank}. {title}" + (f" ({flag})" if flag else "") + (" [restart]" if restarts else "") + gain


GAIN_WORDS: Final = " [tokens/s %.2fx]"
PAIR_WORDS: Final = " [with the other of this pair it suffices: tokens/s %.2fx]"


def gain_words(advice: FixAdvice) -> str:
    """Return the words of a fix's gain, alone and in a pair; empty where no forecast gives one."""
    alone = "" if advice.gain is None else GAIN_WORDS % advice.gain
    return alone + (PAIR_WORDS % advice.together.tokens.mean if advice.together else "")


def description(
    entry: Verdict | Finding,
    who: str,
    numbers: Sequence[str],
    fixes: Iterable[str],
    limit: str | None = limit_words(None),
) -> str:
    """Return the description of an alert: subject, numbers, impact on users, what helps at once, fixes.

    Args:
        entry: its verdict or finding.
        who: as `subject` gives it.
        numbers: ``KV usage peak 97%`` and the like, in the order of `NUMBERS`.
        fixes: lines of `fix_line`, by rank, or template code that yields such lines.
        limit: as `limit_words` gives it, or template code that yields that.
    """
    shown, advised = ", ".join(numbers), list(fixes)
    now = _now(entry, limit)
    head = [FIXES_HEAD] if advised else []
    return "\n".join([f"{who}: {shown}." if shown else f"{who}.", entry.impact, *now, *head, *advised])


def _now(entry: Verdict | Finding, limit: str | None) -> list[str]:
    deeds = relief(entry.name, entry.severity, limit) if isinstance(entry, Verdict) else ()
    return [f"{NOW}:", *(f"* {deed}" for deed in deeds)] if deeds else []
