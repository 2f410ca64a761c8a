"""Fixes that enlarge the KV pool, and by how much. Pure."""

import math
from collections.abc import Mapping
from typing import Final

from exporter.analysis.fixes.case import Answer, Case, FixAdvice, FixRule, Inputs, RejectedFix

__all__ = ["MEMORY", "POOL_RATIO"]

# Above this the memory outside the KV cache is too small for what models need temporarily.
_MOST_UTILIZATION: Final = 0.93
_FP8_GAIN: Final = 2.0
POOL_RATIO: Final = "kv_capacity_ratio"
_GPU_GIB: Final = "gpu_memory_gib"
_KV_GIB: Final = "kv_cache_gib"
_WEIGHTS_GIB: Final = "weights_gib"
_NARROW_DTYPES: Final = ("fp8", "int8", "int4", "nvfp4", "4bit", "3bit", "turboquant", "ultraquant", "octave")


def _raise_gpu_memory_utilization(name: str, case: Case) -> Answer:
    s, used = case.s, case.s.number("gpu_memory_utilization")
    for fact in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if s.number(fact) or (case.cache is not None and getattr(case.cache, fact)):
            flag = "--" + fact.replace("_", "-")
            return RejectedFix(name, f"{flag} is set and overrides it: raise that if memory is free.")
    if "suspect_out_of_memory" in case.findings or (
        "restarted" in case.findings and not _restarted_idle(case)
    ):
        return RejectedFix(name, "The server has just restarted; if memory ran out, this makes it worse.")
    if used is None:
        return FixAdvice(name, missing=f"set gpu_memory_utilization, {_GPU_GIB} and {_KV_GIB}")
    if used >= _MOST_UTILIZATION:
        return RejectedFix(name, f"It is at {used:g} already; more leaves too little for everything else.")
    gpu, kv = s.number(_GPU_GIB), s.number(_KV_GIB)
    if gpu is None or kv is None:
        missing = f"set {_GPU_GIB} and {_KV_GIB} (vLLM logs it at start)"
        return FixAdvice(name, value=_MOST_UTILIZATION, missing=missing)
    gain = 1 + (_MOST_UTILIZATION - used) * gpu / kv
    inputs = case.memory | {"gpu_memory_utilization": used, _GPU_GIB: gpu, _KV_GIB: kv}
    return _with_ratio(name, gain, inputs, value=_MOST_UTILIZATION)


def _restarted_idle(case: Case) -> bool:
    """Whether the last restart came while nothing ran and the cache was nearly empty: it was no crash."""
    restart = case.s.history.restart
    roomy = case.s.thresholds.kv_roomy / 2
    return restart is not None and not restart.running and (restart.kv_usage or 0.0) < roomy


def _fp8_kv_cache(name: str, case: Case) -> Answer:
    dtype = case.kv_dtype or "auto"
    if any(narrow in dtype for narrow in _NARROW_DTYPES):
        return RejectedFix(name, f"The KV cache is {dtype} already.")
    inputs = case.memory | {"kv_cache_dtype": dtype}
    if dtype != "auto":
        note = "Twice the tokens; less on hybrid models."
        return _with_ratio(name, _FP8_GAIN, inputs, note=note)
    note = "Up to twice the tokens if the cache is 16-bit now (auto does not tell); less on hybrid models."
    return _with_ratio(name, _FP8_GAIN, inputs, note=note)


def _quantize_weights(name: str, case: Case) -> Answer:
    weights, kv = case.s.number(_WEIGHTS_GIB), case.s.number(_KV_GIB)
    if weights is None or kv is None:
        return FixAdvice(name, missing=f"set {_WEIGHTS_GIB} and {_KV_GIB} (vLLM logs both at start)")
    inputs = case.memory | {_WEIGHTS_GIB: weights, _KV_GIB: kv}
    return _with_ratio(name, 1 + weights / 2 / kv, inputs, note="Assumes weights of half the size.")


def _raise_tensor_parallel(name: str, case: Case) -> Answer:
    now, heads = case.s.number("tensor_parallel_size"), case.s.number("num_kv_heads")
    weights, kv = case.s.number(_WEIGHTS_GIB), case.s.number(_KV_GIB)
    sizes = f"{_WEIGHTS_GIB} and {_KV_GIB}"
    if now is None:
        return FixAdvice(name, missing=f"set tensor_parallel_size, num_kv_heads, {sizes}")
    value, inputs = int(2 * now), case.memory | {"tensor_parallel_size": now}
    if heads is None:
        return FixAdvice(name, value=value, inputs=inputs, missing=f"set num_kv_heads, {sizes}")
    freed = weights / 2 / kv if weights is not None and kv is not None else None
    inputs |= {"num_kv_heads": heads}
    if 2 * now <= heads:
        note = "KV heads are split over the GPUs; the weights' share comes on top." if freed is None else ""
        return _with_ratio(name, 2 * (1 + (freed or 0.0)), inputs, value=value, note=note)
    if freed is None:
        missing = f"set {sizes}: beyond the KV heads only the weights make room"
        return FixAdvice(name, value=value, inputs=inputs, missing=missing)
    note = "Beyond the KV heads only the weights make room."
    return _with_ratio(name, 1 + freed, inputs, value=value, note=note)


def _raise_pipeline_parallel(name: str, case: Case) -> Answer:
    now = case.s.number("pipeline_parallel_size")
    if now is None:
        return FixAdvice(name, missing="set pipeline_parallel_size")
    inputs = case.memory | {"pipeline_parallel_size": now}
    note = "Half the layers per GPU: twice the tokens, and the room that the weights leave."
    return _with_ratio(name, 2.0, inputs, value=int(2 * now), note=note)


def _lower_max_model_len(name: str, case: Case) -> Answer:
    capacity, longest = case.s.signals.kv_capacity_tokens, case.s.number("max_model_len")
    if capacity is None:
        return FixAdvice(name, missing="needs vLLM's cache_config_info")
    exceeds = "max_model_len_exceeds_pool" in case.findings
    fits = math.floor(capacity if exceeds else capacity / 2)
    if longest is not None and fits >= longest:
        return RejectedFix(name, "Requests of the maximum length fit.")
    note = "Longer requests are rejected at once instead of waiting without end."
    inputs: Inputs = {"kv_capacity_tokens": capacity}
    return FixAdvice(name, fits, inputs=inputs, note=note)


def _with_ratio(
    name: str, ratio: float, inputs: Inputs, *, value: float | None = None, note: str = ""
) -> FixAdvice:
    """Return the advice with KV capacity after the change / before, which a simulation of it needs."""
    return FixAdvice(name, value, inputs=inputs | {POOL_RATIO: round(ratio, 3)}, note=note)


MEMORY: Final[Mapping[str, FixRule]] = {
    "raise_gpu_memory_utilization": _raise_gpu_memory_utilization,
    "fp8_kv_cache": _fp8_kv_cache,
    "quantize_weights": _quantize_weights,
    "raise_tensor_parallel": _raise_tensor_parallel,
    "raise_pipeline_parallel": _raise_pipeline_parallel,
    "lower_max_model_len": _lower_max_model_len,
}
