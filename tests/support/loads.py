"""The pool and the loads that scenario tests share, as parts of a scene."""

import math

THRASH, LIGHT, NOT_KV = "preemption_thrash", "preemption_light", "preemption_not_kv"
STALLED, DEADLOCK, UNFITTABLE = "engine_stalled", "scheduler_deadlock", "unfittable_request"
NO_PAGE = {"none", "info", "warning"}
MEMORY = {
    "raise_gpu_memory_utilization",
    "fp8_kv_cache",
    "quantize_weights",
    "raise_tensor_parallel",
    "raise_pipeline_parallel",
    "lower_max_num_seqs",
    "set_watermark",
}
# A pool of 100,000 tokens, three times the longest request.
POOL = {
    "kv_cache_size_tokens": 100_000,
    "kv_cache_max_concurrency": 3.0,
    "block_size": 16,
    "num_gpu_blocks": 6251,
    "gpu_memory_utilization": 0.9,
    "cache_dtype": "auto",
    "enable_prefix_caching": True,
}
OLD_POOL = {name: value for name, value in POOL.items() if not name.startswith("kv_cache")}
# Prompts of 900 tokens on average, at most 2,048 (p99); answers of 350.
LENGTHS = {
    "prompt_lengths": ({512: 300, 1024: 800, 2048: 990, 5000: 1000, math.inf: 1000}, 900_000),
    "output_lengths": ({200: 300, 500: 900, 1000: 1000, math.inf: 1000}, 350_000),
}
BUSY = {"running": 20, "kv": 0.5, "tokens": 800, "finished": 2, **LENGTHS}
FULL = {**BUSY, "kv": 0.97}
STORM = {
    "running": 12,
    "waiting": 10,
    "kv": 0.98,
    "tokens": 300,
    "finished": 0.4,
    "preemptions": 1.2,
    **LENGTHS,
}


def by_turns(one: float, other: float, period: float):
    """Return one value for the first half of each period, another for the second."""
    return lambda t: one if t % period < period / 2 else other


def printing(*lines: str):
    """Return a server that prints additional lines."""
    more = "".join(line + "\n" for line in lines).encode()
    return lambda text: text + more
