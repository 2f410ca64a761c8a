"""The dashboards by their rules: current, whole, and without a name that nobody exports."""

import functools
import re
from itertools import combinations

import promql_parser as promql
import pytest
import yaml
from support import real_recordings
from support.dashboard_files import (
    FOLDER,
    NAMES,
    ROOT,
    TARGETS,
    VARIABLES,
    document,
    every_panel,
    filled,
    generator,
)

from exporter.analysis import catalogue
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS, PREFIX

PANELS = [(name, panel) for name in NAMES for panel in every_panel(name)]
PANEL_IDS = [f"{name}: {panel['title']}" for name, panel in PANELS]
DRAWN = ("timeseries", "stat", "bargauge", "heatmap", "table")
# Exported, and on no dashboard; each with the reason.
NOT_SHOWN: dict[str, str] = {
    "target_severity": "the severities of the engines show it",
    "fix_pair_gain_ratio": "a number of the alert's text, which the status page has too",
    **dict.fromkeys(
        ("recomputed_tokens_per_second", "recomputed_gpu_time_ratio", "recomputed_cost_per_hour"),
        "what preemptions cost: known only with a forecast, and on the status page",
    ),
    "gateway_limit_requests": "a number of the alert's text, which the status page has too",
}
# What every process of prometheus-client tells, and vLLM's too.
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}
# Prometheus makes this one of alerting rules.
ALERTS = "ALERTS"
COUNTING = ("rate", "increase", "irate", "resets", "changes")


def every_target(function):
    """The test once for each query."""
    return pytest.mark.parametrize("target", TARGETS, ids=str)(function)


def every_panel_once(function):
    """The test once for each panel."""
    return pytest.mark.parametrize(("name", "panel"), PANELS, ids=PANEL_IDS)(function)


def every_dashboard(function):
    """The test once for each dashboard."""
    return pytest.mark.parametrize("name", NAMES)(function)


# The files


@functools.cache
def built() -> object:
    """The generator, loaded once."""
    return generator()


@every_dashboard
def test_the_committed_file_is_what_the_generator_makes(name):
    """After a change of metrics, catalogue or generator: ``python dashboards/build.py``."""
    committed = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert committed == built().text_of(name), "run `python dashboards/build.py`"


def test_no_file_lies_about_that_the_generator_does_not_make():
    """A dashboard that is renamed leaves nothing behind."""
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES) == set(built().DASHBOARDS)


@every_dashboard
def test_the_document_is_as_agreed(name):
    """Fixed short uid, no id, not to be edited in place, linked by tag, relative time."""
    board = document(name)
    assert board["uid"] == f"vllm-pressure-{name}"
    assert len(board["uid"]) <= 40
    assert "id" not in board
    assert board["editable"] is False
    assert board["schemaVersion"] >= 39
    assert "vllm-pressure" in board["tags"]
    (link,) = board["links"]
    assert (link["type"], link["tags"]) == ("dashboards", ["vllm-pressure"])
    assert link["keepTime"]
    assert link["includeVars"]
    assert board["time"]["from"].startswith("now-")
    assert board["time"]["to"] == "now"


@every_dashboard
def test_variables_are_chained(name):
    """Data source first; each of the others is filtered by all before it, refreshed, multiple, with All."""
    source, *rest = document(name)["templating"]["list"]
    assert (source["type"], source["name"], source["label"]) == ("datasource", "datasource", "Data source")
    assert tuple(one["name"] for one in rest) == VARIABLES
    for number, one in enumerate(rest):
        query = one["query"]["query"]
        assert query.endswith(f", {one['name']})")
        used = re.findall(r'(\w+)=~"\$(\w+)"', query)
        assert [label for label, _ in used] == [before for _, before in used] == list(VARIABLES[:number])
        assert (one["refresh"], one["multi"], one["includeAll"]) == (2, True, True)
        # All matches a label that is missing too: not every scrape has a cluster or a pod. Each has a job.
        assert one["allValue"] == (".+" if one["name"] == "job" else ".*")


@every_dashboard
def test_alerts_and_restarts_are_marked(name):
    """On every panel with a time axis, and only those of what is chosen."""
    alerts, restarts = document(name)["annotations"]["list"]
    assert 'ALERTS{alertname=~"Vllm.*", alertstate="firing"' in alerts["expr"]
    assert "vllm_pressure_restarts_total" in restarts["expr"]
    for one in (alerts, restarts):
        assert one["enable"]
        promql.parse(filled(one["expr"]))
        assert 'cluster=~"$cluster", namespace=~"$namespace"' in one["expr"]


@every_dashboard
def test_nothing_lies_on_top_of_anything(name):
    """Panels have places within the grid's 24 columns, do not overlap, and have ids of their own."""
    board = document(name)
    flat = [panel for one in board["panels"] for panel in (one, *one.get("panels", ()))]
    assert len({panel["id"] for panel in flat}) == len(flat)
    for group in (board["panels"], *(one["panels"] for one in board["panels"] if one.get("panels"))):
        for panel in group:
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for one, other in combinations([panel["gridPos"] for panel in group], 2):
            apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            assert apart_x or apart_y


