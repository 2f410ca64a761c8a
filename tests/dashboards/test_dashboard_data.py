"""The dashboards on a real Prometheus: every query of every panel has something to show in its scene."""

import itertools
import json
import math
import re
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
from support.dashboard_files import NAMES, TARGETS, VARIABLES, Target, document, filled
from support.dashboard_prometheus import prometheus_of
from support.dashboard_scenes import SCRAPE, SECONDS, STORM, Central, Server, fleet

from exporter.commands.dashboards import adapt

pytestmark = pytest.mark.programs

BEGIN = 1_760_000_000.0
END = BEGIN + SECONDS - SCRAPE
# On which server a panel of the engine's dashboard has something to show, where it is not the storm.
SCENES = {
    "KV full in": {"cluster": "eu", "namespace": "prod", "pod": "llama-2"},
    "Refused requests per second": {"cluster": "us", "namespace": "lab", "pod": "tiny-1"},
}
# A server outside Kubernetes whose vLLM nobody scrapes; only its model tells it from the others.
ALONE = {"model_name": "demo-7b"}
VLLM_ROW = "User impact from vLLM's own histograms (if Prometheus also scrapes vLLM)"

Series = list[tuple[dict[str, str], list[float]]]


class Prometheus:
    """One that has the fleet's half hour."""

    def __init__(self, base: str) -> None:
        self._base = base

    def ask(self, path: str, **arguments: object):
        """The data of an answer."""
        query = urllib.parse.urlencode(arguments).encode()
        with urllib.request.urlopen(f"{self._base}/api/v1/{path}?{query.decode()}", timeout=180) as answer:
            return json.load(answer)["data"]

    def series(self, expr: str, *, instant: bool = False, at: float = END) -> Series:
        """What an expression brings: labels and the values that are numbers."""
        if instant:
            found = self.ask("query", query=expr, time=at)["result"]
            rows = [(one["metric"], [one["value"]]) for one in found]
        else:
            found = self.ask("query_range", query=expr, start=BEGIN + 300, end=at, step=30)["result"]
            rows = [(one["metric"], one["values"]) for one in found]
        numbers = [(labels, [float(value) for _, value in values]) for labels, values in rows]
        return [
            (labels, kept) for labels, values in numbers if (kept := [v for v in values if not math.isnan(v)])
        ]

    def of(self, target: Target, chosen: Mapping[str, str]) -> Series:
        """What a query of a panel brings."""
        return self.series(filled(target.expr, chosen), instant=target.instant)

    def value(self, dashboard: str, title: str, chosen: Mapping[str, str], at: float = END) -> float:
        """The one number that a panel shows."""
        (target,) = (one for one in TARGETS if (one.dashboard, one.title) == (dashboard, title))
        ((_, (value,)),) = self.series(filled(target.expr, chosen), instant=True, at=at)
        return value


@pytest.fixture(scope="module")
def servers():
    """The fleet: all servers and their exporters."""
    return fleet()


@pytest.fixture(scope="module")
def prometheus(servers, tmp_path_factory):
    """A Prometheus with the fleet's blocks; it scrapes nothing."""
    with prometheus_of(servers, BEGIN, tmp_path_factory.mktemp("prometheus")) as base:
        yield Prometheus(base)


def scene(target: Target) -> dict[str, str]:
    """What is chosen on a dashboard while a panel is looked at: one server, or all."""
    return SCENES.get(target.title, STORM) if target.dashboard == "engine" else {}


def judged(servers: Sequence[Server | Central]) -> Iterator[tuple[str, int]]:
    """The last verdict of each engine, and of each server without one, with the rank of its severity."""
    for server in servers:
        for one in server.targets if isinstance(server, Central) else (server,):
            reading = one.readings[int(END - BEGIN)]
            judgements = [engine.judgement for engine in reading.engines.values()] or [reading.judgement]
            yield from ((judgement.verdict, judgement.severity.rank) for judgement in judgements)


