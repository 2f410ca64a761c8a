"""Recordings of real servers and field cases under both rule files: scraped every 15 s, by promtool."""

import pytest
from support.promtool import RULES, check, fired
from support.promtool_series import (
    SCRAPE,
    VLLM_TARGET,
    Scrapes,
    Story,
    exposition,
    idle,
    readings,
    recording,
    scraped_sidecar,
    scraped_vllm,
    still,
    story,
)

pytestmark = pytest.mark.programs
SCRAPED = {"sidecar": scraped_sidecar, "native": scraped_vllm}
# Which part of a recording is the storm, and for how long it is repeated.
STORMS = {
    "0.26.0-exhaustion": (0, 95, 300),
    "0.26.0-exhaustion-no-prefix-cache": (0, 63, 300),
    "0.26.0-ramp": (75, 148, 300),
    "0.26.0-restart": (107, 136, 300),
    "0.26.0-two-api-servers": (4, 54, 300),
    "0.26.0-two-engines": (4, 48, 300),
    "0.28.0-exhaustion-short": (8, 40, 300),
    "0.32.0-exhaustion": (0, 90, 300),
    "A1": (0, 999, 300),
    "A5": (0, 999, 0),
    "G3": (75, 190, 300),
}
LOST = {
    "B5": (60, 999, 500),
    "C1": (80, 999, 500),
    "C2": (60, 999, 500),
    "C4": (70, 999, 500),
    "E1": (75, 999, 500),
}
# Nobody gets up for these; what is told as a warning stands beside it.
CALM = {
    "0.26.0-calm": (5, 60, 600),
    "0.26.0-queueing": (5, 70, 600),
    "A2": (0, 999, 0),
    "A3": (0, 999, 600),
    "A6": (0, 999, 0),
    "A8": (0, 999, 600),
    "A9": (0, 1200, 0),
    "B1": (60, 999, 600),
    "B3a": (0, 999, 0),
    "B6": (60, 999, 600),
    "B8": (60, 999, 600),
    "C6": (0, 999, 0),
    "E3": (0, 1200, 0),
    "E4": (0, 999, 0),
    "F1": (0, 1800, 0),
    "F3": (0, 1800, 0),
    "F7": (0, 999, 0),
}
WARNED = {
    "0.26.0-queueing": ({"VllmSeatBound"}, {"VllmNativeQueueNotKv"}),
    "A9": ({"VllmKvPressureRising"}, {"VllmNativeKvBound"}),
    "A2": ({"VllmKvPressureRising"}, set()),
    "A3": (set(), {"VllmNativeKvBound"}),
    "A6": ({"VllmPreemptionThrash"}, {"VllmNativePreemptionThrash"}),
    "B1": ({"VllmQueueNotKv"}, {"VllmNativeQueueNotKv"}),
    "B6": ({"VllmSeatBound"}, {"VllmNativeSeatBound"}),
    "B8": ({"VllmKvBound"}, {"VllmNativeQueueNotKv"}),
    "E4": (set(), {"VllmNativeRestarted"}),
}
PAGE = {"sidecar": "VllmModelPreemptionThrash", "native": "VllmNativeModelPreemptionThrash"}


def lasts(told: Story) -> float:
    """Seconds of a story."""
    return told.polls[-1].t


def outcome(kind: str, scrapes: Scrapes, folder) -> dict[str, str]:
    """Every alert that fired, with its severity."""
    return fired(folder, scrapes.series(), RULES[kind], (scrapes.count - 1) * SCRAPE)


def third(scrape: int) -> bool:
    """One scrape in four is missed."""
    return scrape % 4 == 2


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("name", STORMS)
def test_a_storm_pages(name, kind, tmp_path):
    """With either file, as that of the model and for nothing else; the engine is named by a warning."""
    alerts = outcome(kind, SCRAPED[kind](story(name, *STORMS[name][:2], seconds=STORMS[name][2])), tmp_path)
    assert [alert for alert, severity in alerts.items() if severity == "critical"] == [PAGE[kind]]
    assert alerts[PAGE[kind].replace("Model", "")] == "warning"


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("name", ["0.26.0-exhaustion", "0.32.0-exhaustion", "A1"])
def test_one_missed_scrape_in_four_silences_no_page(name, kind, tmp_path):
    """What is read last holds for a minute, and windows are wider than a gap."""
    begin, end, seconds = STORMS[name]
    scrapes = SCRAPED[kind](story(name, begin, end, seconds=seconds), missed=third)
    assert outcome(kind, scrapes, tmp_path)[PAGE[kind]] == "critical"


@pytest.mark.parametrize("name", [name for name in STORMS if name[0] == "0"])
def test_a_page_comes_within_90_seconds_of_the_verdict(name, tmp_path):
    """Scrape, evaluation and the minute that the verdict has to hold."""
    told = story(name, *STORMS[name][:2], seconds=STORMS[name][2])
    since = next(
        t
        for t, reading in readings(told)
        if any(one.judgement.verdict == "preemption_thrash" for one in reading.engines.values())
    )
    asked = {
        "expr": f'count(ALERTS{{alertname="{PAGE["sidecar"]}",alertstate="firing"}})',
        "eval_time": f"{int(since + 90) // SCRAPE * SCRAPE}s",
        "exp_samples": [{"labels": "{}", "value": 1}],
    }
    case = {"input_series": scraped_sidecar(told).series(), "promql_expr_test": [asked]}
    status, said = check(tmp_path, [case], RULES["sidecar"])
    assert status == 0, said


