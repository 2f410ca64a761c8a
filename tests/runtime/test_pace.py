"""When polls start: the schedule, the back-off, the pace of slow servers and the gate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.runtime.pace import JUDGED_POLLS, PATIENT_FAILURES, SLOWEST_SECONDS, Gate, Pace


def pace(interval: float = 1.0, jitter: float = 0.0) -> Pace:
    """A pace whose jitter is known."""
    return Pace(interval, lambda: jitter)


def polled(one: Pace, seconds: float, times: int = 1, start: float = 0.0) -> float:
    """Some good polls that all take as long; when the next is due."""
    for _ in range(times):
        start = one.next_start(start, start + seconds, seconds, answered=True)
    return start


def failed(one: Pace, times: int, start: float = 0.0) -> list[float]:
    """The waits after some polls that fail at once."""
    waits = []
    for _ in range(times):
        due = one.next_start(start, start, 0.0, answered=False)
        waits.append(round(due - start, 6))
        start = due
    return waits


def test_a_schedule_does_not_drift():
    """However long polls take, if less than the interval: the thousandth starts on its second."""
    one, start = pace(), 0.0
    for number in range(1000):
        took = 0.05 if number % 3 else 0.09
        start = one.next_start(start, start + took, took, answered=True)
    assert start == 1000.0
    assert one.skipped == 0


def test_a_poll_that_starts_late_does_not_shift_the_schedule():
    """The loop was busy for 0.4 s before the poll began: the next one is due when it always was."""
    assert pace().next_start(10.0, 10.45, 0.05, answered=True) == 11.0


def test_starts_that_have_passed_are_left_out_and_counted():
    """They are not made up for in a burst."""
    one = pace()
    assert one.next_start(10.0, 12.5, 2.5, answered=True) == 13.0
    assert one.skipped == 2


def test_a_server_that_fails_is_asked_at_the_usual_pace_at_first():
    """A blink is seen to end at once."""
    assert failed(pace(), PATIENT_FAILURES) == [1.0] * PATIENT_FAILURES


def test_a_server_that_stays_down_is_asked_ever_more_slowly():
    """The wait doubles up to five seconds."""
    assert failed(pace(), PATIENT_FAILURES + 4)[PATIENT_FAILURES:] == [2.0, 4.0, 5.0, 5.0]


def test_waits_of_backing_off_are_spread():
    """Many exporters must not come back in step: up to a fifth of the wait is taken off at random."""
    assert failed(pace(jitter=1.0), PATIENT_FAILURES + 4)[PATIENT_FAILURES:] == [1.6, 3.2, 4.0, 4.0]


@pytest.mark.parametrize("interval", [5.0, 10.0, 60.0])
def test_backing_off_never_means_to_ask_more_often(interval):
    """Not even by jitter."""
    assert min(failed(pace(interval, jitter=1.0), PATIENT_FAILURES + 4)) == interval


def test_one_good_poll_ends_backing_off():
    """Then the patience is whole again."""
    one = pace()
    failed(one, PATIENT_FAILURES + 4)
    assert polled(one, 0.01) == 1.0
    assert failed(one, PATIENT_FAILURES) == [1.0] * PATIENT_FAILURES


def test_a_failing_poll_that_took_longer_than_the_interval_skips_starts_too():
    """A time-out of three seconds at an interval of one."""
    one = pace()
    assert one.next_start(10.0, 13.0, 3.0, answered=False) == 14.0
    assert one.skipped == 3


def test_a_server_that_answers_slowly_is_asked_every_five_seconds():
    """Slowly is: the median of the last ten polls took more than a tenth of the interval."""
    one = pace()
    assert polled(one, 0.11, JUDGED_POLLS) == JUDGED_POLLS - 1 + SLOWEST_SECONDS
    assert one.interval == SLOWEST_SECONDS


def test_nothing_is_judged_before_ten_polls():
    """Servers are slow when they start."""
    one = pace()
    polled(one, 0.5, JUDGED_POLLS - 1)
    assert one.interval == 1.0


def test_a_few_slow_polls_change_nothing():
    """In a storm a real server took over 100 ms in 6 % of the polls, and 2 s at the worst."""
    one = pace()
    for _ in range(20):
        polled(one, 2.0)
        polled(one, 0.015, 3)
    assert one.interval == 1.0


def test_a_server_that_is_fast_again_is_asked_at_the_usual_pace_again():
    """Judged in the same way, by ten polls of the slow pace."""
    one = pace()
    polled(one, 0.3, JUDGED_POLLS)
    polled(one, 0.01, JUDGED_POLLS - 1)
    assert one.interval == SLOWEST_SECONDS
    assert polled(one, 0.01) == 1.0
    assert one.interval == 1.0


def test_a_server_on_the_border_changes_the_pace_at_every_tenth_poll_at_most():
    """Each change is a line in the log."""
    one, changes = pace(), 0
    for number in range(100):
        before = one.interval
        polled(one, 0.101 if number % 2 else 0.0999)
        changes += one.interval != before
    assert changes <= 100 / JUDGED_POLLS


def test_an_interval_longer_than_five_seconds_stays():
    """There the slow pace is no slower."""
    one = pace(30.0)
    polled(one, 10.0, JUDGED_POLLS)
    assert one.interval == 30.0


def test_a_server_whose_answers_take_long_to_read_is_asked_every_five_seconds():
    """Meanwhile nothing else is done: one target's answers are to take no more than a tenth of our time."""
    one, start = pace(), 0.0
    for _ in range(JUDGED_POLLS):
        start = one.next_start(start, start + 0.01, 0.01, 0.11, answered=True)
    assert one.interval == SLOWEST_SECONDS
    assert one.hard_to_read
    for _ in range(JUDGED_POLLS):
        start = one.next_start(start, start + 0.01, 0.01, 0.001, answered=True)
    assert one.interval == 1.0


def test_reading_and_answering_are_judged_each_for_itself():
    """A server is not asked less often for what is not its doing, while neither takes too long."""
    one, start = pace(), 0.0
    for _ in range(2 * JUDGED_POLLS):
        start = one.next_start(start, start + 0.09, 0.09, 0.09, answered=True)
    assert one.interval == 1.0


@given(
    interval=st.floats(0.1, 60.0),
    jitter=st.floats(0.0, 1.0),
    polls=st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 10.0), st.booleans()), max_size=40),
)
def test_the_next_poll_is_never_in_the_past_and_never_far_away(interval, jitter, polls):
    """Now at the earliest; at the latest after five seconds, or the interval where that is longer."""
    one, start = pace(interval, jitter), 0.0
    for took, late, good in polls:
        now = start + late + took
        start = one.next_start(start, now, took, answered=good)
        assert now - 1e-6 <= start <= now + max(interval, SLOWEST_SECONDS) + 1e-6


def test_a_pace_is_the_targets_own():
    """One that answers slowly is asked less often; nobody else is."""
    slow, fast = Pace(1.0), Pace(1.0)
    start = 0.0
    for _ in range(20):
        start = slow.next_start(start, start + 0.5, 0.5, answered=True)
        fast.next_start(start, start, 0.01, answered=True)
    assert (slow.interval, fast.interval) == (5.0, 1.0)


def test_the_doubtful_have_a_quarter_of_the_gate():
    """And at least one place."""
    assert Gate(8).semaphore_for(up=False)._value == 2
    assert Gate(1).semaphore_for(up=False)._value == 1
    assert Gate(8).semaphore_for(up=True)._value == 8
