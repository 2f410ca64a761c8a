"""The configuration as flags, as a table and as a file."""

import argparse
import contextlib
import io

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.configuration import from_file

from docs.generator.options import options_table
from exporter.config import (
    FACTS,
    OPTIONS,
    Config,
    PollConfig,
    add_flags,
    describe,
    flags_given,
)


def test_flags_are_told_from_defaults():
    """What was not given stays out, so that environment and file can speak."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config.check", action="store_true")
    add_flags(parser)
    assert flags_given(parser.parse_args([])) == {}
    given_flags = flags_given(
        parser.parse_args(["--config.check", "--config.file=/x", "--web.listen-address", ":1"])
    )
    assert given_flags == {"config.file": "/x", "web.listen_address": ":1"}


def test_flags_are_not_abbreviated():
    """`--target.bearer` would else be the token's file, or become ambiguous with the next option."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit):
        parser.parse_args(["--poll.int", "1s"])


def test_the_help_names_default_and_variable_of_each_flag():
    """With argparse's own percent signs escaped."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    usage = " ".join(parser.format_help().split())
    assert "--poll.interval DURATION time between polls" in usage
    assert "(default: 1s; environment: VLLM_PRESSURE_POLL_INTERVAL)" in usage
    assert "--log.level debug|info|warning|error" in usage


def test_each_option_has_its_own_flag_and_variable():
    """Dots and underscores become one in a variable: two options must not meet there."""
    assert len({row.key for row in OPTIONS}) == len({row.flag for row in OPTIONS}) == len(OPTIONS)
    assert len({row.env for row in OPTIONS}) == len(OPTIONS)
    listen = next(row for row in OPTIONS if row.key == "web.listen_address")
    assert (listen.flag, listen.env) == ("--web.listen-address", "VLLM_PRESSURE_WEB_LISTEN_ADDRESS")


def test_each_default_is_valid_and_has_a_help_text():
    """A default that the checks reject could not be written into a file."""
    rows = [*OPTIONS, *FACTS.values()]
    assert len(rows) > 100
    assert not [row.key for row in rows if len(row.help) <= 10]
    given = [row for row in rows if row.default is not None]
    assert not [row.key for row in given if row.kind.read(row.kind.show(row.default)) != row.default]


def test_the_reference_is_a_table_of_all_options():
    """One line each, as many cells in each."""
    head, rule, *lines = options_table().splitlines()
    assert rule == "|---|---|---|---|---|---|"
    assert {line.replace("\\|", "").count("|") for line in [head, *lines]} == {7}
    found = [line for line in lines if line.startswith(("| `targets_dns[0].", "| `targets_file_sd[0]."))]
    assert len(lines) == len(OPTIONS) + len(FACTS) + len(found)
    assert len(found) > 20
    assert (
        "| `poll.interval` | `--poll.interval` | `VLLM_PRESSURE_POLL_INTERVAL` | 1s | time between polls; "
        "a storm builds up in seconds | a duration from 100ms to 1m (such as 500ms, 10s, 2m, 1h) |"
    ) in lines


def test_a_description_is_a_file_that_gives_the_same_configuration():
    """It shows every value in the form in which it may be written."""
    config = from_file(
        "targets: [{url: 'https://h/é', config: {watermark: 0.00001, role: both, kv_lease_seconds: 0}}]\n"
        "poll: {interval: 1.0001, timeout: 333ms, max_body_bytes: 1025}\n"
        "analysis: {window: 90s, startup_grace: 0}"
    )
    assert from_file(describe(config)) == config
    assert yaml.safe_load(describe(config))["poll"] == {
        "interval": "1.0001s",
        "timeout": "333ms",
        "max_body_bytes": 1025,
        "concurrency": 256,
        "max_targets": 1000,
    }


@given(st.floats(0.1, 60) | st.integers(100, 60000).map(lambda count: count * 0.001))
def test_a_described_duration_is_exact(seconds):
    """Whatever unit it is shown in."""
    config = Config(poll=PollConfig(interval=seconds))
    assert from_file(describe(config)) == config
