"""The settings of a server that an operator may give, by the names of vLLM's flags."""

from collections.abc import Mapping
from typing import TypeAlias

from exporter.config.options import (
    BOOLEAN,
    Kind,
    Option,
    attempt,
    choice,
    duration,
    number,
    pattern,
    size,
    unknown,
    whole,
)

__all__ = ["DAY", "FACTS", "HOUR", "MANY", "Fact", "as_number", "parse_facts", "seat_limit"]

Fact: TypeAlias = bool | int | float | str


def as_number(value: object) -> int | float | None:
    """A value that is a number; None for anything else, true and false included."""
    return value if type(value) in (int, float) else None  # type: ignore[return-value]


def seat_limit(facts: Mapping[str, object]) -> str:
    """Return the name of the setting that limits the running requests: the smaller one of the two."""
    active, most = (as_number(facts.get(name)) for name in ("max_num_active_seqs", "max_num_seqs"))
    return "max_num_active_seqs" if active and (not most or active <= most) else "max_num_seqs"


MANY = 1 << 30  # more requests, tokens or blocks than any engine has
HOUR = 3600.0
DAY = 24 * HOUR


# Any text would do, but it may come from a mangled argument line; most secrets look different from this.
_DTYPE = pattern("word", "a word such as auto, bfloat16 or fp8_e4m3", r"[a-z][a-z0-9_]{0,31}")

# The settings in a target's `config:`. It is an allow-list: an argument line of vLLM can hold keys, and
# nothing that is not named here is ever stored.
_ROWS: tuple[tuple[str, Kind[object], str], ...] = (
    ("max_num_seqs", whole(1, MANY), "seats: requests that run at once"),
    ("max_num_batched_tokens", whole(1, MANY), "tokens computed in one step"),
    ("max_model_len", whole(1, MANY), "longest prompt and answer together, in tokens"),
    ("gpu_memory_utilization", number(0.01, 1), "share of the GPU's memory that vLLM uses"),
    ("tensor_parallel_size", whole(1, 4096), "GPUs that share each layer, and the KV heads"),
    ("pipeline_parallel_size", whole(1, 4096), "GPUs in a row that share the layers"),
    ("data_parallel_size", whole(1, 4096), "engines behind this server"),
    ("max_loras", whole(1, 4096), "LoRA slots: adapters that run in one batch"),
    ("kv_cache_dtype", _DTYPE, "number format of the KV cache, such as auto or fp8"),
    ("block_size", whole(1, 1 << 20), "tokens in one KV block"),
    ("enable_prefix_caching", BOOLEAN, "whether KV blocks of equal prefixes are shared"),
    ("scheduler_reserve_full_isl", BOOLEAN, "whether only whole prompts are admitted"),
    ("scheduling_policy", choice("fcfs", "priority"), "order of requests, and of preemption"),
    ("watermark", number(0, 1), "share of the KV blocks kept free when admitting"),
    ("num_gpu_blocks_override", whole(1, MANY), "number of KV blocks, regardless of memory"),
    ("kv_cache_memory_bytes", size(1, 1 << 50), "KV cache per GPU, regardless of utilization"),
    ("enable_chunked_prefill", BOOLEAN, "whether long prompts are computed in parts"),
    ("long_prefill_token_threshold", whole(0, MANY), "prompt tokens per request and step"),
    ("async_scheduling", BOOLEAN, "whether preemptions are counted one step late"),
    ("num_speculative_tokens", whole(0, 4096), "tokens drafted per step"),
    ("kv_offloading_size", number(0, 1 << 20), "GiB of CPU memory for KV blocks"),
    ("max_num_active_seqs", whole(1, MANY), "limit of running requests, if it is set"),
    ("max_num_queued_reqs", whole(1, MANY), "waiting requests before the server rejects more"),
    ("max_num_queued_tokens", whole(1, MANY), "waiting prompt tokens before the server rejects more"),
    # The following are not flags of vLLM, but known to the operator or from vLLM's log at start.
    ("role", choice("prefill", "decode", "both"), "role in a disaggregated set-up"),
    ("startup_grace_seconds", duration(0, DAY), "analysis.startup_grace of this server"),
    ("kv_lease_seconds", duration(0, DAY), "how long a prefill server keeps KV that it sent"),
    ("gpu_memory_gib", number(0.1, 1 << 14), "memory of one GPU"),
    ("kv_cache_gib", number(0.001, 1 << 14), "KV cache per GPU, from vLLM's log at start"),
    ("weights_gib", number(0.001, 1 << 14), "weights per GPU, from vLLM's log at start"),
    ("gpus_per_replica", whole(1, 4096), "gpu.per_replica of this server"),
    ("gpu_hourly_price", number(0, 1e6), "gpu.hourly_price of this server"),
    ("num_kv_heads", whole(1, 4096), "KV heads; more tensor parallelism than this adds no KV"),
)
FACTS: Mapping[str, Option] = {key: Option(key, kind, None, text) for key, kind, text in _ROWS}


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
