"""The example configuration of Alertmanager, by amtool and in the real program."""

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from support.process import until
from support.programs import EXAMPLE, Alertmanager, Pagers

from exporter.publish.alerts.table import alerts

pytestmark = pytest.mark.programs

ENGINE = {"namespace": "prod", "pod": "vllm-0", "model_name": "demo-7b", "engine": "0"}
MODEL = {"namespace": "prod", "model_name": "demo-7b"}
SIDECAR = {"source": "sidecar"}


def amtool(*arguments: str) -> str:
    """What amtool prints; it must be content."""
    path = shutil.which("amtool")
    assert path, "amtool is missing; `.ci/programs` installs it"
    done = subprocess.run([path, *arguments], capture_output=True, timeout=180, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_amtool_accepts_it():
    """It is valid as it stands."""
    assert "SUCCESS" in amtool("check-config", str(EXAMPLE))


ROUTES = {
    **{
        (alert.name, alert.severity.value): {"critical": "pager", "warning": "chat", "info": "nobody"}[
            alert.severity.value
        ]
        for page_by in ("model", "engine")
        for alert in alerts(page_by)
    },
    ("NodeDown", "critical"): "chat",
    ("VllmQuiteNew", "critical"): "pager",
}


@pytest.mark.parametrize(("alert", "route"), ROUTES.items(), ids=["-".join(alert) for alert in ROUTES])
def test_alerts_are_routed_by_severity(alert, route):
    """Whichever way they came."""
    name, severity = alert
    for source in ((), ("source=sidecar",)):
        labels = (f"alertname={name}", f"severity={severity}", *source)
        assert amtool("config", "routes", "test", f"--config.file={EXAMPLE}", *labels) == route


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """An Alertmanager for all of these tests, which use labels of their own; and who is told."""
    with (
        Pagers() as pagers,
        Alertmanager(tmp_path_factory.mktemp("example") / "data", pagers, "it") as server,
    ):
        yield server, pagers


def alert(name: str, severity: str, *labels: dict[str, str], ended: bool = False) -> dict[str, object]:
    """An alert as it is posted."""
    now = datetime.now(UTC)
    merged = {"alertname": name, "severity": severity}
    for one in labels:
        merged |= one
    return {
        "labels": merged,
        "startsAt": (now - timedelta(minutes=1)).isoformat(),
        "endsAt": (now + timedelta(minutes=0 if ended else 5)).isoformat(),
    }


def state(server: Alertmanager, **wanted: str) -> str:
    """The state of the one alert with these labels; ``-`` where there is none."""
    found = [one["status"]["state"] for one in server.alerts() if wanted.items() <= one["labels"].items()]
    assert len(found) <= 1
    return found[0] if found else "-"


CASES = {
    "the same engine": (ENGINE, ENGINE, "suppressed"),
    "another engine": (ENGINE, ENGINE | {"engine": "1"}, "active"),
    "another pod": (ENGINE, ENGINE | {"pod": "vllm-1"}, "active"),
    "another namespace": (ENGINE, ENGINE | {"namespace": "test"}, "active"),
    "the same model, where the exporter names its pod": (MODEL, MODEL | {"pod": "vllm-0"}, "suppressed"),
    "another model": (MODEL, {"namespace": "prod", "model_name": "b", "pod": "vllm-0"}, "active"),
    "a model, beside an engine of it": (MODEL, ENGINE, "active"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rules_silence_the_exporter_about_the_same_thing_alone(servers, case):
    """And the exporter never silences the rules."""
    server, _ = servers
    rules, pushed, wanted = CASES[case]
    name = "VllmCase" + "".join(part.capitalize() for part in case.replace(",", "").split())
    server.post(alert(name, "warning", rules), alert(name, "warning", pushed, SIDECAR))
    until(lambda: state(server, alertname=name, source="sidecar") == wanted, wanted)
    until(
        lambda: (
            {
                one["status"]["state"]
                for one in server.alerts()
                if one["labels"]["alertname"] == name and "source" not in one["labels"]
            }
            == {"active"}
        ),
        "the rules speak",
    )


@pytest.mark.parametrize(("first", "ends_first"), list(product(("sidecar", "rules"), repeat=2)))
def test_both_routes_are_one_incident_whatever_comes_and_goes_first(servers, first, ends_first):
    """It is paged once and resolved once, when the rules say so."""
    server, pagers = servers
    labels = ENGINE | {"model_name": f"{first}-{ends_first}"}
    ways = {"sidecar": (labels, SIDECAR), "rules": (labels,)}
    second = {"sidecar": "rules", "rules": "sidecar"}

    def told() -> list[tuple[str, set[str]]]:
        return [
            (page.status, page.sources)
            for page in pagers.to("it/pager")
            if page.body["groupLabels"]["model_name"] == labels["model_name"]
        ]

    def tell(way: str, *, ended: bool = False) -> None:
        server.post(alert("VllmPreemptionThrash", "critical", *ways[way], ended=ended))

    tell(first)
    until(lambda: told() == [("firing", {first})], "the page")
    tell(second[first])
    if first == "sidecar":
        until(lambda: told()[1:] == [("firing", {"rules"})], "the same incident, told by the rules")
    until(lambda: state(server, model_name=labels["model_name"], source="sidecar") == "suppressed", "silent")
    tell(ends_first, ended=True)
    if ends_first == "sidecar":
        until(lambda: state(server, model_name=labels["model_name"], source="sidecar") == "-", "its end")
        assert all(status == "firing" for status, _ in told())
    tell(second[ends_first], ended=True)
    until(lambda: told()[-1][0] == "resolved", "the end")
    assert [status for status, _ in told()].count("resolved") == 1
