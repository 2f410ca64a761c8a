"""Any input is a configuration or a configuration error."""

import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.configuration import HIDDEN, from_file

from exporter.config import (
    FACTS,
    OPTIONS,
    Config,
    ConfigError,
    describe,
)

WORDS = sorted({part for row in OPTIONS for part in row.key.split(".")} | {"targets"} | set(FACTS))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["1s", "8MiB", "info", "json", "http://h", "https://h/m", "/x", ":80", "true", "64", HIDDEN]
    )
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)
SECTION = st.dictionaries(st.sampled_from(WORDS), TREES, max_size=6)
MAPPINGS = st.dictionaries(
    st.sampled_from(WORDS) | st.text(max_size=5), TREES, max_size=5
) | st.fixed_dictionaries(
    {},
    optional={"targets": st.lists(SECTION, max_size=2), "web": SECTION, "poll": SECTION, "analysis": SECTION},
)
KEYS = [row.key for row in OPTIONS]
ENVS = [row.env for row in OPTIONS]
VALUES = st.text(max_size=8) | st.sampled_from(["1s", "8MiB", "info", "http://h", "/x", ":80", "true"])


def assert_config_or_config_error(text, flags, environ):
    """Load, and check what came out."""
    problems = None
    try:
        config = from_file(text, flags, environ)
    except ConfigError as error:
        problems = error.problems
    if problems is None:
        assert isinstance(config, Config)
        assert len(config.targets) == 1
        assert describe(config)
    else:
        assert problems
        assert all(problem.isprintable() for problem in problems)


@given(
    MAPPINGS,
    st.dictionaries(st.sampled_from(KEYS), st.none() | VALUES, max_size=3),
    st.dictionaries(st.sampled_from(ENVS) | st.text().map("VLLM_PRESSURE_".__add__), VALUES, max_size=3),
)
def test_any_mapping_is_a_configuration_or_a_configuration_error(tree, flags, environ):
    """And any flags and environment with it; nothing else ever comes out."""
    assert_config_or_config_error(yaml.safe_dump(tree), flags, environ)


@given(st.text() | st.text(alphabet="aé:-[]{}&*!|>%'\"\\\n \t#?,~<0x", max_size=60))
def test_any_text_is_a_configuration_or_a_configuration_error(text):
    """A broken file is told, never a crash."""
    assert_config_or_config_error(text, {}, {})
