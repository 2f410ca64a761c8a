"""The settings of a server that an operator may give, by the names of vLLM's flags."""

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
    return value if type(value) in (int, float) else None  # type: ignore[return-value]


MANY = 1 << 30  # more requests, tokens or blocks than any engine has
HOUR = 3600.0
DAY = 24 * HOUR


def _dtype(text: str) -> str:
    # Any text would do, but it may come from a mangled argument line; most secrets look different from this.
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", text):
        raise ValueError
    return text


_DTYPE = scalar("word", "a word such as auto, bfloat16 or fp8_e4m3", _dtype)

# The settings in a target's `config:`. It is an allow-list: an argument line of vLLM can hold keys, and
# nothing that is not named here is ever stored.
FACTS: Mapping[str, Option] = {
    fact.key: fact
    for fact in (
        Option("max_num_seqs", whole(1, MANY), None, "seats: requests that run at once"),
        Option("max_num_batched_tokens", whole(1, MANY), None, "tokens computed in one step"),
        Option("max_model_len", whole(1, MANY), None, "longest prompt and answer together, in tokens"),
        Option("gpu_memory_utilization", number(0.01, 1), None, "share of the GPU's memory that vLLM uses"),
        Option("tensor_parallel_size", whole(1, 4096), None, "GPUs that share each layer, and the KV heads"),
        Option("pipeline_parallel_size", whole(1, 4096), None, "GPUs in a row that share the layers"),
        Option("data_parallel_size", whole(1, 4096), None, "engines behind this server"),
        Option("max_loras", whole(1, 4096), None, "LoRA slots: adapters that run in one batch"),
        Option("kv_cache_dtype", _DTYPE, None, "number format of the KV cache, such as auto or fp8"),
        Option("block_size", whole(1, 1 << 20), None, "tokens in one KV block"),
        Option("enable_prefix_caching", BOOLEAN, None, "whether KV blocks of equal prefixes are shared"),
        Option("scheduler_reserve_full_isl", BOOLEAN, None, "whether only whole prompts are admitted"),
        Option("scheduling_policy", choice("fcfs", "priority"), None, "order of requests, and of preemption"),
        Option("watermark", number(0, 1), None, "share of the KV blocks kept free when admitting"),
        Option("num_gpu_blocks_override", whole(1, MANY), None, "number of KV blocks, regardless of memory"),
        Option(
            "kv_cache_memory_bytes", size(1, 1 << 50), None, "KV cache per GPU, regardless of utilization"
        ),
        Option("enable_chunked_prefill", BOOLEAN, None, "whether long prompts are computed in parts"),
        Option("long_prefill_token_threshold", whole(0, MANY), None, "prompt tokens per request and step"),
        Option("async_scheduling", BOOLEAN, None, "whether preemptions are counted one step late"),
        Option("num_speculative_tokens", whole(0, 4096), None, "tokens drafted per step"),
        Option("kv_offloading_size", number(0, 1 << 20), None, "GiB of CPU memory for KV blocks"),
        Option("max_num_active_seqs", whole(1, MANY), None, "limit of running requests, if it is set"),
        Option(
            "max_num_queued_reqs", whole(1, MANY), None, "waiting requests before the server rejects more"
        ),
        # The following are not flags of vLLM, but known to the operator or from vLLM's log at start.
        Option("role", choice("prefill", "decode", "both"), None, "role in a disaggregated set-up"),
        Option("startup_grace_seconds", duration(0, DAY), None, "analysis.startup_grace of this server"),
        Option("kv_lease_seconds", duration(0, DAY), None, "how long a prefill server keeps KV that it sent"),
        Option("gpu_memory_gib", number(0.1, 1 << 14), None, "memory of one GPU"),
        Option("kv_cache_gib", number(0.001, 1 << 14), None, "KV cache per GPU, from vLLM's log at start"),
        Option("weights_gib", number(0.001, 1 << 14), None, "weights per GPU, from vLLM's log at start"),
        Option(
            "num_kv_heads", whole(1, 4096), None, "KV heads; more tensor parallelism than this adds no KV"
        ),
    )
}


def parse_facts(given: Mapping[str, object], *, strict: bool) -> tuple[dict[str, Fact], list[str]]:
    """Read the settings of a server.

    Args:
        given: facts by name; None for unknown.
        strict: whether an unknown name is a problem (an operator's slip) or ignored (a recording's header).

    Returns:
        The valid facts, and a problem (``max_num_seqs: expected ..., got ...``) for each other one.
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