def test_the_engine_answers_the_questions_in_order():
    """Now, preemption, KV and queue, user impact, fix; then what is closed at first."""
    rows = [panel for panel in document("engine")["panels"] if panel["type"] == "row"]
    begun = [re.split(r"[:(]", row["title"])[0].strip() for row in rows if not row["collapsed"]]
    assert begun == ["Now", "Preemption", "KV cache and queue", "User impact", "Fix"]
    assert [row["collapsed"] for row in rows] == [False] * 5 + [True] * 2


# Panels


@every_panel_once
def test_a_panel_says_what_it_shows(name, panel):
    """A title, one to three sentences that say what good looks like, a unit, a data source to choose."""
    assert panel["type"] in DRAWN
    assert panel["title"]
    sentences = re.findall(r"[.!?](?: |$)", panel["description"])
    assert 1 <= len(sentences) <= 3
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


def test_no_title_is_used_twice_on_a_dashboard():
    """Or a picture of a panel could be of either."""
    for name in NAMES:
        titles = [panel["title"] for panel in every_panel(name)]
        assert len(set(titles)) == len(titles)


@every_panel_once
def test_a_panel_is_drawn_as_agreed(name, panel):
    """From 0 up, thresholds said and not Grafana's 80, a tooltip with all lines, sorted."""
    fields, options = panel["fieldConfig"]["defaults"], panel["options"]
    assert fields["min"] == 0
    if panel["type"] != "heatmap":
        steps = fields["thresholds"]["steps"]
        assert steps[0]["value"] is None
        assert [step["value"] for step in steps[1:]] == sorted({step["value"] for step in steps[1:]})
        assert 80 not in [step["value"] for step in steps]
    if panel["type"] == "timeseries":
        assert options["tooltip"] == {"mode": "multi", "sort": "desc"}
        assert options["legend"]["showLegend"]


@every_panel_once
def test_an_override_finds_its_field(name, panel):
    """A column's title, a query of the panel, or a verdict that may come."""
    columns = set()
    for step in panel.get("transformations", ()):
        columns |= set(step["options"].get("renameByName", {}).values())
    known = {
        "byName": columns or set(catalogue.load().verdicts),
        "byFrameRefID": {target["refId"] for target in panel["targets"]},
    }
    for override in panel["fieldConfig"]["overrides"]:
        assert override["matcher"]["options"] in known[override["matcher"]["id"]]


def test_every_verdict_has_a_colour_of_its_severity():
    """And no two of them the same one: the legend is the only key."""
    (panel,) = (panel for panel in every_panel("engine") if panel["title"] == "Verdict over time")
    colours = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
    }
    verdicts = catalogue.load().verdicts
    assert list(colours) == list(verdicts)
    assert len(set(colours.values())) == len(colours)
    hues = {
        "critical": {"red"},
        "warning": {"orange", "yellow"},
        "info": {"blue"},
        "none": {"green", "purple"},
    }
    for name, colour in colours.items():
        severity = "critical" if name == "preemption_thrash" else verdicts[name].severity.value
        assert colour.rpartition("-")[2] in hues[severity]


@every_panel_once
def test_a_runbook_that_is_linked_is_there(name, panel):
    """By the name that the catalogue has for it."""
    known = {
        entry.alert
        for table in (catalogue.load().verdicts, catalogue.load().findings)
        for entry in table.values()
    }
    for link in panel.get("links", ()):
        assert re.fullmatch(r".*/docs/runbooks/(\w+)\.md", link["url"])[1] in known


# Queries


def walk(expr: promql.Expr, inside: tuple[str, ...] = ()):
    """Every selector of an expression, with the functions around it, the outermost first."""
    if isinstance(expr, promql.VectorSelector):
        yield expr, inside, False
    elif isinstance(expr, promql.MatrixSelector):
        yield expr.vector_selector, inside, True
    elif isinstance(expr, promql.Call):
        for argument in expr.args:
            yield from walk(argument, (*inside, expr.func.name))
    elif isinstance(expr, promql.BinaryExpr):
        yield from walk(expr.lhs, inside)
        yield from walk(expr.rhs, inside)
    elif isinstance(expr, promql.AggregateExpr | promql.ParenExpr | promql.UnaryExpr | promql.SubqueryExpr):
        yield from walk(expr.expr, inside)


def selectors(target):
    """Every selector of a query: name, matchers by label, functions around it, whether it has a range."""
    for selector, inside, ranged in walk(promql.parse(filled(target.expr))):
        matchers = {one.name: (str(one.op), one.value) for one in selector.matchers.matchers}
        yield selector.name, matchers, inside, ranged


@functools.cache
def exported() -> frozenset[str]:
    """Every name of the exporter's table, as it stands in queries."""
    names = set()
    for row in (*METRICS, *EXPORTER_METRICS):
        ends = ("_bucket", "_count", "_sum") if row.type == "histogram" else ("",)
        names |= {row.series + end for end in ends}
    return frozenset(names)