def legend(target: Target, labels: Mapping[str, str]) -> str:
    """The name of a line as Grafana makes it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), target.legend)


# Every panel has something to show.


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_query_brings_something_in_its_scene(prometheus, target):
    """Numbers, not only series."""
    assert prometheus.of(target, scene(target))


@pytest.mark.parametrize("chosen", ["its scene", "all"])
@pytest.mark.parametrize(
    ("name", "title"), [*dict.fromkeys((target.dashboard, target.title) for target in TARGETS)]
)
def test_no_two_lines_of_a_panel_have_the_same_name(prometheus, name, title, chosen):
    """Also where pods of one name stand in two clusters."""
    names = Counter(
        legend(target, labels)
        for target in TARGETS
        if (target.dashboard, target.title) == (name, title) and target.panel["type"] != "table"
        for labels, _ in prometheus.of(target, scene(target) if chosen == "its scene" else {})
        if target.legend != "__auto"
    )
    assert not [legend for legend, times in names.items() if times > 1]


def test_the_engine_needs_no_scrape_of_vllm(prometheus):
    """With the sidecar alone every panel shows something, but those of vLLM's own histograms."""
    (closed,) = (one for one in document("engine")["panels"] if one["title"] == VLLM_ROW)
    without = {panel["title"] for panel in closed["panels"]} | set(SCENES)
    shown = {
        target.title for target in TARGETS if target.dashboard == "engine" and prometheus.of(target, ALONE)
    }
    wanted = {target.title for target in TARGETS if target.dashboard == "engine"} - without
    assert wanted <= shown


def test_a_server_outside_kubernetes_is_chosen_by_another_label(prometheus):
    """``--server-label instance``: the variable has its values, and selectors obey it."""
    board = adapt("engine", server_label="instance")
    query = next(one for one in board["templating"]["list"] if one["name"] == "pod")["query"]["query"]
    assert query.endswith(", instance)")
    panels = [panel for one in board["panels"] for panel in (one, *one.get("panels", ()))]
    exprs = {panel["title"]: panel["targets"][0]["expr"] for panel in panels if "targets" in panel}
    here, elsewhere = {"pod": "10.9.9.9:21900"}, {"pod": "10.9.9.8:21900"}
    for title in ("Running and waiting", "KV cache usage", "Verdict over time"):
        assert len(prometheus.series(filled(exprs[title], here))) == 1
        assert not prometheus.series(filled(exprs[title], elsewhere))


@pytest.mark.parametrize("name", NAMES)
def test_variables_have_values(prometheus, name):
    """And what is chosen before narrows what is offered after."""
    board = document(name)
    offered = {}
    for one in board["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", one["query"]["query"]).groups()
        chosen = {"cluster": "us", "namespace": "prod"}
        offered[label] = prometheus.ask(f"label/{label}/values", **{"match[]": filled(metric, chosen)})
    assert tuple(offered) == VARIABLES
    assert offered["cluster"] == ["eu", "us"]
    # One that never answered has no model and no engine, but it can be chosen.
    assert offered["pod"] == ["llama-9", "mixtral-0", "qwen-0"]
    assert offered["engine"] == ["0", "1"]


def test_alerts_and_restarts_are_marked(prometheus):
    """Those of what is chosen, and no others."""
    alerts, restarts = (one["expr"] for one in document("engine")["annotations"]["list"])
    other = {"cluster": "us", "namespace": "prod", "pod": "qwen-0"}
    assert prometheus.series(filled(alerts, STORM))
    assert not prometheus.series(filled(alerts, other))
    assert prometheus.series(filled(restarts, other))
    assert not prometheus.series(filled(restarts, STORM))


# What is shown is right.


def test_the_tile_shows_the_verdict(prometheus):
    """By the name of its series."""
    (tile,) = (one for one in TARGETS if (one.dashboard, one.title) == ("engine", "Verdict"))
    ((labels, (engines,)),) = prometheus.of(tile, STORM)
    assert (labels, engines) == ({"verdict": "preemption_thrash"}, 1)


def test_the_tile_shows_a_server_of_which_no_engine_can_be_read(prometheus):
    """Its verdict is one of the target, which has no model and no engine."""
    (tile,) = (one for one in TARGETS if (one.dashboard, one.title) == ("engine", "Verdict"))
    down = {"cluster": "us", "namespace": "prod", "pod": "qwen-0"}
    ((labels, _),) = prometheus.series(filled(tile.expr, down), instant=True, at=BEGIN + 1100)
    assert labels == {"verdict": "unreachable"}


def test_tables_hold_each_engine_once(prometheus, servers):
    """With the rank of its severity, so that the worst stand first."""
    first = next(
        one
        for one in TARGETS
        if (one.dashboard, one.title, one.ref) == ("fleet", "Engines, worst first", "A")
    )
    found = prometheus.of(first, {})
    keys = [
        tuple(labels.get(name, "") for name in ("cluster", "namespace", "server", "engine"))
        for labels, _ in found
    ]
    assert len(keys) == len(set(keys)) == 11 + 2
    never_answered = {labels["server"]: labels["verdict"] for labels, _ in found if "engine" not in labels}
    assert never_answered == {"llama-9": "unreachable", "far-1:8000": "unreachable"}
    ranks = Counter((labels["verdict"], value) for labels, (value,) in found)
    assert ranks == Counter(judged(servers))
    # The storm does harm, so its severity is above that of its verdict in the catalogue.
    assert {("preemption_thrash", 3), ("seat_bound", 2), ("healthy", 0)} <= set(ranks)
    assert {labels["server"] for labels, _ in found} >= {"llama-0", "10.9.9.9:21900"}


