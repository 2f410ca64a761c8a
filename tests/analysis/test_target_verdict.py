"""The verdict of a target: of which no engine can be read, or all is well."""

import pytest

from exporter.analysis.target_verdict import judge_target

GOOD = {
    "answered": True, "since_good": 0.0, "grace_left": 800.0, "patience": 5.0, "engines": 1, "missing": 0,
}  # fmt: skip


def judged(held="reachable", **changed):
    """The verdict of a state that differs from a good one."""
    return judge_target(held, **GOOD | changed)


@pytest.mark.parametrize(
    ("held", "changed", "verdict", "severity"),
    [
        (None, {}, "reachable", "none"),
        (None, {"answered": False, "since_good": None, "grace_left": 900.0}, "starting", "none"),
        (None, {"answered": False, "since_good": None, "grace_left": 1.0}, "starting", "none"),
        (
            "starting",
            {"answered": False, "since_good": None, "grace_left": 0.0},
            "unreachable",
            "critical",
        ),
        ("reachable", {"answered": False, "since_good": 4.0}, "reachable", "none"),
        ("reachable", {"answered": False, "since_good": 5.1}, "unreachable", "critical"),
        ("metrics_missing", {"answered": False, "since_good": 4.0}, "metrics_missing", "warning"),
        ("unreachable", {}, "reachable", "none"),
        (None, {"engines": 0}, "metrics_missing", "warning"),
        ("reachable", {"missing": 1}, "reachable", "warning"),
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
    assert judged(answered=False, since_good=6.0, grace_left=890.0).verdict == "unreachable"