@pytest.mark.parametrize("name", LOST)
def test_lost_progress_pages_with_either_file(name, tmp_path):
    """An engine that stands still and does not come back by itself."""
    told = story(name, *LOST[name][:2], seconds=LOST[name][2])
    sidecar = outcome("sidecar", scraped_sidecar(told), tmp_path)
    native = outcome("native", scraped_vllm(told), tmp_path)
    pages = [alert for alert, severity in sidecar.items() if severity == "critical"]
    assert len(pages) == 1
    # Without the sidecar a request that cannot fit looks like any dead lock.
    assert [alert for alert, severity in native.items() if severity == "critical"] == [
        pages[0].replace("VllmModel", "VllmNativeModel").replace("UnfittableRequest", "SchedulerDeadlock")
    ]


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("name", CALM)
def test_nobody_gets_up_for_a_calm_server(name, kind, tmp_path):
    """Calm, busy, full and fine, an old total, a queue for other things, a slow climb, a restart."""
    begin, end, seconds = CALM[name]
    alerts = outcome(kind, SCRAPED[kind](story(name, begin, end, seconds=seconds)), tmp_path)
    assert "critical" not in alerts.values()
    assert set(alerts) == WARNED.get(name, (set(), set()))[kind == "native"]


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("version", ["0.26.0", "0.28.0", "0.30.0", "0.32.0"])
def test_an_idle_server_is_quiet(version, kind, tmp_path):
    """Just started, without a request."""
    assert outcome(kind, SCRAPED[kind](still(idle(version), 600)), tmp_path) == {}


@pytest.mark.parametrize(
    "path", sorted(path.name for path in recording("0").parent.parent.glob("expositions/*"))
)
def test_no_version_is_missing_its_metrics(path, tmp_path):
    """Whatever names a release prints, the rules on vLLM's own series know them."""
    told = still(exposition(path.removesuffix(".txt.gz")), 480, every=15)
    assert outcome("native", scraped_vllm(told), tmp_path) == {}


def test_a_critical_wait_pages_by_the_queue_that_does_not_drain(tmp_path):
    """Deferred requests alone are a warning; those of which six finish in a quarter of an hour page."""
    bad = outcome("sidecar", scraped_sidecar(story("B4")), tmp_path)
    assert bad == {"VllmDeferredWait": "warning", "VllmModelDeferredWait": "critical"}
    mild = outcome("sidecar", scraped_sidecar(story("B2", 40, 999, seconds=900)), tmp_path)
    assert mild == {"VllmDeferredWait": "warning"}


@pytest.mark.parametrize("name", ["D3a", "D3b", "D1c"])
def test_missing_metrics_are_told_once(name, tmp_path):
    """By either file, and never as anything else."""
    told = story(name, seconds=600)
    assert outcome("sidecar", scraped_sidecar(told), tmp_path) == {"VllmMetricsMissing": "warning"}
    assert outcome("native", scraped_vllm(told), tmp_path) == {"VllmNativeMetricsMissing": "warning"}


def test_a_server_that_dies_pages_with_either_file(tmp_path):
    """It is down for five minutes, then back with counters that begin anew."""
    told = story("E2")
    sidecar = outcome("sidecar", scraped_sidecar(told), tmp_path)
    assert sidecar == {"VllmUnreachable": "warning", "VllmModelUnreachable": "critical"}
    native = outcome("native", scraped_vllm(told), tmp_path)
    assert native["VllmNativeModelUnreachable"] == "critical"
    assert native["VllmNativeRestarted"] == "info"


def test_a_server_that_loads_for_ten_minutes_is_no_news(tmp_path):
    """The start-up grace is a quarter of an hour, and the exporter is scraped all the while."""
    assert outcome("sidecar", scraped_sidecar(story("I1", 0, 700)), tmp_path) == {}


THRESHOLD_RULE = """\
groups:
  - name: public
    rules:
      - alert: KvCacheFull
        expr: vllm:kv_cache_usage_perc > {}
        for: 2m
        labels: {{severity: critical}}
"""


@pytest.mark.parametrize("limit", [0.9, 0.95])
def test_a_rule_on_the_level_stays_silent_in_a_small_pools_storm(limit, tmp_path):
    """The gauge swings: no level holds for two minutes, while requests are preempted five times a second."""
    rules = tmp_path / "public.yaml"
    rules.write_text(THRESHOLD_RULE.format(limit))
    told = story("0.26.0-exhaustion", 10, 95, seconds=600)
    assert fired(tmp_path, scraped_vllm(told).series(), rules, lasts(told)) == {}


@pytest.mark.parametrize("name", ["F3", "G1"])
def test_a_rule_on_the_level_fires_in_a_large_pool_whatever_happens(name, tmp_path):
    """Full by design and without harm, or crowded and preempting: the level is the same."""
    rules = tmp_path / "public.yaml"
    rules.write_text(THRESHOLD_RULE.format(0.95))
    told = story(name)
    assert fired(tmp_path, scraped_vllm(told).series(), rules, lasts(told)) == {"KvCacheFull": "critical"}


def test_a_scrape_by_two_jobs_is_one_alert(tmp_path):
    """Job, instance, container and endpoint are no part of an alert's identity."""
    told = story("0.26.0-exhaustion", 10, 95, seconds=300)
    twice = scraped_sidecar(told) | scraped_sidecar(told, {**VLLM_TARGET, "job": "annotations"})
    asked = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "5m",
        "exp_samples": [
            {"labels": '{alertname="VllmModelPreemptionThrash"}', "value": 1},
            {"labels": '{alertname="VllmPreemptionThrash"}', "value": 1},
        ],
    }
    case = {"input_series": twice.series(), "promql_expr_test": [asked]}
    status, said = check(tmp_path, [case], RULES["sidecar"])
    assert status == 0, said
