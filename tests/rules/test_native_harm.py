"""Storms without the exporter that warn and page nobody: no harm, or none that is known."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.alert_scenes import Tale, busy
from support.promtool import RULES, fired
from support.promtool_series import SCRAPE

pytestmark = pytest.mark.programs
NAME = "VllmNativePreemptionThrash"
CALM = {"running": "100", "finished": "+36", "tokens": "+100000", "prompts": "+25000", "between": "+5000"}
# 1,065 preemptions for 450 finished requests, and 5 % fewer tokens.
COSTS_LITTLE = {
    **CALM,
    "running": "70",
    "waiting": "30",
    "kv": "0.99",
    "preempted": "+80",
    "finished": "+34",
    "tokens": "+95000",
}
# In proportion to a fifth of the requests.
FEWER = {
    **COSTS_LITTLE,
    "running": "20",
    "waiting": "0",
    "tokens": "+18000",
    "finished": "+8",
    "preempted": "+20",
}
# Requests of ten minutes: that none of a few finishes in ten minutes is chance.
LONG = {**CALM, "running": "4", "finished": "+0.1", "tokens": "+4000"}
LONG_STORM = {**LONG, "finished": "+0", "kv": "0.99", "preempted": "+8", "tokens": "+3000"}
STARTS = {**COSTS_LITTLE, "prompts": "+900000", "finished": "+0", "preempted": "+20"}
GONE: dict[str, str] = {}


def ends(folder: Path, *parts: tuple[Mapping[str, str], int]) -> dict[str, str]:
    """Every alert of a story of parts, with its severity; each part with the number of its scrapes."""
    tale = Tale(NAME, "warning", busy(), busy(), busy())
    series = tale.series(*((busy(**part) if part else part, count) for part, count in parts))
    return fired(folder, series, RULES["native"], (sum(count for _, count in parts) - 1) * SCRAPE)


@pytest.mark.parametrize(
    ("calm", "storm"),
    [(CALM, COSTS_LITTLE), (CALM, FEWER), (LONG, LONG_STORM)],
    ids=["costs little", "fewer requests have fewer tokens", "requests of ten minutes"],
)
def test_a_storm_without_harm_warns(calm, storm, tmp_path):
    """And the queue beside it is none of its own."""
    assert ends(tmp_path, (calm, 60), (storm, 60)) == {NAME: "warning"}


def test_an_hour_of_storms_does_not_become_usual(tmp_path):
    """A level is of calm times only, so that the storm after the storm pages too."""
    harmful = {**COSTS_LITTLE, "tokens": "+40000"}
    assert (
        ends(tmp_path, (CALM, 30), (harmful, 240), (CALM, 20), (harmful, 12))[
            "VllmNativeModelPreemptionThrash"
        ]
        == "critical"
    )


def test_an_hour_of_standing_still_does_not_become_usual(tmp_path):
    """Half of nothing is nothing: a level is of times in which tokens flow."""
    stands = {**CALM, "finished": "+0", "tokens": "+0", "prompts": "+0", "steps": "+0", "between": "+0"}
    harmful = {**COSTS_LITTLE, "tokens": "+40000"}
    alerts = ends(tmp_path, (CALM, 30), (stands, 120), (harmful, 20))
    assert alerts["VllmNativeModelPreemptionThrash"] == "critical"


def test_a_server_of_which_nothing_has_finished_yet_is_young(tmp_path):
    """Ten minutes are not over because Prometheus has seen one."""
    assert ends(tmp_path, (STARTS, 30)) == {NAME: "warning"}


def test_a_restart_is_no_harm(tmp_path):
    """Windows reach across the time without a server: tokens seem to have fallen, and little has finished."""
    back = {**COSTS_LITTLE, "prompts": "+900000"}
    alerts = ends(tmp_path, (CALM, 60), (GONE, 7), (back, 12))
    assert alerts == {NAME: "warning", "VllmNativeRestarted": "info"}


def test_a_storm_after_a_restart_pages_by_its_work(tmp_path):
    """What was usual before is not known to be usual now; that much is computed twice is seen."""
    alerts = ends(tmp_path, (CALM, 60), (GONE, 7), (COSTS_LITTLE, 20))
    assert alerts["VllmNativeModelPreemptionThrash"] == "critical"
