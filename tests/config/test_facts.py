"""Settings of a server: given by the operator, or on its argument line."""

import argparse
import dataclasses
import json
import traceback

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.configuration import HIDDEN, from_file, no_file, problems_of

from exporter.config import (
    FACTS,
    Config,
    ConfigError,
    EngineConfig,
    add_flags,
    describe,
    flags_given,
    load,
    parse_facts,
)

# Facts


def test_facts_of_a_recording_are_read_from_json():
    """Its header holds numbers and booleans, and may hold keys of a later version."""
    header = json.loads(
        '{"max_num_seqs": 64, "watermark": 1e-05, "async_scheduling": true, "role": null, "new": [1]}'
    )
    facts, problems = parse_facts(header, strict=False)
    assert facts == {"max_num_seqs": 64, "watermark": 0.00001, "async_scheduling": True}
    assert problems == []


def test_facts_of_an_operator_are_read_strictly():
    """The same names, but a slip is told."""
    facts, problems = parse_facts({"max_num_seqs": 64, "max_seqs": 1, "block_size": 0.5}, strict=True)
    assert facts == {"max_num_seqs": 64}
    assert problems == [
        "max_seqs: unknown key (did you mean max_num_seqs?)",
        "block_size: expected a whole number from 1 to 1048576, got '0.5'",
    ]


@pytest.mark.parametrize(
    "raw", [True, 0, -1, 1.0, float("nan"), "many", [], {}, "1_000", "٣", pytest.param(10**5000, id="huge")]
)
def test_a_fact_that_is_no_whole_number_is_refused(raw):
    """Bad values are problems whether the names are read strictly or not."""
    facts, problems = parse_facts({"max_num_seqs": raw}, strict=False)
    assert facts == {}
    assert len(problems) == 1


@given(
    st.dictionaries(
        st.sampled_from(sorted(FACTS)) | st.text(),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()),
    ),
    st.booleans(),
)
def test_facts_are_read_or_told_whatever_they_are(given_facts, strict):
    """Each known fact is either read or a problem, and what was read reads the same again."""
    facts, problems = parse_facts(given_facts, strict=strict)
    told = {name for name, raw in given_facts.items() if name in FACTS and raw is not None}
    strangers = given_facts.keys() - FACTS.keys()
    assert len(facts) + len(problems) == len(told) + (len(strangers) if strict else 0)
    assert parse_facts(facts, strict=True) == (facts, [])


# vLLM's argument line

ARGS = "vllm serve m --max-num-seqs 64 --kv-cache-dtype fp8 --no-enable-prefix-caching --max-model-len 32k"
ARGS_FACTS = {
    "max_num_seqs": 64,
    "kv_cache_dtype": "fp8",
    "enable_prefix_caching": False,
    "max_model_len": 32000,
}


def test_the_argument_line_is_read_wherever_it_stands():
    """Flag, environment, file; in the file as a line, a folded one, or a list as in a manifest."""
    assert load({"engine.args": ARGS}, {}, no_file).engine.args == ARGS_FACTS
    assert load({}, {"VLLM_PRESSURE_ENGINE_ARGS": ARGS}, no_file).engine.args == ARGS_FACTS
    assert from_file(f"engine: {{args: '{ARGS}'}}").engine.args == ARGS_FACTS
    folded = ARGS.replace(" --", "\n    --")
    assert from_file(f"engine:\n  args: >-\n    {folded}").engine.args == ARGS_FACTS
    assert from_file(f"engine: {{args: {json.dumps(ARGS.split())}}}").engine.args == ARGS_FACTS


def test_the_argument_line_is_no_flag_of_this_program():
    """It begins with dashes, which argparse takes for a value where it holds a space, or follows ``=``."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    line = "--max-num-seqs=64 --api-key=x"
    for given_flags in (["--engine.args", line], [f"--engine.args={line}"]):
        flags = flags_given(parser.parse_args(given_flags))
        assert load(flags, {}, no_file).engine.args == {"max_num_seqs": 64}


def test_an_argument_line_without_facts_is_a_line():
    """Other than none at all it was given; neither is an error."""
    assert from_file("engine: {args: vllm serve m}").engine == EngineConfig({})
    assert Config().engine.args is None


def test_an_argument_line_stands_beside_what_is_told_of_the_target():
    """The two are merged later, the target's `config` first."""
    config = from_file("targets: [{config: {max_num_seqs: 8}}]\nengine: {args: --max-num-seqs=64}")
    assert config.targets[0].facts == {"max_num_seqs": 8}
    assert config.engine.args == {"max_num_seqs": 64}


@given(st.lists(st.sampled_from(["--api-key", HIDDEN, "--max-num-seqs", "8", "--max-loras=2", "'", "-tp"])))
def test_an_argument_line_is_kept_without_its_secrets(words):
    """Whatever order the words come in: not in the configuration, its description, or an error."""
    try:
        config = load({"engine.args": " ".join(words)}, {}, no_file)
    except ConfigError as error:
        shown = "".join(traceback.format_exception(error)) + repr(error)
    else:
        shown = repr(config) + describe(config) + str(dataclasses.asdict(config))
        assert from_file(describe(config)) == config
    assert HIDDEN not in shown


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (f'engine: {{args: "--api-key \'{HIDDEN}"}}', "got an unclosed quotation"),
        (f"engine: {{args: {{api-key: {HIDDEN}}}}}", "got a mapping"),
        (f"engine: {{args: [[--api-key, {HIDDEN}]]}}", "got a list of something else"),
    ],
)
def test_no_error_of_an_argument_line_repeats_it(text, got):
    """It says what was expected."""
    (problem,) = problems_of(text)
    assert problem.startswith("engine.args: expected ")
    assert problem.endswith(got)
    assert HIDDEN not in problem


def test_a_described_argument_line_gives_the_same_facts():
    """Written as vLLM's flags, those it has no flag of its own for too, and without the rest."""
    line = "--api-key x -tp 2 --kv-transfer-config.kv_role kv_producer --async-scheduling --watermark 1e-5"
    config = from_file(f"engine: {{args: '{line}'}}")
    assert yaml.safe_load(describe(config))["engine"]["args"] == (
        "--tensor-parallel-size 2 --kv-transfer-config.kv_role kv_producer --async-scheduling "
        "--watermark 1e-05"
    )
    assert from_file(describe(config)) == config
