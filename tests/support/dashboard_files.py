"""Reads the dashboards for tests: documents, panels and queries."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "dashboards"
NAMES = ("engine", "fleet", "exporter")
VARIABLES = ("cluster", "namespace", "job", "pod", "model_name", "engine")


@dataclass(frozen=True)
class Target:
    """One query of a panel."""

    dashboard: str
    panel: Mapping[str, Any]
    ref: str
    expr: str
    legend: str
    instant: bool

    @property
    def title(self) -> str:
        """Return the title of its panel."""
        return self.panel["title"]

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.title}: {self.ref}"


def document(name: str) -> dict[str, Any]:
    """Return the committed dashboard."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def every_panel(name: str) -> list[dict[str, Any]]:
    """Return all panels without the rows, including panels in collapsed rows."""
    nested = [panel for one in document(name)["panels"] for panel in (one, *one.get("panels", ()))]
    return [panel for panel in nested if panel["type"] != "row"]


def targets(name: str) -> Iterator[Target]:
    """Return all queries of all panels."""
    for panel in every_panel(name):
        for one in panel["targets"]:
            yield Target(name, panel, one["refId"], one["expr"], one["legendFormat"], one["instant"])


TARGETS = [target for name in NAMES for target in targets(name)]


def filled(expr: str, chosen: Mapping[str, str] | None = None, span: str = "1500s") -> str:
    """Return an expression as Grafana sends it; variables that are not selected are All."""
    values = {**dict.fromkeys(VARIABLES, ".*"), **(chosen or {})}
    text = expr.replace("$__rate_interval", "60s").replace("$__range", span)
    return re.sub(r"\$(" + "|".join(VARIABLES) + r")\b", lambda match: values[match[1]], text)


def generator() -> ModuleType:
    """Import ``dashboards/build.py`` as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("dashboards_build", FOLDER / "build.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module
