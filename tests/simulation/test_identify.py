"""The load of a server from what it shows: how requests arrive, and how long their answers are."""

import pytest

from exporter.analysis.load_profile import LoadProfile
from exporter.simulation.load import observed_loads
from exporter.simulation.workload import Lengths

LENGTHS = Lengths.between(100, 300)


def loads(**known):
    """The loads that may explain a profile, most likely first."""
    values = {
        "window_seconds": 60.0,
        "arrivals_per_second": 2.0,
        "requests_finished": 120.0,
        "requests_running_mean": 10.0,
        "requests_waiting_mean": 20.0,
        "in_flight_median": 30.0,
        "in_flight_deviation": 0.0,
        **known,
    }
    return [load for load, _ in observed_loads(LoadProfile.from_dict(values), LENGTHS, LENGTHS, 64)]


def test_a_total_that_does_not_vary_is_a_closed_loop():
    """With as many clients; with and without a queue."""
    assert [(each.clients, each.rate) for each in loads()] == [(30, None)]
    (calm,) = loads(requests_waiting_mean=0.0, in_flight_median=10.0, in_flight_deviation=0.5)
    assert (calm.clients, calm.rate) == (10, None)


def test_a_total_that_varies_as_random_arrivals_do_is_open():
    """Else, if that does not reproduce the present, as many at a time as were seen."""
    varied = loads(requests_waiting_mean=0.0, in_flight_median=10.0, in_flight_deviation=2.2)
    assert [(each.clients, each.rate) for each in varied] == [(None, 2.0), (10, None)]


def test_a_queue_that_grows_is_simulated_as_it_is():
    """Beyond the capacity an open load has no lasting state."""
    assert [each.clients for each in loads(in_flight_deviation=8.0, requests_finished=90.0)] == [30]


def test_a_slow_load_is_not_called_closed_because_nothing_ended_yet():
    """Four arrivals in a minute cannot show more variance."""
    slow = loads(arrivals_per_second=4 / 60, requests_finished=4.0, in_flight_deviation=1.0)
    assert slow[0].rate == pytest.approx(4 / 60)


def test_observed_prefix_hits_become_a_shared_text():
    """As long as that share of the mean prompt."""
    (load,) = loads(prefix_cache_hit_ratio=0.25)
    assert (load.prefixes, load.prefix_tokens) == (1, 50)


def test_absurd_gauges_are_bounded():
    """A billion waiting requests are some thousands, and so are a billion per second."""
    (closed,) = loads(requests_waiting_mean=1e9, in_flight_median=1e9)
    assert closed.clients == 64 + 3000
    opened = loads(arrivals_per_second=1e9, in_flight_deviation=100.0, requests_finished=6e10)
    assert opened[0].rate == 2000
