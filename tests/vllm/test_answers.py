"""Answers of a server about its configuration: only the facts are kept."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server_answers import (
    ADAPTER,
    CARD,
    HIDDEN,
    INFO_FACTS,
    MODELS,
    PATHS,
    SERVER_INFO,
    VERSION,
    WHOLE,
)

from exporter.config import parse_facts
from exporter.vllm.answers import (
    ServerAnswers,
    from_header,
    read_models,
    read_server_info,
    read_version,
    to_header,
)

# Reading answers


def test_server_info_tells_the_facts():
    """And nothing else of it is kept: it holds the environment with its keys."""
    assert read_server_info(SERVER_INFO) == INFO_FACTS


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "vllm_config",
        {},
        {"vllm_config": "model='demo', max_seq_len=4096"},
        {"vllm_config": {"cache_config": "block_size=16", "scheduler_config": [], "model_config": None}},
        {"vllm_config": {"scheduler_config": {"max_num_seqs": True, "watermark": 7, "policy": {"a": 1}}}},
        {"vllm_config": {"cache_config": {"cache_dtype": HIDDEN, "block_size": -1}}},
        {"scheduler_config": {"max_num_seqs": 8}},
    ],
)
def test_a_server_info_of_another_shape_tells_nothing(value):
    """As a text, half of it, or with values that make no sense."""
    assert read_server_info(value) == {}


@pytest.mark.parametrize(
    ("value", "longest"),
    [
        (MODELS, 4096),
        ({"data": [ADAPTER, CARD]}, 4096),
        ({"data": [CARD, {**CARD, "id": "alias"}]}, 4096),
        ({"max_model_len": 131072}, 131072),
        ({"data": [{**ADAPTER, "max_model_len": 64}, CARD]}, 4096),
        ({"data": [CARD, {**CARD, "max_model_len": 8192}]}, None),
        ({"data": [{**CARD, "max_model_len": None}]}, None),
        ({"data": [{**CARD, "max_model_len": -1}, 3, None, []]}, None),
        ({"data": [ADAPTER]}, None),
        ({"data": {"max_model_len": 5}}, None),
        ({"data": None}, None),
        ([CARD], None),
        (404, None),
    ],
)
def test_models_tell_the_longest_request(value, longest):
    """Adapters do not count, and of two models that differ nothing is known."""
    assert read_models(value) == ({} if longest is None else {"max_model_len": longest})


@pytest.mark.parametrize(
    ("value", "version"),
    [
        (VERSION, "0.32.0"),
        ({"version": "0.11.1rc2.dev41+g1234abc.d20251129"}, "0.11.1rc2.dev41+g1234abc.d20251129"),
        ("0.26.0", "0.26.0"),
        ({"version": "main"}, None),
        ({"version": HIDDEN}, None),
        ({"version": "0.26.0\n"}, None),
        ({"version": 26}, None),
        ({"version": "0." + "1" * 99}, None),
        ({}, None),
        (200, None),
    ],
)
def test_a_version_is_a_release_or_a_build_of_one(value, version):
    """Anything else is unknown."""
    assert read_version(value) == version


# Recordings


def test_a_header_holds_answers_or_short_forms_of_them():
    """As the server gave them, or as they were kept; a status in place of one tells nothing."""
    assert from_header(WHOLE) == ServerAnswers(INFO_FACTS, {"max_model_len": 4096}, "0.32.0")
    short = {"/health": 200, "/version": {"version": "0.19.0"}, "/v1/models": {"max_model_len": 90000}}
    assert from_header(short) == ServerAnswers({}, {"max_model_len": 90000}, "0.19.0")
    assert from_header({"/version": 404, "/v1/models": 401, "/server_info": 404}) == ServerAnswers()
    assert from_header({}) == ServerAnswers()


def test_a_header_gives_back_what_was_put_into_it():
    """And holds nothing else."""
    answers = from_header(WHOLE)
    header = to_header(answers)
    assert from_header(json.loads(json.dumps(header))) == answers
    assert HIDDEN not in json.dumps(header)
    assert to_header(ServerAnswers()) == {}


# Whatever the answer

NAMES = st.sampled_from(
    [
        *("vllm_config", "cache_config", "scheduler_config", "model_config", "kv_transfer_config", "kv_role"),
        *("max_model_len", "max_num_seqs", "cache_dtype", "policy", "data", "parent", "version", "watermark"),
    ]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["fp8", "0.1.2"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)
CONFIG = st.dictionaries(NAMES, st.dictionaries(NAMES, SCALARS, max_size=8), max_size=5)


@given(JSON | st.fixed_dictionaries({"vllm_config": CONFIG}))
def test_any_answer_is_read_without_an_error(value):
    """And what is read is within the ranges of the configuration."""
    for told in (read_server_info(value), read_models(value)):
        assert parse_facts(told, strict=True) == (told, [])
    version = read_version(value)
    assert version is None or len(version) < 80
    answers = from_header({"/server_info": value, "/v1/models": value, "/version": value})
    assert from_header(to_header(answers)) == answers


@given(st.dictionaries(st.sampled_from([*PATHS, "/server_info"]) | st.text(), JSON, max_size=4))
def test_any_header_is_read_without_an_error(probes):
    """A recording may come from anybody."""
    assert isinstance(from_header(probes), ServerAnswers)
