"""A recorded storm through the real programs, by both routes: who is paged, by what, and when it ends.

The storm is played once for most of these tests: one exporter, which Prometheus scrapes and which pushes
by itself. One Alertmanager hears of the rules, one of the exporter, one of both. The waits of the rules
(`for`, `keep_firing_for`, the look-back of one minute and the evaluation every 15 s) are made short in
a copy of the committed file, those of the exporter by its options; nothing else is.
"""

import re
import time
from contextlib import ExitStack
from datetime import datetime
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.process import ANYWHERE, Command, until
from support.programs import Alertmanager, Pagers, Prometheus, Storm

from exporter.analysis import catalogue
from exporter.publish.alerts.table import FIXES_HEAD

pytestmark = pytest.mark.programs

RULES = Path(__file__).parents[2] / "rules" / "vllm-pressure.rules.yaml"
STORM = "0.28.0-exhaustion-short"
VERDICT = catalogue.load().verdicts["preemption_thrash"]
HOLD = 1
PUSHED = (
    f"--alertmanager.hold={HOLD}s",
    "--alertmanager.keep=0s",
    "--alertmanager.external-labels=cluster=eu,namespace=prod,pod=vllm-0",
)
# Long enough for the push, which is the early route, to have paged before.
HASTY = {"for": "7s", "keep_firing_for": "4s"}


def hasty(text: str) -> str:
    """A rule file that waits seconds in place of minutes for a storm, and is evaluated as often."""
    document = yaml.safe_load(text)
    for group in document["groups"]:
        group["interval"] = "2s"
        for rule in group["rules"]:
            if rule.get("alert") in (VERDICT.alert, VERDICT.model_alert):
                rule |= {key: short for key, short in HASTY.items() if key in rule}
                rule["expr"] = re.sub(r"\[1m\]", "[7s]", rule["expr"])
    return yaml.safe_dump(document)


def entered(command: Command) -> bool:
    """Whether the verdict is that of a storm."""
    series = 'vllm_pressure_verdict{engine="0",model_name="tiny-llama",verdict="preemption_thrash"}'
    return command.metric(series) == 1.0


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The storm, from its beginning until everything about it is over."""
    folder = tmp_path_factory.mktemp("storm")
    with ExitStack() as stack:
        pagers = stack.enter_context(Pagers())
        rules, direct, both = (
            stack.enter_context(Alertmanager(folder / name, pagers, name))
            for name in ("rules", "direct", "both")
        )
        storm = stack.enter_context(Storm(STORM))
        urls = f"--alertmanager.urls={direct.url},{both.url}"
        command = stack.enter_context(Command(folder, f"--target.url={storm.url}", *ANYWHERE, urls, *PUSHED))
        host = command.base().removeprefix("http://")
        text = hasty(RULES.read_text())
        stack.enter_context(Prometheus(folder / "prometheus", host, text, (rules, both), "2s"))

        until(lambda: entered(command), "the verdict")
        pushed = until(lambda: len(alerts := direct.alerts()) == 2 and alerts, "the push of both alerts")
        # Inhibition is seen once all four alerts have been processed.
        until(lambda: all_inhibited(both), "both alerts of both routes, and the push inhibited")
        for name in product(("direct", "rules", "both"), ("pager", "chat")):
            route = "/".join(name)
            until(lambda route=route: pagers.story(route)[1:] == ["resolved"], f"the end of {route}", 90.0)
        failed = command.metric('vllm_pressure_exporter_notifications_total{outcome="failed"}')
        time.sleep(1.0)  # whatever would still come comes within a few evaluations
        yield SimpleNamespace(pagers=pagers, pushed=pushed, failed=failed, err=command.err)


def all_inhibited(server: Alertmanager) -> bool:
    """Whether the engine's alert and the model's are known by both routes, and the exporter's are silent."""
    states = sorted(
        (alert["labels"].get("source", "rules"), alert["status"]["state"]) for alert in server.alerts()
    )
    return states == [("rules", "active")] * 2 + [("sidecar", "suppressed")] * 2


def labels(pagers: Pagers, name: str) -> set[tuple[tuple[str, str], ...]]:
    """Return the label sets, without the source, of all alerts that an Alertmanager ever notified of."""
    return {
        tuple(sorted((label, value) for label, value in alert["labels"].items() if label != "source"))
        for receiver in ("pager", "chat")
        for page in pagers.to(f"{name}/{receiver}")
        for alert in page.alerts
    }


@pytest.mark.parametrize("route", ["rules", "direct", "both"])
def test_a_storm_pages_once_and_is_resolved_once(played, route):
    """One incident, whose end is told once: not firing, resolved, firing."""
    assert played.pagers.story(f"{route}/pager") == ["firing", "resolved"]
    assert [page.status for page in played.pagers.to(f"{route}/pager")].count("resolved") == 1


