"""``simulate serve``: how it ends, what it refuses, and the list of scenarios."""

import signal
import socket

import pytest
from support.process import Command, until

from exporter.standin.scenarios import SCENARIOS

pytestmark = pytest.mark.usefixtures("own_logging")


def test_it_ends_at_once_on_ctrl_c(tmp_path):
    """With status 0 and without a message."""
    with Command(tmp_path, "simulate", "serve", "--port", "0") as command:
        until(lambda: "simulated vLLM 0.32.0, day" in command.out, "the address")
        status, seconds = command.stop(signal.SIGINT)
    assert (status, command.err) == (0, "")
    assert seconds < 2.0


def test_bad_usage_is_status_2(run):
    """With the flag and its values."""
    rejected = {
        ("--replicas", "0"): "--replicas: expected at least 1, got 0",
        ("--scenario", "party"): "invalid choice: 'party'",
        ("--vllm-version", "0.25.0"): "invalid choice: '0.25.0'",
    }
    for words, expected in rejected.items():
        status, _, err = run("simulate", "serve", *words)
        assert (status, expected in err) == (2, True), err


def test_a_port_that_is_taken_is_status_1(run):
    """As every other error of the system."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, _, err = run("simulate", "serve", "--port", taken.getsockname()[1])
    assert (status, "address already in use" in err) == (1, True), err


def test_the_scenarios_are_listed(run):
    """Each with what it shows."""
    status, out, _ = run("simulate", "serve", "--list")
    assert status == 0
    assert all(f"| `{name}` | {scenario.about} |" in out for name, scenario in SCENARIOS.items())
