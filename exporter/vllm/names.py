"""The only table of vLLM's metric names: every name a reading ever had, newest first.

A *reading* is our word for a quantity; vLLM renames its metrics about twice a year, so a reading has one row
per name. If a body has several names of one reading, the first row wins; they are never added or averaged. If
it has none, the reading is unknown, not zero. Versions are vLLM's releases.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["gauge", "counter", "created", "buckets"]

# The prefix depends on the program that prints a metric: vLLM, a client that cleans names for OpenMetrics, Ray up
# to vLLM 0.10, Ray since 0.11. The order is the priority if one body has several.
PREFIXES: Final = ("vllm:", "vllm_", "ray_vllm:", "ray_vllm_")

START_TIME: Final = "process_start_time_seconds"
CACHE_CONFIG: Final = "cache_config_info"
LORA_INFO: Final = "lora_requests_info"


@dataclass(frozen=True, slots=True)
class Name:
    """One name that a reading has, or had, in vLLM's exposition."""

    reading: str  # our word for the quantity
    # ``gauge``, ``counter`` (with or without ``_total``), ``created`` (unix seconds at which the counter
    # began) or ``buckets`` (a histogram's cumulative buckets).
    kind: Kind
    name: str  # vLLM's name without prefix; of a counter also without ``_total``
    since: str = "0.5.4"  # first release that has the name
    until: str = ""  # last release that exposes it by default, empty for the newest
    label: str = ""  # the label that a series must have to count; empty for any
    value: str = ""  # the value of that label
    most: float = math.inf  # the largest value that makes sense; infinite never does


NAMES: Final[tuple[Name, ...]] = (
    # Running and waiting requests at the engine's last step.
    Name("requests_running", "gauge", "num_requests_running"),
    Name("requests_waiting", "gauge", "num_requests_waiting"),
    Name("requests_deferred", "gauge", "num_requests_waiting_by_reason", "0.20", "", "reason", "deferred"),
    Name("kv_usage", "gauge", "kv_cache_usage_perc", "0.9", most=1.0),
    Name("kv_usage", "gauge", "gpu_cache_usage_perc", until="0.10", most=1.0),
    Name("sleep_weights_offloaded", "gauge", "engine_sleep_state", "0.11", "", "sleep_state", "weights_offloaded"),
    Name("sleep_discard_all", "gauge", "engine_sleep_state", "0.11", "", "sleep_state", "discard_all"),
    Name("prefix_hit_ratio", "gauge", "gpu_prefix_cache_hit_rate", "0.6", "0.7", most=1.0),
    # Progress.
    Name("preemptions", "counter", "num_preemptions"),
    Name("requests_finished", "counter", "request_success"),
    Name("prompt_tokens", "counter", "prompt_tokens"),
    Name("prompt_tokens_computed", "counter", "prompt_tokens_by_source", "0.16", "", "source", "local_compute"),
    Name("generation_tokens", "counter", "generation_tokens"),
    # Of a histogram; changes only with steps that generate tokens.
    Name("engine_steps", "counter", "iteration_tokens_total_count", "0.6"),
    Name("step_tokens", "counter", "iteration_tokens_total_sum", "0.6"),
    # Not read, but the only name that distinguishes 0.30 from 0.29.
    Name("preemptions_of_finished", "counter", "request_num_preemptions_sum", "0.30"),
    # Latency: sums in seconds and counts of histograms.
    Name("queue_seconds", "counter", "request_queue_time_seconds_sum", "0.6"),
    Name("queue_count", "counter", "request_queue_time_seconds_count", "0.6"),
    Name("inter_token_seconds", "counter", "inter_token_latency_seconds_sum", "0.10.2"),
    Name("inter_token_seconds", "counter", "time_per_output_token_seconds_sum", until="0.11"),
    Name("inter_token_count", "counter", "inter_token_latency_seconds_count", "0.10.2"),
    Name("inter_token_count", "counter", "time_per_output_token_seconds_count", until="0.11"),
    Name("prefill_seconds", "counter", "request_prefill_time_seconds_sum", "0.6"),
    Name("prefill_count", "counter", "request_prefill_time_seconds_count", "0.6"),
    Name("first_token_seconds", "counter", "time_to_first_token_seconds_sum"),
    Name("first_token_count", "counter", "time_to_first_token_seconds_count"),
    # Lengths of finished requests, in tokens.
    Name("prompt_length_sum", "counter", "request_prompt_tokens_sum"),
    Name("prompt_length", "buckets", "request_prompt_tokens_bucket"),
    Name("output_length_sum", "counter", "request_generation_tokens_sum"),
    Name("output_length", "buckets", "request_generation_tokens_bucket"),
    Name("request_seconds", "buckets", "e2e_request_latency_seconds_bucket"),
    # Caches: tokens since 0.9, blocks before; ratios are right in both units.
    Name("prefix_queries", "counter", "prefix_cache_queries", "0.9"),
    Name("prefix_queries", "counter", "gpu_prefix_cache_queries", "0.7.3", "0.10"),
    Name("prefix_hits", "counter", "prefix_cache_hits", "0.9"),
    Name("prefix_hits", "counter", "gpu_prefix_cache_hits", "0.7.3", "0.10"),
    Name("external_prefix_queries", "counter", "external_prefix_cache_queries", "0.11"),
    Name("multimodal_queries", "counter", "mm_cache_queries", "0.11"),
    # Other features that can hold requests or blocks.
    Name("draft_tokens", "counter", "spec_decode_num_draft_tokens"),
    Name("kv_expired_requests", "counter", "nixl_num_kv_expired_reqs", "0.15"),
    Name("kv_expired_requests", "counter", "mooncake_num_kv_expired_reqs", "0.33"),
    Name("kv_failed_transfers", "counter", "nixl_num_failed_transfers", "0.11"),
    Name("kv_failed_transfers", "counter", "mooncake_num_failed_transfers", "0.33"),
    Name("kv_loaded_bytes", "counter", "kv_offload_load_bytes", "0.24"),
    Name("kv_loaded_bytes", "counter", "kv_offload_total_bytes", "0.16", label="transfer_type", value="CPU_to_GPU"),
    Name("kv_load_seconds", "counter", "kv_offload_load_time", "0.24"),
    Name("kv_load_seconds", "counter", "kv_offload_total_time", "0.16", label="transfer_type", value="CPU_to_GPU"),
    Name("kv_fetch_waiting", "gauge", "num_requests_kv_fetch_by_stage", "0.32", "", "stage", "waiting_to_start"),
    Name("kv_fetch_running", "gauge", "num_requests_kv_fetch_by_stage", "0.32", "", "stage", "in_progress"),
    # Refused at the door with status 503. The server counts them for all its engines, without their label.
    Name("refused_by_requests", "counter", "admission_rejections", "0.32", "", "reason", "max_num_queued_reqs"),
    Name("refused_by_tokens", "counter", "admission_rejections", "0.32", "", "reason", "max_num_queued_tokens"),
    # When the counters began: a new value means a new process.
    Name("created", "created", "generation_tokens_created"),
    Name("created", "created", "num_preemptions_created"),
    Name("created", "created", "prompt_tokens_created"),
)  # fmt: skip

