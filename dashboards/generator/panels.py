"""Builds the parts of Grafana's classic dashboard JSON.

Knows Grafana and nothing of vLLM. A panel is a dict without its id and its place; `rows` adds both, so that
panels never overlap.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "SOURCE",
    "Column",
    "Query",
    "Row",
    "bars",
    "by_name",
    "by_query",
    "dashboard",
    "graph",
    "heatmap",
    "mapping",
    "rows",
    "series",
    "stat",
    "table",
    "thresholds",
]

Json = dict[str, Any]

SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel.

    Attributes:
        legend: of a line or tile, with ``{{label}}``.
        instant: whether to query only the end of the time range instead of the whole range.
        form: ``time_series``, ``table`` or ``heatmap``.
    """

    expr: str
    legend: str = ""
    instant: bool = False
    form: str = "time_series"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: of the label, or ``Value #A`` for the value of the first query.
        title: the heading.
        width: in pixels; columns without one share the rest.
        mappings: texts shown instead of values.
        unit: of a number.
        look: further properties of the field by path, such as ``{"custom.cellOptions": {...}}``.
    """

    name: str
    title: str
    width: int | None = None
    mappings: Sequence[Json] = ()
    unit: str = ""
    look: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, placed from left to right; a panel that does not fit starts a new line."""

    title: str
    panels: Sequence[Json]
    collapsed: bool = False


# Fields.


def thresholds(*steps: tuple[float, str], base: str = "green") -> Json:
    """Build colours: each applies from its value on, the base colour below the first."""
    from_steps = [{"color": colour, "value": value} for value, colour in steps]
    return {"mode": "absolute", "steps": [{"color": base, "value": None}, *from_steps]}


def mapping(texts: Mapping[str, str | tuple[str, str]]) -> Json:
    """Build a mapping from values to texts, each optionally with its colour."""
    options = {}
    for index, (value, shown) in enumerate(texts.items()):
        text, colour = (shown, None) if isinstance(shown, str) else shown
        options[value] = {"index": index, "text": text} | ({"color": colour} if colour else {})
    return {"type": "value", "options": options}


def by_name(name: str, **properties: Any) -> Json:
    """Build an override for the field of that name; see `_override` for the properties."""
    return _override({"id": "byName", "options": name}, properties)


def by_query(ref: str, **properties: Any) -> Json:
    """Build an override for all series of one query of the panel: ``A`` is the first."""
    return _override({"id": "byFrameRefID", "options": ref}, properties)


def _override(matcher: Json, properties: Mapping[str, Any]) -> Json:
    """Build an override; two underscores in a property's name stand for a dot: ``custom__lineWidth``."""
    listed = [{"id": name.replace("__", "."), "value": value} for name, value in properties.items()]
    return {"matcher": matcher, "properties": listed}


# Panels.


def _panel(kind: str, title: str, text: str, queries: Sequence[Query], size: tuple[int, int]) -> Json:
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "gridPos": {"w": size[0], "h": size[1]},
        "targets": [_target(chr(ord("A") + index), query) for index, query in enumerate(queries)],
    }


def _target(ref: str, query: Query) -> Json:
    return {
        "refId": ref,
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "format": query.form,
        "instant": query.instant,
        "legendFormat": query.legend or "__auto",
        "range": not query.instant,
    }


