"""Fixes of one condition and one sentence, as rows of a table. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from exporter.analysis.conditions.queue import nothing_finishes
from exporter.analysis.fixes.case import QUEUES, Answer, Case, FixAdvice, FixRule, Inputs, RejectedFix
from exporter.analysis.queue_causes import waiting_holds_blocks, waiting_holds_seats
from exporter.vllm.names import version_key

__all__ = ["ROWS"]

_LOWERED_BY: Final = 0.05
_WATERMARK: Final = 0.05
_LONG_OUTPUT: Final = 2000.0
_FEW: Final = 3.0
_HARDLY_ANY_TOKENS: Final = 1.0
# Prompts of this many steps leave little of each step to others; the smallest budget and threshold.
_MANY_STEPS: Final = 2.0
_LEAST_BUDGET: Final = 2048.0
_LEAST_THRESHOLD: Final = 256
_RESERVE: Final = "scheduler_reserve_full_isl"
# Readings that only a KV connector or an offload tier changes.
_CONNECTOR_SIGNS: Final = (
    "kv_fetch_waiting", "kv_fetch_running", "kv_loaded_bytes", "kv_load_seconds", "kv_expired_requests",
    "kv_failed_transfers", "external_prefix_queries",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _If:
    """A fix that is advised under one condition."""

    applies: Callable[[Case], object]  # the condition
    reason: str  # why it will not help otherwise
    note: str = ""  # of the advice
    inputs: Callable[[Case], Inputs] = lambda _case: {}  # numbers that support the advice
    value: float | Callable[[Case], float] | None = None  # for the flag

    def __call__(self, name: str, case: Case) -> Answer:
        if not self.applies(case):
            return RejectedFix(name, self.reason)
        value = self.value(case) if callable(self.value) else self.value
        return FixAdvice(name, value, inputs=self.inputs(case), note=self.note)


@dataclass(frozen=True, slots=True)
class _Change:
    """A fix that changes a setting of the server, where that is known."""

    fact: str  # the setting
    new: Callable[[float], float]  # its new value by its present one
    note: str = ""  # of the advice

    def __call__(self, name: str, case: Case) -> Answer:
        now = case.s.number(self.fact)
        if now is None:
            return FixAdvice(name, missing=f"set {self.fact}")
        return FixAdvice(name, self.new(now), inputs={self.fact: now}, note=self.note)


def _enable_prefix_caching(name: str, case: Case) -> Answer:
    if "prefix_cache_off" not in case.findings:
        return RejectedFix(name, "No setting shows that it is off.")
    note = "A preempted request then finds its blocks again, as long as no other request took them."
    if "fp8" in (case.kv_dtype or ""):
        note += " Some backends switch it off with an FP8 KV cache; if so, only another KV cache type helps."
    return FixAdvice(name, note=note)


def _mean_output(case: Case) -> float | None:
    outputs = case.s.history.output_lengths.lengths()
    return outputs.mean if outputs is not None else None


def _answers_are_long(case: Case) -> bool:
    long = (_mean_output(case) or 0.0) >= _LONG_OUTPUT
    return long or case.verdict == "runaway_generation" or _few_never_end(case)


def _output_inputs(case: Case) -> Inputs:
    mean = _mean_output(case)
    return {} if mean is None else {"output_tokens_mean": round(mean, 1)}


def _connector_signs(case: Case) -> Inputs:
    return {name: case.readings[name] for name in _CONNECTOR_SIGNS if case.readings.get(name)}


def _has_connector(case: Case) -> bool:
    configured = case.s.server_facts.get("role") in ("prefill", "decode")
    offloads = bool(case.s.number("kv_offloading_size"))
    return configured or offloads or bool(_connector_signs(case))


def _waits_for_connector(case: Case) -> bool:
    """Whether requests may wait for a connector; those that hold seats or blocks need no other sign."""
    if case.verdict == "kv_held_no_requests" or waiting_holds_seats(case.s):
        return True
    held = waiting_holds_blocks(case.s)
    return held or (case.verdict != "kv_bound" and _has_connector(case))


def _few_never_end(case: Case) -> bool:
    """Whether one or few requests run, and none has finished for far longer than any took."""
    running = case.s.signals.requests_running
    return running is not None and 0 < running <= _FEW and nothing_finishes(case.s, True)


def _async_thrash(case: Case) -> bool:
    """Whether preempted requests are admitted and preempted again without one output, as in 0.24 to 0.29."""
    version = case.s.server_facts.get("vllm_version")
    seen = version_key(version) if isinstance(version, str) else case.version
    stands = (case.s.throughput.tokens_per_second or 0.0) < _HARDLY_ANY_TOKENS
    return stands and _has_connector(case) and version_key("0.24") <= seen < version_key("0.30")


def _long_prompts(case: Case) -> bool:
    """Whether single prompts take many steps: far longer than a step's budget, or than most prompts."""
    if case.s.steps.computes_prompt:
        return True
    longest, prompts = case.s.queue.longest_prompt, case.s.history.prompt_lengths.lengths()
    if longest is None or prompts is None or not prompts.mean:
        return False
    return longest > _MANY_STEPS * (case.s.number("max_num_batched_tokens") or _LEAST_BUDGET)


