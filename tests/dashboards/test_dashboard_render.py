"""The pictures show all of the dashboards: what the dashboards use is among what the harness draws.

It needs neither Node.js nor a browser: ``drawn.json`` is the table that the page itself goes by.
"""

import importlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.dashboard_files import FOLDER, NAMES, document, every_panel

DRAWN = json.loads((FOLDER / "render" / "src" / "drawn.json").read_text(encoding="utf-8"))
PANELS = [panel for name in NAMES for panel in every_panel(name)]
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_kind_of_panel_is_drawn():
    """And none is listed that no dashboard uses; rows are panels too."""
    assert {panel["type"] for panel in PANELS} | {"row"} == set(DRAWN["panels"])


def test_every_kind_of_variable_is_drawn():
    """And none is listed that no dashboard uses."""
    variables = [one for name in NAMES for one in document(name)["templating"]["list"]]
    assert {one["type"] for one in variables} == set(DRAWN["variables"])
    asked = [one["query"]["query"] for one in variables if one["type"] == "query"]
    assert [query for query in asked if not re.fullmatch(r"label_values\(.*, \w+\)", query)] == []


def test_every_transformation_and_format_is_drawn():
    """And none is listed that no dashboard uses."""
    transformations = {one["id"] for panel in PANELS for one in panel.get("transformations", ())}
    formats = {target["format"] for panel in PANELS for target in panel["targets"]}
    assert transformations == set(DRAWN["transformations"])
    assert formats == set(DRAWN["formats"])


def test_no_query_is_instant_and_ranged_at_once():
    """Grafana would ask twice; the harness asks once."""
    assert all(target["instant"] != target["range"] for panel in PANELS for target in panel["targets"])


def options(panel: dict[str, Any]) -> Iterator[str]:
    """The field options that a panel sets, those of its kind as ``custom.NAME``."""
    config = panel["fieldConfig"]
    yield from (name for name in config["defaults"] if name != "custom")
    yield from (f"custom.{name}" for name in config["defaults"].get("custom", ()))
    for override in config["overrides"]:
        yield from (one["id"] for one in override["properties"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_field_option_is_known(panel):
    """Grafana's packages pass over what is not registered, without a word."""
    known = set(DRAWN["fields"]) | {f"custom.{name}" for name in DRAWN["custom"][panel["type"]]}
    assert set(options(panel)) <= known


def test_every_dashboard_has_its_picture(monkeypatch):
    """It ends above a row that there is, and the page about dashboards shows it."""
    monkeypatch.syspath_prepend(FOLDER.parent)
    looks = importlib.import_module("dashboards.render.__main__").LOOKS
    assert set(looks) == set(NAMES)
    for name, look in looks.items():
        titles = [panel["title"] for panel in document(name)["panels"] if panel["type"] == "row"]
        assert look.until in titles
        assert f"../docs/pictures/dashboard-{name}.png" in README


def test_the_lock_file_names_no_registry():
    """It works with any, and with a mirror."""
    lock = json.loads((FOLDER / "render" / "package-lock.json").read_text(encoding="utf-8"))
    assert [name for name, package in lock["packages"].items() if "resolved" in package] == []
    wanted = json.loads((FOLDER / "render" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert {name: lock["packages"][f"node_modules/{name}"]["version"] for name in wanted} == wanted
