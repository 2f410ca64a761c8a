"""Words, colours and links, from the catalogue and the table of signals."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any, Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity, Verdict
from exporter.analysis.words import WORDS
from exporter.config import AnalysisConfig
from exporter.publish.alerts.table import RUNBOOK_BASE
from generator.panels import by_name, by_query, mapping

__all__ = [
    "AS_TEXT", "COLOURED", "EFFECTS", "FINDINGS", "FIXES", "FLAGS", "FROM_ONE", "HIDDEN", "LIMITS",
    "SENTENCES", "SEVERITIES", "VERDICTS", "VERDICT_FIELDS", "VERDICT_RUNBOOKS", "WRAPPED",
    "runbook", "short", "title", "to_engine", "to_runbook", "unit",
]  # fmt: skip

Json = dict[str, Any]

TABLE: Final = catalogue.load()
LIMITS: Final = AnalysisConfig()


def _colours() -> Mapping[str, str]:
    """Give each verdict a colour: the hue shows the severity, the shade the verdict."""
    shades = {
        Severity.CRITICAL: ("dark-red", "semi-dark-red", "light-red", "super-light-red", "red"),
        Severity.WARNING: (
            "super-light-orange", "light-orange", "orange", "yellow", "light-yellow", "dark-orange",
            "super-light-yellow", "semi-dark-orange", "dark-yellow", "semi-dark-yellow",
        ),
        Severity.INFO: ("semi-dark-blue", "light-blue", "blue"),
        # starting, reachable, sleeping, kv_full_ok, healthy
        Severity.NONE: ("super-light-purple", "semi-dark-green", "light-purple", "light-green", "green"),
    }  # fmt: skip
    left = {severity: cycle(colours) for severity, colours in shades.items()}
    return {name: next(left[_hue(verdict)]) for name, verdict in TABLE.verdicts.items()}


def _hue(verdict: Verdict) -> Severity:
    """Return the severity whose colour a verdict has: a storm that can page is as red as what always does."""
    pages = verdict.critical_when is not None and verdict.topic == "preemption"
    return Severity.CRITICAL if pages else verdict.severity


COLOURS: Final = _colours()
SEVERITY_COLOURS: Final = {"critical": "red", "warning": "orange", "info": "blue", "none": "green"}


def words(name: str) -> str:
    """Spell a name for people: ``preemption_thrash`` becomes Preemption thrash."""
    text = name.replace("_", " ").replace("kv", "KV")
    return text[:1].upper() + text[1:]


_UNITS: Final = {"ratio": "percentunit", "seconds": "s"}  # Grafana's words


def title(signal: str) -> str:
    """Return the title of a signal's panel."""
    return WORDS[signal].title


def short(signal: str) -> str:
    """Return the short title of a signal, for a tile or a column."""
    return WORDS[signal].short[:1].upper() + WORDS[signal].short[1:]


def unit(signal: str) -> str:
    """Return Grafana's name for the unit of a signal."""
    return _UNITS.get(WORDS[signal].unit, "short")


VERDICTS: Final = mapping({name: (words(name), COLOURS[name]) for name in TABLE.verdicts})
SENTENCES: Final = mapping({name: verdict.summary for name, verdict in TABLE.verdicts.items()})
VERDICT_RUNBOOKS: Final = mapping(
    {name: verdict.alert or "README" for name, verdict in TABLE.verdicts.items()}
)
FINDINGS: Final = mapping(
    {"none": "No findings"} | {name: finding.summary for name, finding in TABLE.findings.items()}
)
FIXES: Final = mapping({"none": "No change needed"} | {name: fix.title for name, fix in TABLE.fixes.items()})
FLAGS: Final = mapping(
    {"none": "-"}
    | {
        name: fix.flag_with("…", fix.flag_if_active and fix.flag_name + " {value}") or "-"
        for name, fix in TABLE.fixes.items()
    }
)
EFFECTS: Final = mapping({"none": "-"} | {name: fix.effect for name, fix in TABLE.fixes.items()})
SEVERITIES: Final = mapping(
    {
        str(rank): (name, SEVERITY_COLOURS[name])
        for rank, name in enumerate(("none", "info", "warning", "critical"))
    }
)
VERDICT_FIELDS: Final = tuple(
    by_name(name, color={"mode": "fixed", "fixedColor": COLOURS[name]}, displayName=words(name))
    for name in TABLE.verdicts
)
COLOURED: Final = {"custom.cellOptions": {"type": "color-background", "mode": "basic"}}
# Up to Grafana 11 wrapping is an option of the cell, from 12 on of the column.
WRAPPED: Final = {"custom.cellOptions": {"type": "auto", "wrapText": True}, "custom.wrapText": True}
# Hides a column that only links need: by the option of Grafana up to 12, and by that of later ones.
HIDDEN: Final = {
    "custom.hidden": True,
    "custom.hideFrom": {"viz": True, "legend": False, "tooltip": False},
}
AS_TEXT: Final = "string"  # otherwise Grafana reads a version such as 0.24 as a number
# Counts that are usually 0 are drawn at the bottom, not in the middle of an empty panel.
FROM_ONE: Final = by_query("A", custom__axisSoftMax=1)


def runbook(*verdicts: str) -> Json:
    """Link a panel to runbooks."""
    files = {TABLE.entry(name).alert for name in verdicts}
    links = [
        {"title": f"Runbook {file}", "url": f"{RUNBOOK_BASE}/{file}.md", "targetBlank": True}
        for file in sorted(file for file in files if file)
    ]
    return {"links": links}


def to_runbook() -> Json:
    """Link a cell that shows the name of a runbook."""
    return {"title": "What to do", "url": f"{RUNBOOK_BASE}/${{__value.text}}.md", "targetBlank": True}


def to_engine() -> Json:
    """Link a row of the fleet to the dashboard of its engine."""
    chosen = "&".join(
        f"var-{label}=${{__data.fields.{title}}}"
        for label, title in (
            ("cluster", "Cluster"),
            ("namespace", "Namespace"),
            ("pod", "pod"),
            ("model_name", "Model"),
            ("engine", "Engine"),
        )
    )
    return {
        "title": "This engine",
        "url": f"/d/vllm-pressure-engine?${{datasource:queryparam}}&${{__url_time_range}}&{chosen}",
    }
