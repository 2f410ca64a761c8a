"""Generates parts of ``docs/runbooks``: the head of each page, and the table of all pages.

A page's head (name, summary, severity, fixes) comes from the catalogue and the rules; its body is written by
hand. ``python -m docs.generator.runbooks`` rewrites the heads and the table.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Finding, Severity, Verdict, Watching
from exporter.analysis.relief import NOW, limit_words, paid, relief
from exporter.publish.alerts.table import alerts
from exporter.rules import native, sidecar
from exporter.rules.form import alert_names
from exporter.rules.options import Options, Thresholds

__all__ = ["HEADINGS", "Page", "head", "index", "pages", "with_head", "write"]

HEADINGS: Final = ("## Meaning", "## Impact", "## Diagnosis", "## Mitigation", "## What does not help")
_FOLDER: Final = Path(__file__).parents[2] / "docs" / "runbooks"
_BEGIN: Final = "<!-- head: generated from exporter/analysis/catalogue.yaml, do not edit -->"
_END: Final = "<!-- end of head -->"


@dataclass(frozen=True, slots=True)
class Page:
    """The generated data of one page.

    Attributes:
        alert: its name, and the page's.
        entry: has its words and fixes.
        summary: the alert's.
        severity: in words.
    """

    alert: str
    entry: Verdict | Finding | Watching
    summary: str
    severity: str


def pages() -> Mapping[str, Page]:
    """Return every page by the name of its alert, in the order of the rule files."""
    table = catalogue.load()
    entries: dict[str, Verdict | Finding | Watching] = {alert.name: alert.entry for alert in alerts()}
    entries |= {entry.rule: entry for entry in table.watching.values()}
    made = {
        name: Page(name, entries[name], entries[name].summary, _severity(entries[name], name))
        for name in alert_names(sidecar.groups(Options()))
    }
    by_alert = {
        "".join(part.capitalize() for part in name.split("_")): table.entry(name)
        for name in (*table.verdicts, *table.findings)
    }
    for rule in (
        rule for group in native.groups(Options(), Thresholds()) for rule in group.rules if rule.timing
    ):
        entry = by_alert[rule.name.removeprefix("VllmNative").removeprefix("Model")]
        severity = _native_severity(rule.name, rule.labels["severity"], made)
        made[rule.name] = Page(rule.name, entry, rule.annotations["summary"], severity)
    return made


def head(page: Page) -> str:
    """Return the head of a page, with its markers."""
    lines = [_BEGIN, f"# {page.alert}", "", page.summary, "", f"**Severity:** {page.severity}"]
    if isinstance(page.entry, Verdict) and page.entry.now:
        deeds = relief(page.entry.name, Severity.WARNING, limit_words(None))
        lines += ["", f"**{NOW}:**", "", *(f"* {deed}" for deed in deeds)]
    if page.entry.fixes:
        lines += ["", *_fix_table(page.entry)]
    return "\n".join([*lines, _END])


def with_head(page: str, new_head: str) -> str:
    """Return a page with its head replaced, or added in front."""
    body = page.partition(_END)[2] if _END in page else "\n\n" + page.lstrip("\n")
    return new_head + body


def index() -> str:
    """Return the table of all pages: symptom, alerts, fixes, and what will not help."""
    fixes = catalogue.load().fixes
    lines = [
        "<!-- generated from exporter/analysis/catalogue.yaml, do not edit -->",
        "# Runbooks",
        "",
        "One page per alert, in the order of triage. The last column: fixes that look right but do not help.",
        "Alerts named `VllmNative...` belong to the rules without the exporter.",
        "",
        "| symptom | alert | fixes, cheapest first | will not help |",
        "|---|---|---|---|",
    ]
    rows: dict[str, list[Page]] = {}
    for page in pages().values():
        rows.setdefault(page.entry.name, []).append(page)
    for same in rows.values():
        entry = same[0].entry
        links = "<br>".join(f"[{page.alert}]({page.alert}.md)" for page in same)
        advised = "<br>".join(_short(fix) for fix in entry.fixes)
        useless = "<br>".join(fixes[fix].title for fix in entry.not_help)
        lines.append(f"| {entry.summary} | {links} | {advised} | {useless} |")
    return "\n".join(lines) + "\n"


def write(directory: Path) -> None:
    """Rewrite the heads of all pages in a directory, and its table."""
    for page in pages().values():
        path = directory / f"{page.alert}.md"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(with_head(text, head(page)), encoding="utf-8")
    (directory / "README.md").write_text(index(), encoding="utf-8")


def _severity(entry: Verdict | Finding | Watching, alert: str) -> str:
    if not isinstance(entry, Verdict) or entry.model_alert is None:
        return entry.severity.value
    if alert == entry.model_alert:
        return f"critical, for the whole model; [{entry.alert}]({entry.alert}.md) names each engine"
    page = f"[{entry.model_alert}]({entry.model_alert}.md) pages for the model (critical)"
    if entry.severity is not Severity.CRITICAL and entry.critical_when is not None:
        page += f" in this case: {entry.critical_when}"
    severity = f"warning, for one engine; {page}"
    return f"{severity}; critical, for a server that was never read" if entry.of_target else severity


def _native_severity(name: str, severity: str, made: Mapping[str, Page]) -> str:
    with_exporter = name.replace("VllmNative", "Vllm")
    text = severity
    if name.startswith("VllmNativeModel"):
        engine = name.replace("VllmNativeModel", "VllmNative")
        text = f"{severity}, for the whole model; [{engine}]({engine}.md) names each engine"
    return (
        f"{text}. With the exporter: [{with_exporter}]({with_exporter}.md)" if with_exporter in made else text
    )


def _fix_table(entry: Verdict | Finding | Watching) -> list[str]:
    rows = ["| fix | change | flag | cost | when |", "|---|---|---|---|---|"]
    for fix in map(catalogue.load().fixes.__getitem__, entry.fixes):
        flag = "" if fix.flag is None else f"`{fix.flag_with(None)}`"
        rows.append(f"| `{fix.name}` | {fix.title} | {flag} | {paid(fix)} | {' '.join(fix.conditions)} |")
    return rows


def _short(name: str) -> str:
    fix = catalogue.load().fixes[name]
    return fix.title if fix.flag is None else f"{fix.title} (`{fix.flag.split()[0]}`)"


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER)
