"""The committed rule files, and what the options of `rules` make of them."""

import re
import textwrap

import pytest
import yaml
from support.promtool import RULES, promtool

from exporter.analysis.conditions.queue import UNFINISHED_SECONDS
from exporter.cli import main
from exporter.config import AnalysisConfig
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS
from exporter.rules.options import THRESHOLDS, Thresholds
from exporter.vllm.names import NAMES, PREFIXES, spellings

KINDS = {"sidecar": (), "native": ("--native",)}


def rules(capsys, *arguments: str) -> str:
    """What the command prints."""
    assert main(["rules", *arguments]) == 0
    return capsys.readouterr().out


def committed(kind: str) -> str:
    """The file that ships."""
    return RULES[kind].read_text(encoding="utf-8")


def alerts(text: str) -> dict[str, dict]:
    """Alerts by name; where one has two severities, the critical one."""
    document = yaml.safe_load(text)
    groups = document.get("groups") or document["spec"]["groups"]
    rows = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    rows.sort(key=lambda rule: rule["labels"]["severity"] == "critical")
    return {rule["alert"]: rule for rule in rows}


def expressions(text: str) -> list[str]:
    """Every expression."""
    return [rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_committed_file_is_current(kind, capsys):
    """It is what the command prints without options."""
    assert committed(kind) == rules(capsys, *KINDS[kind])


@pytest.mark.programs
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--page-by", "engine"),
        ("--selector", 'cluster=~"eu.*",team!="a%b"'),
        ("--server-label", "instance", "--job", "other"),
        ("--label", "team=llm", "--disable", "{any}"),
    ],
    ids=lambda options: options[0] if options else "default",
)
@pytest.mark.parametrize("kind", KINDS)
def test_promtool_finds_nothing_to_say(kind, options, tmp_path, capsys):
    """Not even in its strictest mode."""
    some = {"sidecar": "VllmSeatBound", "native": "VllmNativeSeatBound"}[kind]
    text = rules(capsys, *KINDS[kind], *(option.format(any=some) for option in options))
    path = tmp_path / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    status, said = promtool("check", "rules", "--lint=all", "--lint-fatal", str(path))
    assert status == 0, said


def test_every_series_is_one_of_the_exporters():
    """A name that the table does not have would make a rule that never fires."""
    known = {row.series for row in (*METRICS, *EXPORTER_METRICS)}
    recorded = re.findall(r"record: (\S+)", committed("sidecar"))
    found = set(re.findall(r"(?<![\w:])vllm_pressure_\w+(?![\w:])", committed("sidecar")))
    assert found <= known, found - known
    assert recorded


def test_the_native_rules_know_every_name_that_a_reading_ever_had():
    """Each row of the table under each prefix and spelling."""
    text = committed("native")
    for row in NAMES:
        if row.reading in {"kv_usage", "preemptions", "requests_finished", "requests_running"}:
            for prefix in PREFIXES:
                for name in spellings(row):
                    assert f"({prefix}{name}[" in text, prefix + name


@pytest.mark.parametrize("kind", KINDS)
def test_every_alert_has_what_a_pager_needs(kind):
    """Severity, a summary without numbers, a description, links; every hold with its reason beside it."""
    text = committed(kind)
    for name, rule in alerts(text).items():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        notes = rule["annotations"]
        assert "{{" not in notes["summary"]
        assert notes["summary"].endswith(".")
        assert notes["runbook_url"].endswith(f"/{name}.md")
        if kind == "sidecar":
            assert "var-namespace={{ $labels.namespace | urlquery }}" in notes["dashboard_url"]
        if rule["labels"]["severity"] == "critical":
            assert rule["for"] in {"1m", "2m"}
    for line in re.findall(r"^ +(?:for|keep_firing_for): .*$", text, re.MULTILINE):
        assert re.fullmatch(r" +\w+: \d+[smh]  # \w.{15,}", line), line


@pytest.mark.parametrize("kind", KINDS)
def test_only_models_page(kind):
    """The alert of the single engine is a warning; a server that was never read has no model."""
    paging = {
        name for name, rule in alerts(committed(kind)).items() if rule["labels"]["severity"] == "critical"
    }
    assert {name for name in paging if "Model" not in name} <= {"VllmUnreachable"}
    assert len(paging) >= 4


def test_who_wants_it_is_paged_by_engine(capsys):
    """Then no alert of a model is left that a verdict raises."""
    by_engine = alerts(rules(capsys, "--page-by", "engine"))
    assert not [name for name in by_engine if name.startswith("VllmModel")]
    assert by_engine["VllmEngineStalled"]["labels"]["severity"] == "critical"
    assert by_engine["VllmPreemptionThrash"]["labels"]["severity"] == "critical"
    assert by_engine["VllmKvPressureRising"]["labels"]["severity"] == "warning"
    assert "vllm_pressure_severity" in by_engine["VllmDeferredWait"]["expr"]