@pytest.mark.parametrize("route", ["rules", "direct", "both"])
def test_the_warning_names_the_engine(played, route):
    """It goes where warnings go, and ends as well."""
    assert played.pagers.story(f"{route}/chat") == ["firing", "resolved"]
    (alert,) = played.pagers.to(f"{route}/chat")[0].alerts
    assert alert["labels"]["alertname"] == "VllmPreemptionThrash"
    assert alert["labels"]["engine"] == "0"


@pytest.mark.parametrize("route", ["rules", "direct"])
def test_the_page_has_summary_numbers_fixes_and_runbook(played, route):
    """The best fixes stand in the description; the rules rank those of the last minute, where two may tie."""
    page = played.pagers.to(f"{route}/pager")[0]
    (alert,) = page.alerts
    notes = alert["annotations"]
    assert alert["labels"]["alertname"] == "VllmModelPreemptionThrash"
    assert notes["summary"] == VERDICT.summary
    assert notes["runbook_url"].endswith("/VllmModelPreemptionThrash.md")
    assert "KV usage peak " in notes["description"]
    assert "preemptions/s" in notes["description"]
    assert VERDICT.impact in notes["description"]
    before, fixes = notes["description"].split(f"{FIXES_HEAD}\n")
    assert "Now, without a restart:\n* Limit concurrency at the gateway to " in before
    fixes = fixes.splitlines()
    ranks = [line.partition(". ")[0] for line in fixes]
    assert len(ranks) == 3
    assert ranks[0] == "1"
    assert ranks == sorted(ranks)
    titles = {fix.title for fix in catalogue.load().fixes.values()}
    assert fixes[0][3:].partition(" (--")[0].partition(" [")[0] in titles


def test_the_two_routes_raise_the_same_alerts(played):
    """The engine's with equal labels; the model's lacks what the rules cannot name."""
    by_rules, pushed = (labels(played.pagers, name) for name in ("rules", "direct"))
    assert len(by_rules) == len(pushed) == 2
    assert {dict(one)["alertname"] for one in by_rules} == {dict(one)["alertname"] for one in pushed}
    engine = {one for one in by_rules if "engine" in dict(one)}
    assert engine
    assert engine <= pushed
    for one in by_rules ^ pushed:
        assert dict(one)["alertname"] == "VllmModelPreemptionThrash"


def test_once_the_rules_speak_the_exporter_is_silent(played):
    """It paged first, alone; after the rules' alert no notification has any of its alerts."""
    pages = played.pagers.to("both/pager")
    assert pages[0].sources == {"sidecar"}
    spoken = [page.sources for page in pages if page.status == "firing"]
    assert all(sources in ({"sidecar"}, {"rules"}) for sources in spoken)
    assert spoken == sorted(spoken, key=lambda sources: sources == {"rules"})


def begin(alert: dict[str, Any]) -> datetime:
    """Return the time at which an alert was raised; Alertmanager writes the same time in several ways."""
    return datetime.fromisoformat(alert["startsAt"])


def test_the_push_comes_before_the_rules_and_none_fails(played):
    """The hold time is shorter than the rules' wait: the exporter's alerts begin earlier."""
    first = {name: played.pagers.to(f"{name}/pager")[0] for name in ("direct", "rules")}
    (pushed,), (by_rules,) = (first[name].alerts for name in ("direct", "rules"))
    assert begin(pushed) < begin(by_rules)
    assert {begin(alert) for alert in played.pushed} == {begin(pushed)}
    assert played.failed == 0


def test_a_stop_amid_the_storm_raises_nothing_and_resolves_nothing(tmp_path):
    """Although the server goes away at the same time; what was told runs out by itself."""
    with ExitStack() as stack:
        pagers = stack.enter_context(Pagers())
        server = stack.enter_context(Alertmanager(tmp_path / "alertmanager", pagers, "direct"))
        storm = stack.enter_context(Storm(STORM))
        command = stack.enter_context(
            Command(
                tmp_path,
                f"--target.url={storm.url}",
                *ANYWHERE,
                f"--alertmanager.urls={server.url}",
                "--alertmanager.hold=1s",
                "--alertmanager.keep=0s",
                "--alertmanager.resend-interval=2s",
            )
        )
        until(lambda: pagers.to("direct/pager"), "the page")
        before = until(lambda: len(alerts := server.alerts()) == 2 and alerts, "the push of both alerts")
        last = max(datetime.fromisoformat(alert["endsAt"]) for alert in before)
        storm.close()
        status, _ = command.stop()
        until(lambda: not server.alerts(), "the alerts run out")
        ended = datetime.now(last.tzinfo)
        until(lambda: pagers.story("direct/pager") == ["firing", "resolved"], "the end is told")
    assert status == 0
    assert {alert["labels"]["alertname"] for alert in before} == {
        "VllmModelPreemptionThrash",
        "VllmPreemptionThrash",
    }
    assert ended >= last
    assert "alert resolved" not in command.err