# Labels of cache_config_info that show the release: the newest one that a body has counts.
CACHE_LABEL_SINCE: Final = {
    "prefix_caching_hash_algo": "0.8",
    "cpu_kvcache_space_bytes": "0.9",
    "kv_cache_memory_bytes": "0.10",
    "kv_offloading_backend": "0.11",
    "mamba_cache_mode": "0.15",
    "_block_size_resolved": "0.18",
    "kv_cache_dtype_skip_layers": "0.19",
    "kv_cache_size_tokens": "0.24",
    "skip_page_size_padded": "0.25",
    "prefix_match_unit": "0.26",
    "use_replayssm": "0.27",
    "kv_cache_layout": "0.29",
    "effective_attention_block_size": "0.31",
    "cache_hit_alignment_tokens": "0.32",
    "simple_cpu_offload_num_blocks": "0.33",
}

# The names that a simulated page fills (`exporter.standin.metrics_page`), without prefix, on pages of 0.26 and later.
# A histogram's name stands for its buckets, count and sum.
PRINTED: Final = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "waiting_by_reason": "num_requests_waiting_by_reason",
    "usage": "kv_cache_usage_perc",
    "preempted": "num_preemptions_total",
    "prompts": "prompt_tokens_total",
    "prompts_by_source": "prompt_tokens_by_source_total",
    "prompts_cached": "prompt_tokens_cached_total",
    "prompts_cached_by_source": "prompt_tokens_cached_by_source_total",
    "prefix_queried": "prefix_cache_queries_total",
    "prefix_found": "prefix_cache_hits_total",
    "generated": "generation_tokens_total",
    "finished": "request_success_total",
    "step": "iteration_tokens_total",
    "first_token": "time_to_first_token_seconds",
    "inter_token": "inter_token_latency_seconds",
    "prompt": "request_prompt_tokens",
    "output": "request_generation_tokens",
    "longest_output": "request_max_num_generation_tokens",
    "asked_output": "request_params_max_tokens",
    "asked_answers": "request_params_n",
    "computed": "request_prefill_kv_computed_tokens",
    "per_token": "request_time_per_output_token_seconds",
    "total": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "inference": "request_inference_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "decode": "request_decode_time_seconds",
    "preemptions_of_one": "request_num_preemptions",
}


def version_key(version: str) -> tuple[int, ...]:
    """Return a key that orders releases by number, ``0.9`` before ``0.10.2``; other words count as 0."""
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("."))


# No quantity of vLLM's is larger, in any unit; a larger value is broken. A float can hold the cube of it.
LARGEST: Final = 1e18

# Readings of a server, which each of its engines has.
OF_SERVER: Final = frozenset({"refused_by_requests", "refused_by_tokens"})

# A label set without any of these is not an engine.
CORE: Final = frozenset(
    {"requests_running", "requests_waiting", "kv_usage", "preemptions", "requests_finished"}
    | {"prompt_tokens", "generation_tokens", "engine_steps"}
)


def spellings(row: Name) -> tuple[str, ...]:
    """Return every spelling of a row's series after the prefix, the usual one first.

    A counter has ``_total`` (both formats), lacks it (Ray makes a gauge of it) or has it twice (Ray with the
    names of vLLM's V0). The counts and sums of a histogram have one spelling.
    """
    if row.kind == "counter" and not row.name.endswith(("_sum", "_count")):
        return (row.name + "_total", row.name, row.name + "_total_total")
    return (row.name,)
