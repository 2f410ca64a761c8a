"""The verdict of a target: of which no engine can be read, or all is well."""

import pytest

from exporter.analysis.target_verdict import TargetState, judge_target

GOOD = TargetState(
    answered=True, since_good=0.0, since_start=100.0, grace=900.0, patience=5.0, engines=1, missing=0
)


def judged(held="healthy", **changed):
    """The verdict of a state that differs from a good one."""
    fields = {name: getattr(GOOD, name) for name in TargetState.__slots__}
    return judge_target(TargetState(**fields | changed), held)


@pytest.mark.parametrize(
    ("held", "changed", "verdict", "severity"),
    [
        (None, {}, "healthy", "none"),
        (None, {"answered": False, "since_good": None, "since_start": 0.0}, "starting", "none"),
        (None, {"answered": False, "since_good": None, "since_start": 899.0}, "starting", "none"),
        (
            "starting",
            {"answered": False, "since_good": None, "since_start": 900.0},
            "unreachable",
            "critical",
        ),
        ("healthy", {"answered": False, "since_good": 4.0}, "healthy", "none"),
        ("healthy", {"answered": False, "since_good": 5.1}, "unreachable", "critical"),
        ("metrics_missing", {"answered": False, "since_good": 4.0}, "metrics_missing", "warning"),
        ("unreachable", {}, "healthy", "none"),
        (None, {"engines": 0}, "metrics_missing", "warning"),
        ("healthy", {"missing": 1}, "healthy", "warning"),
    ],
)
def test_a_target_has_a_verdict_of_its_own_only_where_no_engine_can_be_read(held, changed, verdict, severity):
    """The start has a grace, the last reading its patience, and the first answer ends all of it."""
    judgement = judged(held, **changed)
    assert (judgement.verdict, judgement.severity.value) == (verdict, severity)


def test_an_engine_that_is_gone_is_a_finding_with_things_to_do():
    """The verdict stays that of the others."""
    judgement = judged(missing=1)
    assert judgement.findings == ("engine_missing",)
    assert "restart_engine" in judgement.fixes


def test_there_is_no_second_grace():
    """However soon after the start it goes away again."""
    assert judged(answered=False, since_good=6.0, since_start=10.0).verdict == "unreachable"