def test_without_the_exporter_an_engine_pages_by_a_storm_only_with_harm(capsys):
    """Paged by engine, the same alert is critical with harm and a warning without."""
    text = rules(capsys, "--native", "--page-by", "engine")
    rows = [row for group in yaml.safe_load(text)["groups"] for row in group["rules"]]
    page, warning = (row for row in rows if row.get("alert") == "VllmNativePreemptionThrash")
    assert (page["labels"]["severity"], warning["labels"]["severity"]) == ("critical", "warning")
    assert "engine:vllm_preemption_harm" in page["expr"]
    assert warning["expr"].endswith(f"unless (\n{textwrap.indent(page['expr'], '  ')}\n)")


def test_a_storm_and_its_harm_have_the_thresholds_of_the_exporter():
    """The defaults of the native rules are its own, so both call the same a storm and the same a harm."""
    ours, exporters = Thresholds(), AnalysisConfig()
    for name in ("tokens_fallen", "latency_grown", "kv_full", "deferred_share"):
        assert getattr(ours, name) == getattr(exporters, name), name
    assert ours.preemptions_per_request == exporters.thrash_ratio
    assert ours.preemptions == exporters.burst_count
    assert ours.seconds_between == exporters.thrash_seconds
    assert ours.kv_room >= exporters.kv_roomy  # read at a peak, not on average
    assert UNFINISHED_SECONDS == 600  # the rule's window of ten minutes


def test_a_selector_stands_in_every_series(capsys):
    """In expressions, and in the queries of the annotations, where a per cent sign is doubled for printf."""
    text = rules(capsys, "--selector", 'cluster=~"eu.*",zone!="5%"')
    for expr in expressions(text):
        for series in re.findall(r"(?:vllm_pressure_\w+|\bup)(?:\{[^}]*\})?", expr):
            assert 'cluster=~"eu.*",zone!="5%"' in series, expr
    assert 'vllm_pressure_fix_rank{cluster=~"eu.*",zone!="5%%",%s}' in text


def test_servers_are_told_apart_by_any_label(capsys):
    """Outside Kubernetes there is no pod."""
    text = rules(capsys, "--server-label", "instance")
    assert "by (cluster, namespace, instance, model_name, engine)" in text
    assert "var-pod={{ $labels.instance | urlquery }}" in text
    assert "$labels.pod" not in text
    assert not [expr for expr in expressions(text) if "pod" in expr]


def test_links_labels_and_jobs_are_the_installations_own(capsys):
    """As they were given."""
    text = rules(
        capsys, "--runbook-base", "https://wiki/r/", "--dashboard-base", "https://g", "--label", "team=llm",
        "--label", "region=a=b", "--job", "gpu",
    )  # fmt: skip
    for name, rule in alerts(text).items():
        assert rule["annotations"]["runbook_url"] == f"https://wiki/r/{name}.md"
        assert rule["annotations"]["dashboard_url"].startswith("https://g/d/vllm-pressure-")
        assert (rule["labels"]["team"], rule["labels"]["region"]) == ("llm", "a=b")
    assert 'absent(up{job="gpu"})' in text


def test_an_alert_can_be_left_out(capsys):
    """And nothing else goes with it."""
    left = alerts(rules(capsys, "--disable", "VllmExporterAbsent", "--disable", "VllmSeatBound"))
    assert set(alerts(committed("sidecar"))) - set(left) == {"VllmExporterAbsent", "VllmSeatBound"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_resource_has_the_same_groups(kind, capsys):
    """Under another head."""
    resource = yaml.safe_load(rules(capsys, *KINDS[kind], "--format", "prometheusrule"))
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["spec"]["groups"] == yaml.safe_load(committed(kind))["groups"]


def test_thresholds_are_options(capsys):
    """Each of them reaches an expression."""
    plain = committed("native")
    for name in THRESHOLDS:
        text = rules(capsys, "--native", "--threshold", f"{name}=0.123")
        assert "0.123" in text
        assert "0.123" not in plain


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--disable", "VllmNoSuch"], "unknown alert VllmNoSuch; expected one of VllmExporterAbsent, "),
        (["--selector", 'cluster=~"eu'], "wanted label matchers"),
        (["--selector", 'a="b"} or vector(1)'], "wanted label matchers"),
        (["--label", "severity=page"], "wanted NAME=VALUE of a label that is not the rules' own"),
        (["--label", "team"], "wanted NAME=VALUE"),
        (["--server-label", "a-b"], "wanted the name of a label"),
        (["--threshold", "kv_full=0.8"], "--threshold needs --native"),
        (["--native", "--threshold", "kv_fool=0.8"], "wanted NAME=NUMBER with a name of"),
        (["--native", "--threshold", "kv_full=nan"], "wanted NAME=NUMBER"),
        (["--native", "--threshold", "kv_full=2"], "kv_full is a share: wanted 0 to 1, got 2"),
    ],
)
def test_a_mistake_is_named(arguments, said, capsys):
    """And nothing is printed that could be installed."""
    assert main(["rules", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