def test_a_click_on_a_server_leads_to_its_engine_and_no_other(prometheus):
    """By the labels that the link hands over, wherever the server is and whoever watches it."""
    table = next(
        panel for panel in document("fleet")["panels"] if panel.get("title") == "Engines, worst first"
    )
    (url,) = re.findall(r'"url": "(/d/vllm-pressure-engine[^"]*)"', json.dumps(table))
    handed = dict(re.findall(r"var-(\w+)=\$\{__data\.fields\.(\w+)\}", url))
    titles = {"Cluster": "cluster", "Namespace": "namespace", "Model": "model_name", "Engine": "engine"}
    (first, *_) = (one for one in TARGETS if (one.dashboard, one.title) == ("fleet", "Engines, worst first"))
    panels = [one for one in TARGETS if one.dashboard == "engine" and one.panel["type"] == "timeseries"]
    for labels, _ in prometheus.of(first, {}):
        chosen = {name: labels.get(titles.get(field, field), "") for name, field in handed.items()}
        shown: dict[str, list[str]] = {}
        for one in panels:
            for found, _ in prometheus.of(one, chosen):
                shown.setdefault(one.title, []).append(legend(one, found))
        assert all(len(names) == len(set(names)) for names in shown.values()), labels
        if "engine" in labels:
            assert {"Running and waiting", "KV cache usage", "Verdict over time"} <= shown.keys(), labels


def test_exporters_have_a_version_and_an_answer_in_one_row(prometheus):
    """Also where one exporter watches two servers: a row for each, by the same labels in every query."""
    rows = [
        {
            tuple(labels.get(name, "") for name in ("instance", "target"))
            for labels, _ in prometheus.of(one, {})
        }
        for one in TARGETS
        if (one.dashboard, one.title) == ("exporter", "Exporters and their servers")
    ]
    answers, *rest = rows
    assert len(answers) == 9 + 1 + 2
    assert rest[-1] == answers
    assert all(row <= answers for row in rest)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_0_where_no_exporter_is_known(prometheus, name):
    """A fleet of which nothing is scraped has no engines in trouble that anybody knows of, and not none."""
    nowhere = {"cluster": "nowhere"}
    told = [str(target) for target in TARGETS if target.dashboard == name and prometheus.of(target, nowhere)]
    assert not told


def test_numbers_of_the_fleet_are_right(prometheus):
    """As the scenes were written."""
    assert prometheus.value("fleet", "Engines", {}) == 11
    # The storm, and a server that never answered.
    assert prometheus.value("fleet", "Critical", {"namespace": "prod"}) == 2
    assert prometheus.value("fleet", "Warning", {"pod": "qwen-0", "cluster": "eu"}) == 1
    assert prometheus.value("fleet", "No answer", {}) == 2
    assert prometheus.value("fleet", "No answer", {"namespace": "prod", "cluster": "eu"}) == 0
    assert prometheus.value("fleet", "No answer", {}, at=BEGIN + 1100) == 3
    assert prometheus.value("fleet", "Unbalanced", {}) == 1
    assert prometheus.value("fleet", "Unbalanced", {"cluster": "eu"}) == 0


def test_shares_of_time_are_the_whole_together(prometheus):
    """But for what is too little to be drawn."""
    (share,) = (one for one in TARGETS if one.title == "Share of time, selected range")
    assert sum(value for _, (value,) in prometheus.of(share, {})) == pytest.approx(1, abs=0.01)


def test_fixes_stand_by_rank_and_nothing_is_said_where_there_are_none(prometheus):
    """A table without rows would leave one wondering whether it works."""
    (fixes,) = (one for one in TARGETS if (one.title, one.ref) == ("Recommended changes by rank", "A"))
    ranks = sorted(value for _, (value,) in prometheus.of(fixes, STORM))
    assert ranks == list(itertools.islice(itertools.count(1), len(ranks)))
    ((labels, _),) = prometheus.of(fixes, {"pod": "llama-1"})
    assert labels["fix"] == "none"


def test_vllms_own_process_is_not_taken_for_the_exporter(prometheus):
    """They export the same names; the recorded server's own memory is ten times as large."""
    (memory,) = (one for one in TARGETS if one.title == "Memory")
    found = prometheus.of(memory, {"pod": "tiny-0"})
    assert [labels["job"] for labels, _ in found] == ["pressure"]
