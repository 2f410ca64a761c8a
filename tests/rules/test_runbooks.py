"""The runbooks: one page per alert, heads from the catalogue, bodies that are right for vLLM V1."""

import re
from pathlib import Path

import pytest
import yaml
from support.promtool import promtool

from docs.generator.runbooks import HEADINGS, head, index, pages, with_head, write
from exporter.analysis.catalogue import load
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
ALERTS = list(pages())


def page(alert):
    """The text of an alert's page."""
    return (RUNBOOKS / f"{alert}.md").read_text(encoding="utf-8")


def section(alert, heading):
    """The text of one section of a page."""
    return page(alert).partition(heading + "\n")[2].partition("\n## ")[0]


def test_every_alert_of_the_catalogue_has_a_name_of_its_own():
    """Engine, model and finding alerts are all there."""
    assert {
        "VllmPreemptionThrash",
        "VllmModelPreemptionThrash",
        "VllmDpImbalance",
        "VllmEngineMissing",
        "VllmExporterDown",
        "VllmNativeRestarted",
    } <= set(ALERTS)


def test_every_page_has_the_head_of_the_catalogue():
    """Summary, severity and fixes of a page are those of the catalogue, to the letter."""
    table = pages()
    assert [alert for alert in ALERTS if not page(alert).startswith(head(table[alert]) + "\n")] == []


def test_every_page_has_its_five_sections_in_order():
    """A reader who knows one page finds everything on the next one, and no section is empty."""
    lines = {alert: page(alert).splitlines() for alert in ALERTS}
    assert {alert: [line for line in lines[alert] if line.startswith("## ")] for alert in ALERTS} == {
        alert: list(HEADINGS) for alert in ALERTS
    }
    empty = [(alert, each) for alert in ALERTS for each in HEADINGS if not section(alert, each).strip()]
    assert empty == []


def faults_of_diagnosis(alert):
    """What is wrong with the diagnosis of a page."""
    diagnosis = section(alert, "## Diagnosis")
    steps = [int(number) for number in re.findall(r"^(\d+)\. ", diagnosis, re.MULTILINE)]
    if len(steps) < 2 or steps != list(range(1, len(steps) + 1)):
        yield f"{alert}: steps {steps}"
    yield from (f"{alert}: no {word}" for word in ("```promql", "kubectl") if word not in diagnosis)


def test_every_diagnosis_is_numbered_and_has_something_to_paste():
    """Steps are in order, with a query and a command."""
    assert [fault for alert in ALERTS for fault in faults_of_diagnosis(alert)] == []


def test_every_mitigation_begins_with_what_stops_the_pain():
    """First relief, then the change."""
    form = re.compile(r"\*\*Now:\*\*.*\*\*Then:\*\*", re.DOTALL)
    assert [alert for alert in ALERTS if not form.search(section(alert, "## Mitigation"))] == []


def test_links_between_pages_lead_somewhere():
    """A link to another page names a file that is there."""
    links = [(alert, target) for alert in ALERTS for target in re.findall(r"\]\((\w+\.md)\)", page(alert))]
    assert links
    assert [(alert, target) for alert, target in links if not (RUNBOOKS / target).exists()] == []


def test_every_page_is_right_for_v1():
    """V1 has no swap space to size and no log line to search for."""
    wrong = re.compile(r"(?<!no )(?<!--)\bswap|grep\b.*preempt", re.IGNORECASE)
    lines = [(alert, line) for alert in ALERTS for line in page(alert).splitlines()]
    assert [(alert, line) for alert, line in lines if wrong.search(line)] == []


def queries():
    """All PromQL that pages and catalogue offer to be pasted."""
    for alert in ALERTS:
        for part in re.findall(r"```promql\n(.*?)```", page(alert), re.DOTALL):
            yield from (f"{alert}: {query}" for query in re.split(r"\n\s*\n", part.strip()))
    table = load()
    for entry in (*table.verdicts.values(), *table.findings.values(), *table.watching.values()):
        yield from (f"{entry.name}: {check.promql}" for check in entry.confirm if check.promql)


@pytest.mark.programs
def test_every_query_is_promql(tmp_path):
    """The real parser takes each of them as the expression of a rule."""
    rules = [
        {"record": f"query:{number}", "expr": query.partition(": ")[2]}
        for number, query in enumerate(queries())
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    status, said = promtool("check", "rules", str(path))
    assert status == 0, said


def test_every_query_asks_for_what_there_is():
    """Names of the exporter's series are those of its table."""
    known = {row.series for row in (*METRICS, *EXPORTER_METRICS)}
    for query in queries():
        for name in re.findall(r"vllm_pressure_\w+", query):
            assert name in known or name == "vllm_pressure_requests_", query


def test_no_page_is_left_over():
    """A page without an alert would be found by nobody."""
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {*ALERTS, "README"}


def test_the_table_over_all_pages_is_current():
    """The table is the generated one."""
    assert (RUNBOOKS / "README.md").read_text(encoding="utf-8") == index()


def test_a_new_head_leaves_the_body_alone():
    """Rewriting a head twice changes nothing but the head."""
    first = with_head("## Meaning\n\nBody.\n", head(pages()["VllmSeatBound"]))
    second = with_head(first, head(pages()["VllmKvBound"]))
    assert second.endswith("\n\n## Meaning\n\nBody.\n")
    assert second.startswith(head(pages()["VllmKvBound"]))
    assert "max_num_seqs is the limit" not in second


def test_writing_makes_every_page(tmp_path):
    """A directory gets the heads of all pages and the table."""
    write(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {*ALERTS, "README"}