def graph(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "short",
    size: tuple[int, int] = (8, 8),
    limits: Json | None = None,
    overrides: Sequence[Json] = (),
    stacked: str = "none",
    defaults: Mapping[str, Any] | None = None,
    fill: int = 8,
) -> Json:
    """Build a chart of lines over time, or of stacked areas.

    Args:
        title: of the panel.
        text: its description.
        queries: of its lines.
        unit: of all values.
        size: width and height in units of the grid.
        limits: thresholds, shown as dashed lines.
        overrides: see `by_name` and `by_query`.
        stacked: ``none``, ``normal`` or ``percent``.
        defaults: further properties of all fields, such as ``max``.
        fill: opacity below lines, in per cent; use 0 for many lines.
    """
    custom = {
        "drawStyle": "line",
        "fillOpacity": fill if stacked == "none" else 85,
        "lineInterpolation": "linear" if stacked == "none" else "stepAfter",
        "lineWidth": 2 if stacked == "none" else 0,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": stacked},
        "thresholdsStyle": {"mode": "off" if limits is None else "dashed"},
    }
    fields = {
        "color": {"mode": "palette-classic"},
        "custom": custom,
        "mappings": [],
        "min": 0,
        "thresholds": limits or thresholds(),
        "unit": unit,
        **(defaults or {}),
    }
    return _panel("timeseries", title, text, queries, size) | {
        "fieldConfig": {"defaults": fields, "overrides": list(overrides)},
        "options": {
            "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def stat(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "short",
    size: tuple[int, int] = (4, 5),
    limits: Json | None = None,
    overrides: Sequence[Json] = (),
    shown: str = "auto",
    background: bool = False,
    course: bool = True,
    none: str = "",
    defaults: Mapping[str, Any] | None = None,
) -> Json:
    """Build a panel of large numbers.

    Args:
        title: of the panel.
        text: its description.
        queries: one tile per series.
        unit: of all values.
        size: width and height in units of the grid.
        limits: colours by value.
        overrides: see `by_name` and `by_query`.
        shown: ``value``, ``name``, ``value_and_name`` or ``auto``.
        background: whether the tile has the colour instead of the number.
        course: whether a small chart is shown below.
        none: the text without any data.
        defaults: further properties of all fields.
    """
    fields = {
        "color": {"mode": "thresholds"},
        "mappings": [],
        "min": 0,
        "thresholds": limits or thresholds(base="text"),
        "unit": unit,
        **({"noValue": none} if none else {}),
        **(defaults or {}),
    }
    return _panel("stat", title, text, queries, size) | {
        "fieldConfig": {"defaults": fields, "overrides": list(overrides)},
        "options": {
            "colorMode": "background" if background else "value",
            "graphMode": "area" if course else "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": shown,
            "wideLayout": True,
        },
    }


def bars(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "short",
    size: tuple[int, int] = (6, 8),
    limits: Json | None = None,
    overrides: Sequence[Json] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Json:
    """Build horizontal bars, one per series."""
    fields = {
        "color": {"mode": "thresholds"},
        "mappings": [],
        "min": 0,
        "thresholds": limits or thresholds(base="blue"),
        "unit": unit,
        **(defaults or {}),
    }
    return _panel("bargauge", title, text, queries, size) | {
        "fieldConfig": {"defaults": fields, "overrides": list(overrides)},
        "options": {
            "displayMode": "basic",
            "minVizHeight": 14,
            "minVizWidth": 8,
            "namePlacement": "left",
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "showUnfilled": True,
            "sizing": "auto",
            "valueMode": "color",
        },
    }


def heatmap(title: str, text: str, query: Query, *, size: tuple[int, int] = (8, 8), unit: str) -> Json:
    """Build a histogram over time; the buckets come from the query."""
    return _panel("heatmap", title, text, [query], size) | {
        "fieldConfig": {
            "defaults": {"custom": {"scaleDistribution": {"type": "linear"}}, "unit": "short", "min": 0},
            "overrides": [],
        },
        "options": {
            "calculate": False,
            "cellGap": 1,
            "cellValues": {"unit": "short"},
            "color": {
                "exponent": 0.5, "fill": "dark-orange", "mode": "scheme", "reverse": False,
                "scale": "exponential", "scheme": "Oranges", "steps": 64,
            },
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
            "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
        },
    }  # fmt: skip


def table(
    title: str,
    text: str,
    *queries: Query,
    columns: Sequence[Column],
    size: tuple[int, int] = (24, 8),
    sort: tuple[str, bool] | None = None,
    hidden: Sequence[str] = (),
    tall: bool = False,
) -> Json:
    """Build a table of instant values, one row per set of labels.

    Args:
        title: of the panel.
        text: its description.
        queries: of the form ``table``.
        columns: in their order.
        size: width and height in units of the grid.
        sort: title of a column, and whether the largest stands first.
        hidden: labels and values that are not shown, in addition to the time.
        tall: whether rows hold two lines. (Grafana fits rows to the queried values, not to their mappings.)
    """
    overrides = [_column(column) for column in columns]
    return _panel("table", title, text, queries, size) | {
        "fieldConfig": {
            "defaults": {
                "color": {"mode": "thresholds"},
                "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False},
                "mappings": [],
                "min": 0,
                "thresholds": thresholds(base="text"),
                "unit": "short",
            },
            "overrides": [override for override in overrides if override["properties"]],
        },
        "options": {
            "cellHeight": "lg" if tall else "sm",
            "showHeader": True,
            "sortBy": [] if sort is None else [{"displayName": sort[0], "desc": sort[1]}],
        },
        "transformations": [
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": dict.fromkeys(("Time", *hidden), True),
                    "indexByName": {column.name: index for index, column in enumerate(columns)},
                    "renameByName": {column.name: column.title for column in columns},
                },
            },
        ],
    }


