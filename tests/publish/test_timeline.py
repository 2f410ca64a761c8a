"""The last ten minutes of a target's engines: points, events and memory."""

import json
import sys

import pytest
from support import bodies
from support.scenes import Stage

from exporter.publish.page.timeline import (
    COLUMNS,
    MOST_BYTES,
    MOST_ENGINES,
    MOST_EVENTS,
    POINTS,
    SECONDS,
    Timeline,
)


def kept(readings):
    """Return a timeline with some readings."""
    timeline = Timeline()
    for reading in readings:
        timeline.add(reading)
    return timeline


def only(timeline):
    """Return its one engine as in the JSON."""
    (shown,) = timeline.as_object().values()
    return shown


def test_a_point_per_poll_holds_what_the_engine_showed():
    """Column by column, in seconds since the first poll."""
    shown = only(kept(Stage().play(3, running=lambda t: 5 + t, waiting=2, kv=0.5)))
    assert shown["t"] == [0, 1, 2]
    assert shown["requests_running"] == [5, 6, 7]
    assert shown["requests_waiting"] == [2, 2, 2]
    assert shown["kv_usage_ratio"] == [0.5, 0.5, 0.5]
    assert shown["preemptions_per_second"] == [None, 0, 0]


def test_ten_minutes_are_kept_and_no_more():
    """However long the exporter runs."""
    timeline = kept(Stage().play(SECONDS + 300, running=1, kv=0.3))
    (track,) = timeline.tracks.values()
    assert len(track.times) == POINTS
    assert track.times[-1] - track.times[0] == SECONDS - 1
    assert {len(column) for column in track.columns.values()} == {POINTS}


def test_polls_closer_together_than_a_point_become_one():
    """At five polls a second ten minutes are still 600 points; the newest poll of each counts."""
    stage = Stage(interval=0.2)
    timeline = kept(stage.play(SECONDS + 20, running=lambda t: int(5 * t) % 100, kv=0.3))
    (track,) = timeline.tracks.values()
    assert len(track.times) <= POINTS
    assert track.times[-1] - track.times[0] > 0.9 * SECONDS
    assert (
        track.columns["requests_running"][-1]
        == stage.readings[-1].engines.popitem()[1].signals.requests_running
    )


def test_polls_that_fail_leave_a_gap_only_once_the_last_reading_is_too_old():
    """One missed poll makes no gap; unknown values are null."""
    stage = Stage()
    blink = [*stage.play(3, running=4, kv=0.4), *stage.fail(2), *stage.play(2, running=4, kv=0.4)]
    assert only(kept(blink))["t"] == [0, 1, 2, 5, 6]
    stage = Stage()
    outage = [*stage.play(3, running=4, kv=0.4), *stage.fail(20), *stage.play(2, running=4, kv=0.4)]
    shown = only(kept(outage))
    assert shown["requests_running"] == [4, 4, 4, None, 4, 4]
    assert shown["t"][3] == 8  # six seconds after the last good poll


def test_changes_of_verdict_and_restarts_are_kept_with_their_times():
    """The verdict that held at first is one of them."""
    stage = Stage()
    readings = stage.play(30, running=4, kv=0.4, tokens=100, finished=1)
    stage.restart()
    readings += [*stage.play(30, running=4, kv=0.4, tokens=100, finished=1), *stage.fail(10)]
    shown = only(kept(readings))
    assert shown["restarts"] == [30]
    assert shown["verdicts"] == [[0, "healthy", "none"], [65, "unreachable", "critical"]]


def test_the_verdict_that_held_when_the_ten_minutes_began_stays():
    """The band always has a beginning; older changes and restarts are dropped."""
    stage, part = Stage(), {"running": 4, "kv": 0.4, "tokens": 100, "finished": 1}
    readings = stage.play(10, **part)
    stage.restart()
    readings += [*stage.play(10, **part), *stage.fail(10), *stage.play(SECONDS + 10, **part)]
    shown = only(kept(readings))
    assert [verdict for _, verdict, _ in shown["verdicts"]] == ["healthy"]
    assert shown["restarts"] == []


def test_events_are_bounded_too():
    """An engine that comes and goes at every poll fills no memory."""
    stage = Stage(engines=("0", "1"))
    parts = {"0": {"running": 1, "kv": 0.2}}
    readings = []
    for _ in range(MOST_EVENTS + 40):
        readings += stage.play(1, parts) + stage.play(1, parts | {"1": {"running": 1, "kv": 0.2}})
    assert len(kept(readings).tracks["1"].changes) == MOST_EVENTS


def test_the_memory_of_an_engine_is_as_small_as_it_is_said_to_be():
    """After far more than ten minutes of five polls per second."""
    stage = Stage(interval=0.5)
    timeline = Timeline()
    for _ in range(40):
        for reading in (*stage.play(15, running=3, kv=0.5), *stage.fail(10)):
            timeline.add(reading)
        stage.restart()
    (track,) = timeline.tracks.values()
    size = sum(map(sys.getsizeof, (track.times, track.changes, track.restarts, *track.columns.values())))
    size += sum(sys.getsizeof(change) + sys.getsizeof(change.t) for change in track.changes)
    size += sum(map(sys.getsizeof, track.restarts))
    assert size <= MOST_BYTES


def test_a_server_that_makes_up_engines_fills_no_memory():
    """The first ones are kept."""
    many = bodies.body(*(bodies.engine(str(number), kv=0.5) for number in range(3 * MOST_ENGINES)))
    assert len(kept([Stage().take(many)]).tracks) == MOST_ENGINES


def test_an_engine_that_is_forgotten_is_forgotten_here():
    """With all its points."""
    stage = Stage(engines=("0", "1"))
    timeline = kept(stage.play(3, running=1, kv=0.1))
    assert set(timeline.tracks) == {"0", "1"}
    fresh = Stage(engines=("0",))
    timeline.add(fresh.play(5, running=1, kv=0.1)[-1])
    assert set(timeline.tracks) == {"0"}


def test_an_engine_keeps_its_past_when_its_name_changes():
    """A second model with an engine of the same number comes before it in the order of names."""
    stage = Stage(model="zeta")
    own = bodies.engine("0", model="zeta", kv=0.25, running=1)
    timeline = kept([stage.take(bodies.body(own)) for _ in range(5)])
    other = bodies.engine("0", model="alpha", kv=0.75, running=2)
    timeline.add(stage.take(bodies.body(own, other)))
    shown = timeline.as_object()
    assert shown["0"]["kv_usage_ratio"] == [0.75]
    assert shown["zeta/0"]["kv_usage_ratio"] == [0.25] * 6


def test_ten_minutes_of_an_engine_are_a_small_document():
    """Compact JSON, with every column as long as the times."""
    shown = only(kept(Stage().play(SECONDS, running=lambda t: t % 60, kv=lambda t: t / 700, tokens=333.3)))
    assert len(json.dumps(shown, separators=(",", ":"))) < 40_000
    assert {len(shown[name]) for name in COLUMNS} == {len(shown["t"])}


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 1e300])
def test_a_number_that_cannot_be_is_never_in_the_json(value):
    """Neither JSON nor a chart can show it."""
    text = json.dumps(only(kept(Stage().play(3, running=value, kv=value))), allow_nan=False)
    assert "inf" not in text.replace("preemptions_inferred", "")
