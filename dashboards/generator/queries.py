"""Builds PromQL from the table of the exporter's metrics and the table of vLLM's names."""

from collections.abc import Callable, Iterable
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS, TARGET_VERDICTS
from exporter.vllm.names import NAMES, Name, spellings, version_key

__all__ = [
    "ENGINE", "MODEL", "NATIVE", "OF_ENGINE", "OF_MODEL", "PLACE", "ROWS", "SERVER", "WHERE", "WHO",
    "by", "copied", "held", "named", "narrowed", "native", "nothing", "or_else", "or_none", "ours",
    "quantile", "rate", "selector",
]  # fmt: skip

TABLE: Final = catalogue.load()
ROWS: Final = {row.name: row for row in (*METRICS, *EXPORTER_METRICS)}

# Labels that distinguish servers. A scrape may have one, two or all of pod, target and instance.
SERVER: Final = ("cluster", "namespace", "pod", "target", "instance")
ENGINE: Final = (*SERVER, "model_name", "engine")
# Several namespaces and clusters may have pods of the same name.
WHERE: Final = "{{cluster}} {{namespace}} {{server}}"
WHO: Final = f"{WHERE}/{{{{engine}}}}"
NATIVE: Final = f"{WHO} (vLLM)"
MODEL: Final = ("cluster", "namespace", "model_name")
OF_MODEL: Final = "{{cluster}} {{namespace}} {{model_name}}"

# The variables that filter series. A separate scrape, and so another job, has vLLM's own series.
PLACE: Final = ("cluster", "namespace", "job", "pod")
OF_ENGINE: Final = ("model_name", "engine")


def selector(*labels: str, **more: str) -> str:
    """Build a selector with the dashboard's variables and fixed values."""
    chosen = [f'{label}=~"${label}"' for label in labels]
    return "{" + ", ".join(chosen + [f'{label}="{value}"' for label, value in more.items()]) + "}"


def ours(name: str, part: str = "", **more: str) -> str:
    """Select a metric of the exporter, filtered by all variables that match its labels.

    Args:
        name: as in the table, without prefix and suffix.
        part: of a histogram: ``_bucket``, ``_count`` or ``_sum``.
        more: values of labels.
    """
    row = ROWS[name]
    labels = [*PLACE, *(label for label in OF_ENGINE if label in row.labels)]
    return f"{row.series}{part}{selector(*labels, **more)}"


def narrowed(one: str, matcher: str) -> str:
    """Add a matcher to a selector."""
    return one.removesuffix("}") + f", {matcher}}}"


def native(reading: str, around: Callable[[str], str] = str, part: str = "") -> str:
    """Select a reading from vLLM's own series, under every name that it had.

    Args:
        reading: as in the table of names.
        around: the function applied to each name, such as `rate`.
        part: of a histogram whose sum is in the table: ``_bucket``.
    """
    rows = [row for row in NAMES if row.reading == reading]
    # The newest first: if a release has both names, the first one counts.
    rows.sort(key=lambda row: version_key(row.since), reverse=True)
    return " or ".join(around(_native(row, part)) for row in rows)


def _native(row: Name, part: str) -> str:
    place = [label for label in PLACE if label != "job"]
    fixed = {row.label: row.value} if row.label else {}
    name = row.name.removesuffix("_sum") + part if part else spellings(row)[0]
    return f"vllm:{name}{selector(*place, *OF_ENGINE, **fixed)}"


def rate(one: str) -> str:
    """Return the rate per second."""
    return f"rate({one}[$__rate_interval])"


def by(labels: Iterable[str], expr: str, operation: str = "sum") -> str:
    """Aggregate by labels; without labels, over all series."""
    kept = ", ".join(labels)
    return f"{operation} by ({kept}) ({expr})" if kept else f"{operation}({expr})"


def named(expr: str) -> str:
    """Add the label ``server``: the target if one exporter watches several, else pod or instance."""
    joined = f'label_join({expr}, "server", "|", "target", "pod", "instance")'
    return f'label_replace({joined}, "server", "$1", "server", "[|]*([^|]+).*")'


def or_else(expr: str, value: str) -> str:
    """Return a fallback value if the expression has no result."""
    return f"{expr} or on() {value}"


def or_none(expr: str) -> str:
    """Return 0 if the expression has no result; no data if no exporter is known."""
    return f"{expr} or {_zero()}"


def _zero() -> str:
    return f"0 * count({ours('up')})"


def nothing(label: str) -> str:
    """Return one series with the label value ``none``, if an exporter is known."""
    return f'label_replace({_zero()}, "{label}", "none", "", "")'


def quantile(q: float, buckets: str, labels: Iterable[str]) -> str:
    """Return a quantile of a histogram's buckets."""
    return f"histogram_quantile({q}, {by(('le', *labels), buckets)})"


def copied(expr: str, label: str, *copies: str) -> str:
    """Copy a label to other names, so that a table can show several texts for it."""
    for copy in copies:
        expr = f'label_join({expr}, "{copy}", "", "{label}")'
    return expr


def held(severity: Severity) -> str:
    """Select the current verdicts of one severity: of engines, and of targets without engines.

    A target that never answered has no engine, and so no engine's verdict.
    """
    of_engines = (
        f"({ours('verdict')} == 1 and on ({', '.join(ENGINE)}) {ours('severity')} == {severity.rank})"
    )
    names = [name for name in TARGET_VERDICTS if name != "reachable"]
    if not any(TABLE.verdicts[name].severity is severity for name in names):
        return of_engines
    of_targets = f"{_of_severity(ours('target_verdict'), severity, names)} == 1"
    return f"{of_engines} or ({of_targets} unless on ({', '.join(SERVER)}) {ours('verdict')})"


def _of_severity(one: str, severity: Severity, verdicts: Iterable[str]) -> str:
    names = "|".join(name for name in verdicts if TABLE.verdicts[name].severity is severity)
    return narrowed(one, f'verdict=~"{names}"')
