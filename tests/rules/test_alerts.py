"""Every alert of both rule files by the real promtool: it fires, it stays quiet just below, it resolves.

``pytest tests/rules --rewrite-golden`` writes labels and annotations anew; look at them before keeping them.
"""

from pathlib import Path

import pytest
import yaml
from support.alert_scenes import AFTER, BEFORE, TROUBLE, Tale, native_tales, sidecar_tales
from support.promtool import FIRED, RULES, Alert, alerts_of, alone, at, check, seconds, told
from support.promtool_series import SCRAPE

pytestmark = pytest.mark.programs
GOLDEN = Path(__file__).parent / "golden"
RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
TALES = {"sidecar": sidecar_tales(), "native": native_tales()}
BOTH = [
    pytest.param(kind, tale, id=f"{tale.name}-{tale.severity}")
    for kind, tales in TALES.items()
    for tale in tales
]
BEGIN = BEFORE * SCRAPE
END = BEGIN + (TROUBLE - 1) * SCRAPE
OVER = END + AFTER * SCRAPE


def expected(tale: Tale) -> list[Alert]:
    """The alert's labels and annotations at the end of the trouble, as they were looked at and kept."""
    return yaml.safe_load((GOLDEN / f"{tale.name}-{tale.severity}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("kind", "tale"), BOTH)
def test_it_fires_with_all_its_words_and_resolves(kind, tale, tmp_path, request):
    """Nothing before the trouble; the alert with all labels and annotations in it; nothing long after."""
    golden, rules = GOLDEN / f"{tale.name}-{tale.severity}.yaml", alone(tmp_path, RULES[kind], tale.alert)
    if request.config.getoption("rewrite_golden"):
        case = {"input_series": tale.whole(), "alert_rule_test": [at(END, tale.alert, [])]}
        GOLDEN.mkdir(exist_ok=True)
        got = told(check(tmp_path, [case], rules)[1])
        golden.write_text(yaml.safe_dump(got, width=100_000, allow_unicode=True), encoding="utf-8")
    firing = expected(tale)
    assert [one["labels"]["severity"] for one in firing] == [tale.severity]
    questions = [at(BEGIN - SCRAPE, tale.alert, []), at(END, tale.alert, firing), at(OVER, tale.alert, [])]
    status, said = check(tmp_path, [{"input_series": tale.whole(), "alert_rule_test": questions}], rules)
    assert status == 0, said


@pytest.mark.parametrize(("kind", "tale"), BOTH)
def test_it_stays_quiet_just_below(kind, tale, tmp_path):
    """Not once in a quarter of an hour, and not in what follows."""
    expr = FIRED.replace('firing"', f'firing",alertname="{tale.alert}",severity="{tale.severity}"')
    question = {"expr": expr.format(OVER), "eval_time": f"{OVER}s", "exp_samples": []}
    case = {"input_series": tale.nearly(), "promql_expr_test": [question]}
    status, said = check(tmp_path, [case], alone(tmp_path, RULES[kind], tale.alert))
    assert status == 0, said


@pytest.mark.parametrize(("kind", "tale"), [row for row in BOTH if row.values[1].exact])
def test_it_waits_as_long_as_it_says(kind, tale, tmp_path):
    """It does not fire a scrape earlier, it fires then, and trouble that is a scrape shorter never fires."""
    rule = alerts_of(RULES[kind])[(tale.alert, tale.severity)]
    wait, keep = seconds(rule.get("for", "")), seconds(rule.get("keep_firing_for", ""))
    firing = f'count(ALERTS{{alertstate="firing",alertname="{tale.alert}",severity="{tale.severity}"}})'
    one = [{"labels": "{}", "value": 1}]
    asked = [(BEGIN + wait - SCRAPE, []), (BEGIN + wait, one), (END + keep, one)]
    questions = [{"expr": firing, "eval_time": f"{t}s", "exp_samples": samples} for t, samples in asked]
    ever = {"expr": firing.replace("ALERTS", "max_over_time(ALERTS").replace("})", f"}}[{OVER}s]))")}
    # What was read last is held for up to a minute.
    short = tale.short(max(1, (wait - 60) // SCRAPE))
    cases = [
        {"input_series": tale.whole(), "promql_expr_test": questions},
        {"input_series": short, "promql_expr_test": [{**ever, "eval_time": f"{OVER}s", "exp_samples": []}]},
    ]
    status, said = check(tmp_path, cases, alone(tmp_path, RULES[kind], tale.alert))
    assert status == 0, said


@pytest.mark.parametrize("kind", RULES)
def test_every_alert_has_a_tale_and_a_runbook(kind):
    """An alert that nobody tests or nobody explains does not ship."""
    rules = alerts_of(RULES[kind])
    assert {(tale.alert, tale.severity) for tale in TALES[kind]} == set(rules)
    for name, _ in rules:
        assert (RUNBOOKS / f"{name}.md").exists(), name
        assert rules[(name, _)]["annotations"]["runbook_url"].endswith(f"/{name}.md")


@pytest.mark.parametrize("kind", RULES)
def test_what_is_expected_belongs_to_a_tale(kind):
    """A golden file that nobody compares would be believed."""
    names = {f"{tale.name}-{tale.severity}" for tales in TALES.values() for tale in tales}
    assert {path.stem for path in GOLDEN.iterdir()} == names