def _smaller_steps(name: str, case: Case) -> Answer:
    now, seats = case.s.number("max_num_batched_tokens"), case.s.number("max_num_seqs") or 1
    if now is not None and now // 2 < seats:
        return RejectedFix(name, f"vLLM takes no fewer than max_num_seqs, {seats:.0f}.")
    return _Change("max_num_batched_tokens", lambda tokens: tokens // 2)(name, case)


def _prompt_limit(case: Case) -> int:
    budget = case.s.number("max_num_batched_tokens") or _LEAST_BUDGET
    return max(_LEAST_THRESHOLD, int(budget / 4))


ROWS: Final[Mapping[str, FixRule]] = {
    "set_watermark": _If(
        lambda case: (case.s.number("watermark") or 0.0) < _WATERMARK,
        f"It is at least {_WATERMARK:g} already.",
        "Keeps blocks free at admission: far fewer preemptions for a little concurrency, and no memory.",
        value=_WATERMARK,
    ),
    "reserve_full_prompt": _If(
        lambda case: case.s.server_facts.get(_RESERVE) is False,
        "It is on by default since vLLM 0.19, and no setting shows that it is off here.",
        "It is off: prompts are admitted by their first chunk and run out of blocks half-way.",
    ),
    "drop_full_prompt_reservation": _If(
        lambda case: case.s.server_facts.get(_RESERVE) is not False,
        "It is off already.",
        "Lets an oversized prompt start; it still cannot finish if it is larger than the pool.",
    ),
    "enable_prefix_caching": _enable_prefix_caching,
    "disable_speculation": _If(
        lambda case: "speculation_enlarges_kv" in case.findings,
        "No tokens are drafted here.",
        "Draft tokens take KV slots, and a draft model takes memory.",
    ),
    "check_client_limits": _If(_answers_are_long, "Answers are not long here.", inputs=_output_inputs),
    "check_kv_connector": _If(
        _waits_for_connector, "No sign of requests that wait for a KV connector.", inputs=_connector_signs
    ),
    "abort_request": _If(
        lambda case: case.verdict not in QUEUES or _few_never_end(case), "No single request is in the way."
    ),
    "restart_engine": _If(
        lambda case: case.verdict != "deferred_wait" or waiting_holds_seats(case.s),
        "The engine works; what the requests wait for is outside of it.",
    ),
    "disable_async_scheduling": _If(
        _async_thrash,
        "Requests make progress between preemptions.",
        "With a KV connector, vLLM 0.24 to 0.29 may preempt the same requests again and again.",
    ),
    "limit_long_prefills": _If(
        _long_prompts,
        "No prompt takes many steps.",
        "Other requests then get a share of each step while a long prompt is computed.",
        value=_prompt_limit,
    ),
    "check_encoder_cache": _If(
        lambda case: case.readings.get("multimodal_queries"),
        "No multimodal requests were seen.",
        "Multimodal requests are served here; no metric shows their budget.",
    ),
    "scrape_pod_not_service": _If(
        lambda case: case.s.history.sources.by_turns(case.s.t), "Only one source answers."
    ),
    "send_probe_request": _If(
        lambda case: case.verdict != "data_untrusted" or "stale_gauges" in case.findings,
        "The gauges are fresh.",
    ),
    "raise_max_num_batched_tokens": _Change("max_num_batched_tokens", lambda now: int(2 * now)),
    "lower_max_num_batched_tokens": _smaller_steps,
    "lower_gpu_memory_utilization": _Change(
        "gpu_memory_utilization",
        lambda now: round(now - _LOWERED_BY, 2),
        note="Leaves memory outside the KV cache, where it ran short.",
    ),
}