def _column(column: Column) -> Json:
    properties: dict[str, Any] = {}
    if column.width is not None:
        properties["custom.width"] = column.width
    if column.mappings:
        properties["mappings"] = list(column.mappings)
    if column.unit:
        properties["unit"] = column.unit
    return by_name(column.title, **properties, **(column.look or {}))


# Dashboards.


def rows(*given: Row) -> list[Json]:
    """Return all panels with ids and places, row by row."""
    placed: list[Json] = []
    top = number = 0
    for row in given:
        number += 1
        heading = {
            "type": "row", "id": number, "title": row.title, "collapsed": row.collapsed, "panels": [],
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
        }  # fmt: skip
        inside, bottom = _lines(row.panels, top + 1, number)
        number += len(inside)
        heading["panels"] = inside if row.collapsed else []
        placed += [heading] if row.collapsed else [heading, *inside]
        top = top + 1 if row.collapsed else bottom
    return placed


def _lines(panels: Iterable[Json], top: int, number: int) -> tuple[list[Json], int]:
    placed, x, y, bottom = [], 0, top, top
    for panel in panels:
        w, h = panel["gridPos"]["w"], panel["gridPos"]["h"]
        if x + w > WIDTH:
            x, y = 0, bottom
        number += 1
        placed.append(panel | {"id": number, "gridPos": {"h": h, "w": w, "x": x, "y": y}})
        x, bottom = x + w, max(bottom, y + h)
    return placed, bottom


def series(title: str, name: str, query: str, *, always: bool = False) -> Json:
    """Build a variable with the values of a label; several or all may be selected.

    All is a pattern, not a list of the known values: it also matches series without the label, unless the
    label is `always` present.
    """
    return {
        "type": "query",
        "name": name,
        "label": title,
        "datasource": SOURCE,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "allValue": ".+" if always else ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "skipUrlSync": False,
        "sort": 1,
    }


def dashboard(
    uid: str,
    title: str,
    text: str,
    panels: Sequence[Json],
    *,
    tag: str,
    variables: Sequence[Json],
    annotations: Sequence[Json],
    time: str,
) -> Json:
    """Build the document, with links to other dashboards of the same tag that keep time and variables."""
    source = {
        "type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus",
        "current": {}, "hide": 0, "includeAll": False, "multi": False, "options": [], "refresh": 1,
        "regex": "", "skipUrlSync": False,
    }  # fmt: skip
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": [tag, "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "fiscalYearStartMonth": 0,
        "timezone": "",
        "weekStart": "",
        "refresh": "30s",
        "time": {"from": time, "to": "now"},
        "timepicker": {},
        "liveNow": False,
        "links": [
            {
                "type": "dashboards", "title": "vLLM pressure", "tags": [tag], "asDropdown": False,
                "icon": "external link", "includeVars": True, "keepTime": True, "targetBlank": False,
                "tooltip": "", "url": "",
            }
        ],
        "annotations": {"list": list(annotations)},
        "templating": {"list": [source, *variables]},
        "panels": list(panels),
    }  # fmt: skip
