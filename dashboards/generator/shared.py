"""Parts that the dashboards share: variables, annotations, the table of verdicts."""

from dataclasses import replace
from typing import Any, Final

from exporter.analysis.catalogue import Severity
from generator.panels import SOURCE, Column, Query, Row, dashboard, rows, series, table
from generator.queries import (
    ENGINE,
    MODEL,
    OF_ENGINE,
    ROWS,
    SERVER,
    by,
    copied,
    held,
    named,
    ours,
    selector,
)
from generator.words import (
    AS_TEXT,
    COLOURED,
    FIXES,
    HIDDEN,
    SENTENCES,
    SEVERITIES,
    VERDICT_RUNBOOKS,
    VERDICTS,
    WRAPPED,
    to_engine,
    to_runbook,
)

__all__ = ["assembled", "verdict_table"]

TAG: Final = "vllm-pressure"
Json = dict[str, Any]


def assembled(name: str, text: str, *given: Row, time: str) -> Json:
    """Build a dashboard of these rows; its fixed uid and its title come from its name."""
    return dashboard(
        f"{TAG}-{name}",
        f"vLLM pressure: {name}",
        text,
        rows(*given),
        tag=TAG,
        variables=_variables(),
        annotations=_annotations(),
        time=time,
    )


def _variables() -> list[Json]:
    """Build the variables, each filtered by those before it."""
    titles = {
        "cluster": "Cluster", "namespace": "Namespace", "job": "Job", "pod": "Pod",
        "model_name": "Model", "engine": "Engine",
    }  # fmt: skip
    variables, before = [], []
    for name, title in titles.items():
        metric = "vllm_pressure_verdict" if name in OF_ENGINE else ROWS["up"].series
        query = f"label_values({metric}{selector(*before)}, {name})"
        variables.append(series(title, name, query, always=name == "job"))
        before.append(name)
    return variables


def _annotations() -> list[Json]:
    # Alerts about models have neither pod nor engine.
    alerts = (
        'ALERTS{alertname=~"Vllm.*", alertstate="firing", cluster=~"$cluster", namespace=~"$namespace",'
        ' pod=~"$pod|", model_name=~"$model_name|", engine=~"$engine|"}'
    )
    restarts = by(SERVER, f"increase({ours('restarts')}[$__rate_interval])") + " > 0"
    return [
        _annotation(
            "Alerts", alerts, "red", "{{alertname}}", "{{severity}} {{pod}} {{model_name}} {{engine}}"
        ),
        _annotation("Restarts of vLLM", restarts, "blue", "vLLM restarted", "{{pod}} {{target}}"),
    ]


def _annotation(name: str, expr: str, colour: str, title: str, text: str) -> Json:
    return {
        "name": name, "datasource": SOURCE, "enable": True, "hide": False, "iconColor": colour, "expr": expr,
        "titleFormat": title, "textFormat": text, "tagKeys": "severity", "step": "30s",
        "useValueForTime": False,
    }  # fmt: skip


def verdict_table(title: str, text: str, size: tuple[int, int], *more: Column) -> Json:
    """Build the table of engines with their verdicts, worst first.

    Args:
        title: of the panel.
        text: its description.
        size: width and height in units of the grid.
        more: columns that replace the sentence, each named by its expression; with them the table shows
            servers of many places, and a click opens the engine.
    """
    labels = (*ENGINE, "server")
    rank = " or ".join(f"({held(severity)}) * {severity.rank}" for severity in Severity)
    judged = by(
        (*labels, "verdict", "sentence", "runbook"), copied(named(rank), "verdict", "sentence", "runbook")
    )
    queries = [judged, by((*labels, "fix"), named(f"{ours('fix_rank')} == 1"))]
    queries += [by(labels, named(column.name)) for column in more]
    numbers = [replace(column, name=f"Value #{chr(ord('C') + index)}") for index, column in enumerate(more)]
    place = [Column("cluster", "Cluster", 60), Column("namespace", "Namespace", 90)] if more else []
    model = [Column("model_name", "Model", 90)] if more else []
    # The link needs these labels; which of them distinguishes servers depends on the installation.
    unseen = [Column(label, label, look=HIDDEN) for label in ("pod", "target", "instance")] if more else []
    sentence = Column("sentence", "Meaning", None, [SENTENCES], look=WRAPPED)
    return table(
        title,
        text,
        *(Query(expr, instant=True, form="table") for expr in queries),
        size=size,
        columns=[
            Column("Value #A", "Severity", 80, [SEVERITIES], look=COLOURED),
            *place,
            Column("server", "Server", 98, look={"links": [to_engine()]} if more else None),
            *model,
            Column("engine", "Engine", 55, unit=AS_TEXT),
            Column(
                "verdict", "Verdict", 140, [VERDICTS], look={"custom.cellOptions": {"type": "color-text"}}
            ),
            *(numbers or [sentence]),
            Column("fix", "First fix", None if more else 190, [FIXES], look=None if more else WRAPPED),
            Column("runbook", "Runbook", 165, [VERDICT_RUNBOOKS], look={"links": [to_runbook()]}),
            *unseen,
        ],
        sort=("Severity", True),
        hidden=["Value #B", *(["sentence"] if more else [*MODEL, "pod", "target", "instance"])],
        tall=not more,
    )
