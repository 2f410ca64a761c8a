"""No secret is ever shown."""

import argparse
import contextlib
import dataclasses
import io
import logging
import traceback

import pytest
import yaml
from support.configuration import HIDDEN, from_file, no_file, target_of

from exporter.config import (
    ConfigError,
    Secret,
    add_flags,
    describe,
    flags_given,
    load,
)

# Secrets: the one side


def test_a_secret_shows_a_mask():
    """In every way in which Python makes a text of a value."""
    secret = Secret(HIDDEN)
    assert {repr(secret), str(secret), f"{secret}", "%s" % secret, f"{secret!r}"} == {"<secret>"}  # noqa: UP031
    assert repr([secret]) == "[<secret>]"
    assert not hasattr(secret, "__dict__")


def test_what_a_query_holds_is_not_shown():
    """A proxy may want a token there; the names tell what it is about."""
    config = from_file(f"targets: [{{url: 'http://vllm/metrics?user=x&token={HIDDEN}&all'}}]")
    (shown,) = yaml.safe_load(describe(config))["targets"]
    assert shown["url"] == "http://vllm/metrics?user=<secret>&token=<secret>&all"
    assert config.targets[0].url.endswith(f"token={HIDDEN}&all")


def test_secrets_are_told_apart_by_value():
    """A changed token is a changed configuration."""
    assert Secret("a") == Secret("a") != Secret("b")
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2
    assert Secret("a") != "a"


def test_a_configuration_with_secrets_shows_none():
    """Neither printed, described, turned into a dict, nor logged."""
    config = from_file(f"targets: [{{bearer_token: {HIDDEN}, headers: {{X-Key: {HIDDEN}}}}}]")
    record = logging.LogRecord("exporter", logging.INFO, "", 0, "loaded config=%s", (config,), None)
    shown = [
        repr(config),
        str(config),
        describe(config),
        str(dataclasses.asdict(config)),
        record.getMessage(),
    ]
    for text in shown:
        assert HIDDEN not in text
    assert yaml.safe_load(describe(config))["targets"][0]["headers"] == {"X-Key": "<secret>"}


@pytest.mark.parametrize(
    "text",
    [
        f"targets: [{{url: 'http://user:{HIDDEN}@vllm'}}]",
        f"targets: [{{url: 'user:{HIDDEN}@vllm'}}]",
        f"targets: [{{url: 'http://user:{HIDDEN}/x@vllm'}}]",
        f"targets: [{{url: 'vllm?token={HIDDEN}'}}]",
        f"targets: [{{bearer_token: 'Bearer {HIDDEN}'}}]",
        f"targets: [{{bearer_token: [{HIDDEN}]}}]",
        f"targets: [{{bearer_token: {{token: {HIDDEN}}}}}]",
        f'targets: [{{headers: {{X-Key: "{HIDDEN}\\n"}}}}]',
        f"targets: [{{headers: {{X-Key: [{HIDDEN}]}}}}]",
        f"targets: [{{headers: 'X-Key: {HIDDEN}'}}]",
        f"targets: [{{headers: {{'X-Key: {HIDDEN}': ''}}}}]",
        f"targets: [{{headers: {{X-Key: {HIDDEN}, X-Key: {HIDDEN}}}}}]",
        f"targets: [{{bearer_token: {HIDDEN}, bearer_token_file: /x}}]",
        f"targets: [{{bearer_token: {HIDDEN}, headers: {{Authorization: {HIDDEN}}}}}]",
        f"targets: [{{bearer_tokn: {HIDDEN}}}]",
        f"targets: [{{bearer_token: *{HIDDEN}}}]",
        f"targets: [{{bearer_token: !{HIDDEN} x}}]",
        f"targets: [{{bearer_token: !a!{HIDDEN} x}}]",
        f"targets: [{{bearer_token: '{HIDDEN}}}]",
        f"bearer_token: {HIDDEN}: {HIDDEN}",
        f"bearer_token: @{HIDDEN}",
        f"bearer_token: {HIDDEN}\x01",
        f"? {HIDDEN} is odd\n: x",
        f"- {HIDDEN}",
        HIDDEN,
    ],
)
def test_no_error_of_the_file_repeats_a_secret(text):
    """Neither in its problems nor in the exceptions behind it, which a traceback prints."""
    with pytest.raises(ConfigError) as caught:
        from_file(text)
    assert HIDDEN not in "".join(traceback.format_exception(caught.value)).replace("from_file(text)", "")
    assert HIDDEN not in repr(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ({"target.bearer_token": HIDDEN}, {}),
        ({"target.headers": HIDDEN}, {}),
        ({"target.url": f"http://a:{HIDDEN}@b"}, {}),
        ({}, {"VLLM_PRESSURE_TARGET_BEARER_TOKEN": f"{HIDDEN}\n"}),
        ({}, {"VLLM_PRESSURE_TARGET_HEADERS": HIDDEN}),
        ({}, {"VLLM_PRESSURE_BEARER_TOKEN": HIDDEN}),
    ],
)
def test_no_error_of_a_flag_or_variable_repeats_a_secret(flags, environ):
    """Wherever it was put by mistake."""
    with pytest.raises(ConfigError) as caught:
        load(flags, environ, no_file)
    assert HIDDEN not in repr(caught.value)


def test_a_secret_among_the_arguments_is_refused():
    """Every user of the machine sees the arguments of a process; the message says where it belongs."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        flags = flags_given(parser.parse_args(["--target.bearer-token", HIDDEN, "--target.headers", HIDDEN]))
    with pytest.raises(ConfigError) as caught:
        load(flags, {}, no_file)
    where = "expected it in VLLM_PRESSURE_TARGET_BEARER_TOKEN"
    problems = caught.value.problems
    assert f"--target.bearer-token: everybody can see a secret among arguments; {where}" in problems
    assert len(problems) == 2
    assert HIDDEN not in stderr.getvalue() + str(caught.value)
    assert "--target.bearer-token " not in parser.format_help()


# Secrets: the other side


def test_the_secret_itself_is_what_will_be_sent():
    """The mask is only for eyes: the poller gets every character."""
    target = target_of(f"bearer_token: {HIDDEN}, headers: {{X-Key: '{HIDDEN} 0'}}")
    assert target.bearer_token.reveal() == HIDDEN
    assert {name: value.reveal() for name, value in target.headers.items()} == {"X-Key": f"{HIDDEN} 0"}


@pytest.mark.parametrize("token", ["0123", "1e3", "true", "2024-01-01", "0x1F", "1:30", "yes", "a=b/+~."])
def test_a_secret_that_looks_like_another_type_stays_as_it_was_written(token):
    """YAML would make 83 of an unquoted 0123."""
    assert target_of(f"bearer_token: {token}").bearer_token.reveal() == token
    environ = {"VLLM_PRESSURE_TARGET_BEARER_TOKEN": token}
    assert load({}, environ, no_file).targets[0].bearer_token == Secret(token)