@functools.cache
def printed() -> frozenset[str]:
    """Every name in the bodies that real vLLM servers and releases printed."""
    bodies = [real_recordings.exposition(path) for path in real_recordings.EXPOSITIONS]
    bodies += [
        real_recordings.polls(name)[-1].body or b"" for name in (real_recordings.CALM, "0.32.0-exhaustion")
    ]
    return frozenset(
        name for body in bodies for name in re.findall(r"^([a-zA-Z_:][\w:]*)", body.decode(), re.MULTILINE)
    )


@every_target
def test_every_name_is_one_that_somebody_exports(target):
    """The exporter by its table, vLLM by what was recorded of it, or any process of prometheus-client."""
    for name, *_ in selectors(target):
        assert name in (exported() | printed() if not name.startswith("process_") else PROCESS & printed())


def test_every_metric_of_the_exporter_is_shown_somewhere():
    """Or it says here why not."""
    shown = {name for target in TARGETS for name, *_ in selectors(target)}
    for row in (*METRICS, *EXPORTER_METRICS):
        there = any(name == row.series or name.startswith(f"{row.series}_") for name in shown)
        assert there or row.name in NOT_SHOWN, f"{row.name} is on no dashboard"


@every_target
def test_every_selector_obeys_the_variables(target):
    """The exporter's by all of its labels; vLLM's own by all but the job, for it has a job of its own."""
    labels = {row.series: row.labels for row in (*METRICS, *EXPORTER_METRICS)}
    for name, matchers, *_ in selectors(target):
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        wanted = {"cluster", "namespace", "pod"}
        wanted |= {"job"} if not name.startswith("vllm:") else {"model_name", "engine"}
        wanted |= {"model_name", "engine"} & set(labels.get(name, labels.get(base, ())))
        assert wanted <= set(matchers)
    for label in VARIABLES:
        assert f'{label}="$' not in target.expr, "a choice of several needs =~"


@every_target
def test_rates_take_the_interval_that_grafana_offers(target):
    """A fixed one is too short for a slow scrape and too long for a close look."""
    for span in re.findall(r"rate\([^()]*\[([^\]]*)\]\)", target.expr):
        assert span == "$__rate_interval"


@every_target
def test_counters_stand_in_rates_and_nothing_else_does(target):
    """The level of a counter says nothing, and the rate of a gauge is none."""
    for name, _, inside, ranged in selectors(target):
        counts = name.endswith(("_total", "_bucket", "_count", "_sum"))
        rated = ranged and bool(inside) and inside[-1] in COUNTING
        assert counts == rated, name


@every_target
def test_a_division_cannot_be_by_nothing(target):
    """What is divided by is compared with 0 before, or is the whole of what is above."""
    for _, after in re.findall(r"(/)\s*(\S[^/]*)", target.expr):
        assert re.search(r"> 0\)|^scalar\(", after)


@every_target
def test_lines_are_named_by_server_and_engine(target):
    """As far as the query keeps them apart; a table has columns instead."""
    if target.panel["type"] in ("timeseries", "bargauge") and "{{server}}" in target.legend:
        assert "label_replace" in target.expr
    labels = {label for row in (*METRICS, *EXPORTER_METRICS) for label in row.labels}
    for label in re.findall(r"\{\{(\w+)\}\}", target.legend):
        assert label in target.expr or label in labels


def test_recording_rules_are_not_needed():
    """The dashboards work where nobody has loaded the rules."""
    made = {
        rule["record"]
        for path in (ROOT / "rules").glob("*.rules.yaml")
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    assert not made & {name for target in TARGETS for name, *_ in selectors(target)}


def test_alerts_lead_to_dashboards_that_exist():
    """With variables that they have."""
    text = (ROOT / "rules" / "vllm-pressure.rules.yaml").read_text(encoding="utf-8")
    links = re.findall(r"/d/([\w-]+)\?(\S+)", text)
    assert links
    for uid, query in links:
        assert uid in {document(name)["uid"] for name in NAMES}
        assert set(re.findall(r"var-(\w+)=", query)) <= {*VARIABLES, "datasource"}


def test_nothing_is_exported_under_another_prefix():
    """The lint above takes every name without the prefix for vLLM's own."""
    assert all(name.startswith(PREFIX) for name in exported())


# What stands beside


def test_the_readme_names_every_dashboard():
    """With its uid, its picture, and no picture that is not there."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"| `{name}.json` | `{document(name)['uid']}` |" in text
    pictures = [(FOLDER / path).resolve() for path in re.findall(r"\]\((\S+\.png)\)", text)]
    assert len(pictures) == len(NAMES)
    assert all(path.stat().st_size < 200_000 for path in pictures)


def test_provisioning_is_in_grafanas_form():
    """One provider of files, one data source of the type that the dashboards ask for."""
    (provider,) = yaml.safe_load((FOLDER / "provisioning" / "dashboards.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"].startswith("/var/lib/grafana/")
    (source,) = yaml.safe_load((FOLDER / "provisioning" / "datasources.yaml").read_text())["datasources"]
    assert source["type"] == document("fleet")["templating"]["list"][0]["query"] == "prometheus"
