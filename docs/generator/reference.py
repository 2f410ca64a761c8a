"""Generates the tables of the documentation from the tables of the program.

``python -m docs.generator.reference`` rewrites the pages; a test checks that they are current.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from docs.generator.options import options_table
from exporter.analysis import catalogue
from exporter.analysis.conditions import HEALTHY, ORDER, Condition
from exporter.analysis.relief import paid
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS, MetricRow
from exporter.vllm.names import CACHE_LABEL_SINCE, NAMES, Name

__all__ = ["PAGES", "current", "main", "rewritten"]

_BEGIN: Final = "<!-- begin {name} (generated) -->"
_END: Final = "<!-- end {name} -->"


def verdict_table() -> str:
    """Return every verdict with severity, meaning and fixes, in the order in which they are tried."""
    rows = ["| verdict | severity | meaning | fixes considered |", "|---|---|---|---|"]
    written = set()
    for name, applies in _verdict_order():
        verdict = catalogue.load().verdicts[name]
        fixes = ", ".join(f"`{fix}`" for fix in verdict.fixes) or "none needed"
        meaning = verdict.summary
        if name in written and applies is not None:  # the second place of a verdict, with its condition
            meaning, fixes = str(applies.__doc__).partition("\n")[0], "as above"
        written.add(name)
        rows.append(f"| `{name}` | {verdict.severity.value} | {meaning} | {fixes} |")
    return "\n".join(rows) + "\n"


def _verdict_order() -> Iterator[tuple[str, Condition | None]]:
    """Yield names and conditions; verdicts of unreadable servers, and the last one, have no condition."""
    tried = {rule.verdict for rule in ORDER}
    yield from ((name, None) for name in catalogue.load().verdicts if name not in tried and name != HEALTHY)
    yield from ((rule.verdict, rule.applies) for rule in ORDER)
    yield HEALTHY, None


def summary_table() -> str:
    """Return every verdict in one line, for the README."""
    rows = ["| verdict | severity | meaning |", "|---|---|---|"]
    rows += [
        f"| `{verdict.name}` | {verdict.severity.value} | {verdict.summary} |"
        for verdict in catalogue.load().verdicts.values()
    ]
    return "\n".join(rows) + "\n"


def finding_table() -> str:
    """Return every finding with its meaning."""
    rows = ["| finding | of | meaning |", "|---|---|---|"]
    rows += [
        f"| `{finding.name}` | {finding.scope} | {finding.summary} |"
        for finding in catalogue.load().findings.values()
    ]
    return "\n".join(rows) + "\n"


def fix_table() -> str:
    """Return every fix with flag, cost, effect and risk."""
    rows = ["| fix | flag | cost | what it does to the KV cache | risk |", "|---|---|---|---|---|"]
    for fix in catalogue.load().fixes.values():
        flag = f"`{fix.flag.replace('{value}', 'N')}`" if fix.flag else "-"
        since = f" (vLLM {fix.since}+)" if fix.since else ""
        rows.append(f"| `{fix.name}` | {flag}{since} | {paid(fix)} | {fix.effect} | {fix.risk} |")
    return "\n".join(rows) + "\n"


def metric_table() -> str:
    """Return every exported metric with type, labels and help."""
    return "\n".join(_metric_rows(METRICS)) + "\n"


def own_metric_table() -> str:
    """Return the exporter's metrics about itself."""
    return "\n".join(_metric_rows(EXPORTER_METRICS)) + "\n"


def _metric_rows(rows: tuple[MetricRow, ...]) -> Iterator[str]:
    yield "| metric | type | labels | help |"
    yield "|---|---|---|---|"
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels) or "-"
        yield f"| `{row.series}` | {row.type} | {labels} | {row.help} |"


def replica_table() -> str:
    """Return the verdicts that more replicas may cure, and those that they do not."""
    rows = ["| verdict | more replicas | why |", "|---|---|---|"]
    for verdict in catalogue.load().verdicts.values():
        if "add_replicas" in verdict.fixes:
            rows.append(f"| `{verdict.name}` | can help | {verdict.summary} |")
        elif reason := verdict.not_help.get("add_replicas"):
            rows.append(f"| `{verdict.name}` | do not help | {reason} |")
    return "\n".join(rows) + "\n"


def version_table() -> str:
    """Return every reading with each name that vLLM has or had for it."""
    rows = ["| reading | vLLM's name | since | until |", "|---|---|---|---|"]
    last = ""
    for name in NAMES:
        reading = "" if name.reading == last else f"`{name.reading}`"
        rows.append(f"| {reading} | {_spelt(name)} | {name.since} | {name.until or 'today'} |")
        last = name.reading
    return "\n".join(rows) + "\n"


def _spelt(name: Name) -> str:
    selector = f'{{{name.label}="{name.value}"}}' if name.label else ""
    total = "_total" if name.kind == "counter" and not name.name.endswith(("_sum", "_count")) else ""
    return f"`{name.name}{total}{selector}`"


def version_label_table() -> str:
    """Return the labels of `cache_config_info` that date a release."""
    rows = ["| label of `cache_config_info` | first in |", "|---|---|"]
    rows += [f"| `{label}` | {since} |" for label, since in CACHE_LABEL_SINCE.items()]
    return "\n".join(rows) + "\n"


_TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "verdicts": verdict_table,
    "verdict summary": summary_table,
    "findings": finding_table,
    "fixes": fix_table,
    "metrics": metric_table,
    "exporter metrics": own_metric_table,
    "configuration": options_table,
    "replicas": replica_table,
    "versions": version_table,
    "version labels": version_label_table,
}
# Files that hold generated tables, from the repository's root.
PAGES: Final = (
    "README.md",
    "docs/verdicts.md",
    "docs/metrics.md",
    "docs/configuration.md",
    "docs/versions.md",
    "deploy/README.md",
)


def rewritten(text: str) -> str:
    """Return a page with its generated tables rewritten.

    Raises:
        ValueError: a marker names no table, or is not closed.
    """
    for name in re.findall(r"<!-- begin ([a-z ]+) \(generated\) -->", text):
        begin, end = _BEGIN.format(name=name), _END.format(name=name)
        if name not in _TABLES or end not in text:
            raise ValueError(f"expected a known table with its end, got {name!r}")
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{_TABLES[name]()}{end}{rest.partition(end)[2]}"
    return text


def current(root: Path) -> list[str]:
    """Return the pages that are not current."""
    return [page for page in PAGES if (text := (root / page).read_text(encoding="utf-8")) != rewritten(text)]


def main(root: Path) -> None:
    """Rewrite all pages."""
    for page in PAGES:
        path = root / page
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
