"""Of a vLLM argument line only the facts of the configuration are kept, whatever else it holds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import FACTS, arguments, parse_facts

HIDDEN = "sk-s3cr3t"


def facts_of(line: str) -> dict:
    """The facts of a line; none where its quotations are not closed."""
    try:
        return parse_facts(arguments.read(line), strict=False)[0]
    except ValueError:
        return {}


def test_a_whole_command_is_read():
    """Pasted from a script: environment before it, continued lines, quotes, both spellings of names."""
    facts = facts_of(
        f"""VLLM_API_KEY={HIDDEN} vllm serve org/model \\
          --max-num-seqs=64 --max-num-batched-tokens 8192 --no-enable-prefix-caching \\ \r
          --kv_cache_dtype fp8 -tp 8 -pp 2 -dp=4 --max-model-len 32k --gpu-memory-utilization .9 \\
          --speculative-config '{{"method": "ngram", "num_speculative_tokens": 3}}' --api-key {HIDDEN} \\
          --kv-offloading-size 10 --watermark 0.05 --scheduler-reserve-full-isl --served-model-name a b \\
          --scheduling-policy priority --enable-lora --max-loras 2 --async-scheduling --enforce-eager \\
          --kv-transfer-config '{{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}}' \\
          --block-size 16 --num-gpu-blocks-override 300 --kv-cache-memory-bytes 8G --hf-token={HIDDEN} \\
          --enable-chunked-prefill --long-prefill-token-threshold 0 --max-num-active-seqs 48 \\
          --max_num_queued_reqs 100 --max-num-queued-tokens 50000"""
    )
    assert facts == {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 8,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 4,
        "max_model_len": 32000,
        "gpu_memory_utilization": 0.9,
        "num_speculative_tokens": 3,
        "kv_offloading_size": 10.0,
        "watermark": 0.05,
        "scheduler_reserve_full_isl": True,
        "scheduling_policy": "priority",
        "max_loras": 2,
        "async_scheduling": True,
        "role": "prefill",
        "block_size": 16,
        "num_gpu_blocks_override": 300,
        "kv_cache_memory_bytes": 8 << 30,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "max_num_active_seqs": 48,
        "max_num_queued_reqs": 100,
        "max_num_queued_tokens": 50_000,
    }


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("--device-memory-utilization 0.88", {"gpu_memory_utilization": 0.88}),
        ("--gpu-memory-utilization .9 --device_memory_utilization=.8", {"gpu_memory_utilization": 0.8}),
        ("--max-model-len 32k", {"max_model_len": 32_000}),
        ("--max-model-len 32K", {"max_model_len": 32_768}),
        ("--max-model-len 25.6k", {"max_model_len": 25_600}),
        ("--max-model-len=1M", {"max_model_len": 1 << 20}),
        ("--max-model-len 25.6K", {}),
        ("--max-model-len -1", {}),
        ("--max-model-len=-1", {}),
        ("--max-model-len Auto", {}),
        ("--max-num-batched-tokens 16k", {"max_num_batched_tokens": 16_000}),
        ("--kv-cache-memory-bytes 1.5g", {"kv_cache_memory_bytes": 1_500_000_000}),
        ("--max-num-seqs 1k", {}),
    ],
)
def test_sizes_are_read_as_vllm_reads_them(line, facts):
    """1k is 1000, 1K is 1024, a binary unit has no fraction; and only where vLLM has them at all."""
    assert facts_of(line) == facts


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no_enable_prefix_caching", {"enable_prefix_caching": False}),
        ("--enable-chunked-prefill False --x", {"enable_chunked_prefill": False}),
        ("--enable-chunked-prefill=true", {"enable_chunked_prefill": True}),
        ("--async-scheduling model", {"async_scheduling": True}),
        ("--enable-prefix-caching --no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enable-prefix-caching=perhaps", {}),
        ("--no-enable-prefix-caching=false", {}),
        ("--no-max-num-seqs 3", {}),
    ],
)
def test_switches_are_on_or_off(line, facts):
    """In the forms that vLLM had; a switch takes the next word only where that says true or false."""
    assert facts_of(line) == facts


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("--speculative-config.num_speculative_tokens 3", {"num_speculative_tokens": 3}),
        ("-sc.num_speculative_tokens 3", {}),
        ("-sc '{\"num_speculative_tokens\": 3}'", {"num_speculative_tokens": 3}),
        ("--kv-transfer-config.kv_role=kv_consumer", {"role": "decode"}),
        ("""--kv-transfer-config={"kv_role":"kv_both"}""", {}),
        ("""--kv-transfer-config='{"kv_role":"kv_both"}'""", {"role": "both"}),
        ("""--kv-transfer-config '{"kv_role":["kv_both"]}'""", {}),
        ("--kv-transfer-config.kv_role prefill", {}),
        ("--scheduler-config.max_num_seqs 64", {"max_num_seqs": 64}),
        ("--scheduler-config.policy priority", {"scheduling_policy": "priority"}),
        ("--cache_config.cache_dtype fp8", {"kv_cache_dtype": "fp8"}),
        ("--scheduler-config.api_key sk-1", {}),
        ("--speculative-config '[1]' --speculative-config.x.y 3", {}),
        ("--role both --num-speculative-tokens 3", {"num_speculative_tokens": 3}),
    ],
)
def test_json_and_dotted_options_are_read(line, facts):
    """Of the configuration objects whose fields are facts; what the shell would eat is lost here too."""
    assert facts_of(line) == facts


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("--max-num-seqs 64 --max_num_seqs=32", {"max_num_seqs": 32}),
        ("--max-num-seqs 64 --max-num-seqs many", {}),
        ("--max-model-len 4096 --max-model-len auto", {}),
        ("--max-num-seqs", {}),
        ("--max-num-seqs --max-loras 2", {"max_loras": 2}),
        ("--max-num-seqs=", {}),
        ("--max-num-seqs 0 --watermark 1.5 --gpu-memory-utilization nan -tp -2", {}),
        ("max-num-seqs 64 -max-num-seqs 64 ---max-num-seqs 64", {}),
        ("--kv-cache-dtype 'fp8 --api-key x'", {}),
        ("--kv-cache-dtype SK_KEY", {}),
        ("--num-kv-heads 8 --weights-gib 3", {}),
        ("--chat-template 'don't'", {}),
        ("--max-num-seqs 8 '", {}),
        ("\\", {}),
        ("", {}),
    ],
)
def test_the_last_of_several_wins_and_what_is_bad_is_left_out(line, facts):
    """A bad last one makes the fact unknown: the earlier one is not what was meant."""
    assert facts_of(line) == facts


def test_a_shell_command_within_the_line_is_read():
    """As containers are often started."""
    line = "docker run image bash -lc 'exec vllm serve m --max-num-seqs 8' --name x"
    assert facts_of(line) == {"max_num_seqs": 8}


def test_a_list_of_arguments_is_read():
    """As in a manifest, where each is apart, or two stand in one by mistake."""
    given_list = ["serve", "--max-num-seqs", "8", "--watermark=0.1", "--max-loras 2", "-c 'don", "--x"]
    facts, _ = parse_facts(arguments.read_list(given_list), strict=False)
    assert facts == {"max_num_seqs": 8, "watermark": 0.1, "max_loras": 2}


def test_every_field_is_a_fact_of_the_configuration():
    """The allow-list is one list."""
    names = [fact for fields in arguments.FIELDS.values() for fact in fields.values()]
    assert set(names) <= FACTS.keys()
    assert len(names) == len(set(names))


# Whatever the input

FLAGS = sorted({f"--{name.replace('_', '-')}" for name in FACTS} | {"-tp", "--speculative-config", "-c"})
WORDS = st.sampled_from([*FLAGS, "64", "32k", "-1", "auto", "fp8", "true", ".9", "'", '"', "\\\n", "="])
LINES = st.text() | st.lists(WORDS | st.text(max_size=6), max_size=12).map(" ".join)


def assert_allowed(facts):
    """Check that each fact is one that the configuration would take."""
    assert parse_facts(facts, strict=True) == (facts, [])
    assert not [value for value in facts.values() if isinstance(value, float) and not math.isfinite(value)]


@given(LINES)
def test_any_line_is_read_without_an_error(line):
    """And what is read is within the ranges of the configuration."""
    assert_allowed(facts_of(line))


@given(st.lists(WORDS | st.text(max_size=12), max_size=8))
def test_any_list_is_read_without_an_error(items):
    """Quotations within need not be closed."""
    assert_allowed(parse_facts(arguments.read_list(items), strict=False)[0])


@given(LINES)
def test_what_was_read_is_read_again_from_its_own_line(line):
    """`join` writes what `read` reads."""
    facts = facts_of(line)
    assert facts_of(arguments.join(facts)) == facts


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789", min_size=12, max_size=30))
def test_no_key_of_an_argument_line_is_kept(key):
    """Wherever keys are given: as a value, after =, in the environment, in JSON, as a value of ours."""
    line = (
        f"HF_TOKEN=sk-{key} vllm serve m --api-key sk-{key} --hf-token=sk-{key} sk-{key} --kv-cache-dtype "
        f"sk-{key} --max-num-seqs sk-{key} --scheduling-policy sk-{key} --watermark 0.1 --speculative-config "
        f"""'{{"num_speculative_tokens": "sk-{key}", "key": "sk-{key}"}}' -sc sk-{key} --role {key}"""
    )
    assert facts_of(line) == {"watermark": 0.1}


@pytest.mark.parametrize(
    ("line", "wrong", "right"),
    [
        ("--max-nm-seqs 64", "--max-nm-seqs", "--max-num-seqs"),
        ("vllm serve m --gpu-memory-utilisation=0.9", "--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--no-enable-prefix-cachng", "--no-enable-prefix-cachng", "--enable-prefix-caching"),
    ],
)
def test_a_misspelt_flag_is_found(line, wrong, right):
    """It would be ignored in silence."""
    assert arguments.misspelt(line) == arguments.misspelt(line.split()) == (wrong, right)


@pytest.mark.parametrize(
    "flag",
    [
        "max-num-seqs", "max-num-active-seqs", "max-num-partial-prefills", "max-num-queued-tokens",
        "max-lora-rank", "max-cpu-loras", "data-parallel-size-local", "kv-cache-dtype-skip-layers",
        "device-memory-utilization", "load-config", "ec-transfer-config", "kv-cache-metrics", "enable-lora",
        "num-speculative-tokens", "kv-offloading-backend", "speculative-config.num_speculative_tokens",
        "max-logprobs", "block-size",
    ],
)  # fmt: skip
def test_vllms_other_flags_are_not_taken_for_slips(flag):
    """Near as some are."""
    assert arguments.misspelt(f"--{flag} 4") is None
