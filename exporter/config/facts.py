"""What an operator may tell of a server, by the names of vLLM's flags: the table of facts."""

import re
from collections.abc import Mapping
from typing import TypeAlias

from exporter.config.options import (
    BOOLEAN,
    Option,
    attempt,
    choice,
    duration,
    number,
    scalar,
    size,
    unknown,
    whole,
)

__all__ = ["DAY", "FACTS", "HOUR", "MANY", "Fact", "as_number", "parse_facts"]

Fact: TypeAlias = bool | int | float | str


def as_number(value: object) -> int | float | None:
    """A value that is a number; None for anything else, true and false included."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


MANY = 1 << 30  # more requests, tokens or blocks than any engine has
HOUR = 3600.0
DAY = 24 * HOUR


def _dtype(text: str) -> str:
    # Any text would do, but it may come from a mangled argument line: most kinds of key look unlike this.
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", text):
        raise ValueError
    return text


_DTYPE = scalar("word", "a word such as auto, bfloat16 or fp8_e4m3", _dtype)

# What an operator may tell about a server (a target's `config:`). It is an allow-list: an argument line of
# vLLM can hold keys, and nothing that is not named here is ever stored.
FACTS: Mapping[str, Option] = {
    fact.key: fact
    for fact in (
        Option("max_num_seqs", whole(1, MANY), None, "seats: requests that run at once"),
        Option("max_num_batched_tokens", whole(1, MANY), None, "tokens computed in one step"),
        Option("max_model_len", whole(1, MANY), None, "longest prompt and answer together, in tokens"),
        Option("gpu_memory_utilization", number(0.01, 1), None, "share of the GPU's memory that vLLM takes"),
        Option("tensor_parallel_size", whole(1, 4096), None, "GPUs that share each layer, and the KV heads"),
        Option("pipeline_parallel_size", whole(1, 4096), None, "GPUs in a row that share the layers"),
        Option("data_parallel_size", whole(1, 4096), None, "engines behind this server"),
        Option("max_loras", whole(1, 4096), None, "LoRA slots: adapters that run in one batch"),
        Option("kv_cache_dtype", _DTYPE, None, "number format of the KV cache, such as auto or fp8"),
        Option("block_size", whole(1, 1 << 20), None, "tokens in one KV block"),
        Option("enable_prefix_caching", BOOLEAN, None, "whether KV blocks of equal prefixes are shared"),
        Option("scheduler_reserve_full_isl", BOOLEAN, None, "whether only whole prompts are admitted"),
        Option("scheduling_policy", choice("fcfs", "priority"), None, "who runs first, and who is preempted"),
        Option("watermark", number(0, 1), None, "share of the KV blocks kept free when admitting"),
        Option("num_gpu_blocks_override", whole(1, MANY), None, "KV blocks, whatever the memory would give"),
        Option("kv_cache_memory_bytes", size(1, 1 << 50), None, "KV cache per GPU, whatever the utilization"),
        Option("enable_chunked_prefill", BOOLEAN, None, "whether long prompts are computed in parts"),
        Option("long_prefill_token_threshold", whole(0, MANY), None, "prompt tokens per request and step"),
        Option("async_scheduling", BOOLEAN, None, "whether preemptions are counted one step late"),
        Option("num_speculative_tokens", whole(0, 4096), None, "tokens drafted per step"),
        Option("kv_offloading_size", number(0, 1 << 20), None, "GiB of CPU memory for KV blocks"),
        Option("max_num_active_seqs", whole(1, MANY), None, "running requests, where it is set"),
        Option("max_num_queued_reqs", whole(1, MANY), None, "waiting requests before the server refuses"),
        # From here on no flag of vLLM, but known to the operator or to vLLM's log at start.
        Option("role", choice("prefill", "decode", "both"), None, "its part in a disaggregated set-up"),
        Option("startup_grace_seconds", duration(0, DAY), None, "as analysis.startup_grace, for it"),
        Option("kv_lease_seconds", duration(0, DAY), None, "how long a prefill server holds sent KV"),
        Option("gpu_memory_gib", number(0.1, 1 << 14), None, "memory of one GPU"),
        Option("kv_cache_gib", number(0.001, 1 << 14), None, "KV cache per GPU, from vLLM's log at start"),
        Option("weights_gib", number(0.001, 1 << 14), None, "weights per GPU, from vLLM's log at start"),
        Option("num_kv_heads", whole(1, 4096), None, "KV heads: tensor parallelism beyond adds no KV"),
    )
}


def parse_facts(given: Mapping[str, object], *, strict: bool) -> tuple[dict[str, Fact], list[str]]:
    """Read what was told about a server.

    Args:
        given: facts by name; None stands for not told.
        strict: whether an unknown name is a problem (an operator's slip) or left out (a recording's header).

    Returns:
        The good facts, and a problem (``max_num_seqs: expected ..., got ...``) for each other.
    """
    facts: dict[str, Fact] = {}
    problems: list[str] = []
    for name, raw in given.items():
        if name not in FACTS:
            problems += [unknown(name, FACTS)] if strict else []
        elif raw is not None:
            value = attempt(FACTS[name].kind, raw, name, problems)
            if isinstance(value, bool | int | float | str):
                facts[name] = value
    return facts, problems
