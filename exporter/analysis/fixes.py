"""What to change, in numbers, in order; and what will not help, with the reason.

Pure. The candidates of a verdict are the catalogue's. Each has a function here that looks at the
engine and either advises it, with a value and the gain it can compute, or withholds it with a reason.
Every number names its inputs; where one is missing the advice says which.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.kv_demand import KvContext, context_per_request, need, seats_that_fit
from exporter.analysis.situation import Situation
from exporter.vllm.names import version_key

__all__ = ["Advice", "FixAdvice", "RejectedFix", "advise"]

BALANCE: Final = "balance_routing"
# Above this the memory left outside the KV cache is too small for what models need in passing.
_MOST_UTILIZATION: Final = 0.93
_LOWERED_BY: Final = 0.05
_WATERMARK: Final = 0.05
_FP8_GAIN: Final = 2.0
_LONG_OUTPUT: Final = 2000.0
_GPU_GIB: Final = "gpu_memory_gib"
_KV_GIB: Final = "kv_cache_gib"
_WEIGHTS_GIB: Final = "weights_gib"
# Verdicts under which KV blocks are short, so that more of them is a cure.
_SHORT_KV: Final = frozenset(
    {"preemption_thrash", "preemption_light", "kv_bound", "kv_pressure_rising", "unfittable_request"}
)
# What cures this comes before what the verdict says against it: a server that dies preempts nobody.
_FIRST_AID: Final = "suspect_out_of_memory"
# Under these a finding of the configuration may bring its own cures.
_CALM: Final = frozenset({"healthy", "kv_full_ok", "starting", "sleeping", "runaway_generation"})
# Readings that only a KV connector or an offload tier moves.
_CONNECTOR_SIGNS: Final = (
    "kv_fetch_waiting",
    "kv_fetch_running",
    "kv_loaded_bytes",
    "kv_load_seconds",
    "kv_expired_requests",
    "kv_failed_transfers",
    "external_prefix_queries",
)
_NARROW_DTYPES: Final = ("fp8", "int8", "int4", "nvfp4", "4bit", "3bit", "turboquant", "ultraquant", "octave")


@dataclass(frozen=True, slots=True)
class FixAdvice:
    """One thing to change.

    Attributes:
        fix: its id in the catalogue.
        value: for the flag; None where none can be computed.
        flag: ready to paste, None where no flag does it.
        gain: KV capacity afterwards by capacity now, or demand now by demand afterwards; None unknown.
        suffices: whether it alone covers the need; None where that is unknown.
        inputs: the numbers it was computed from, by name.
        missing: what would have to be told to compute it, in words; empty where nothing is missing.
        note: an assumption or a limit worth a sentence.
    """

    fix: str
    value: float | int | str | None = None
    flag: str | None = None
    gain: float | None = None
    suffices: bool | None = None
    inputs: Mapping[str, float | str] = field(default_factory=dict)
    missing: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class RejectedFix:
    """Something that will not help here, and why."""

    fix: str
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change in order of rank, and what not to."""

    fixes: tuple[FixAdvice, ...] = ()
    rejected: tuple[RejectedFix, ...] = ()


@dataclass(frozen=True, slots=True)
class _Case:
    """What the functions of this module look at: the situation, with the demand computed once."""

    s: Situation
    verdict: str
    findings: tuple[str, ...]
    held: KvContext | None
    need: float | None
    fit: int | None

    @property
    def memory(self) -> dict[str, float | str]:
        """The inputs of every number about memory."""
        capacity = self.s.signals.kv_capacity_tokens
        known = {"kv_capacity_tokens": capacity, "need_ratio": self.need}
        return {name: round(value, 3) for name, value in known.items() if value is not None}

    def enough(self, gain: float | None) -> bool | None:
        """Whether a gain covers the need."""
        return None if gain is None or self.need is None else gain >= self.need


_Answer = FixAdvice | RejectedFix


def advise(s: Situation, verdict: str, findings: Sequence[str], *, imbalanced: bool = False) -> Advice:
    """The fixes of a verdict and of the findings beside it, ranked: what suffices alone first, then cheapest.

    Args:
        s: the engine's situation.
        verdict: its verdict.
        findings: those that hold beside it.
        imbalanced: whether the model's engines share their load badly, which no memory cures.
    """
    table = catalogue.load()
    held = context_per_request(s)
    case = _Case(s, verdict, tuple(findings), held, need(s, held), seats_that_fit(s, held))
    advised: dict[str, FixAdvice] = {}
    first_aid = table.findings[_FIRST_AID].fixes if _FIRST_AID in findings else ()
    against = table.verdicts[verdict].not_help
    withheld = {name: reason for name, reason in against.items() if name not in first_aid}
    for name in _candidates(verdict, findings):
        if name in withheld:
            continue
        answer = _ask(name, case)
        if isinstance(answer, RejectedFix):
            withheld[name] = answer.reason
        else:
            flag = answer.flag or table.fixes[name].flag_with(_shown(answer.value))
            advised[name] = _with_flag(answer, flag)
    for finding in findings:
        if finding in table.findings:
            for name, reason in table.findings[finding].not_help.items():
                if name not in advised:
                    withheld.setdefault(name, reason)
    ranked = sorted(advised.values(), key=_rank)
    if imbalanced:
        ranked.insert(0, FixAdvice(BALANCE))
    return Advice(tuple(ranked), tuple(RejectedFix(name, reason) for name, reason in withheld.items()))


def _candidates(verdict: str, findings: Sequence[str]) -> list[str]:
    """The catalogue's candidates, each once; memory only where KV is short or nothing else is the matter."""
    table = catalogue.load()
    names = list(table.verdicts[verdict].fixes)
    for finding in findings:
        entry = table.findings.get(finding) or table.verdicts[finding]
        for name in entry.fixes:
            short = verdict in _SHORT_KV or verdict in _CALM
            if short or not table.fixes[name].needs_short_kv:
                names.append(name)
    return list(dict.fromkeys(names))


def _ask(name: str, case: _Case) -> _Answer:
    function = _FUNCTIONS.get(name)
    answer = FixAdvice(name) if function is None else function(case)
    since = catalogue.load().fixes[name].since
    if isinstance(answer, FixAdvice) and since and _is_older(case.s, since):
        return RejectedFix(name, f"It needs vLLM {since} or newer, and this server looks older.")
    return answer


def _is_older(s: Situation, since: str) -> bool:
    """Whether the server is certainly older: its labels date it well, its metric names alone do not."""
    snapshot = s.history.snapshot
    told = s.server_facts.get("vllm_version")
    if isinstance(told, str):
        return version_key(told) < version_key(since)
    return snapshot is not None and snapshot.cache is not None and snapshot.version < version_key(since)


def _rank(advice: FixAdvice) -> int:
    """Sorting is stable: within a rank the catalogue's order, cheapest first, stays."""
    return {True: 0, None: 1, False: 2}[advice.suffices]


def _with_flag(advice: FixAdvice, flag: str | None) -> FixAdvice:
    return replace(advice, flag=flag)


def _shown(value: float | str | None) -> str | None:
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# One function per fix that has conditions; all others are advised wherever the catalogue lists them.


def _raise_gpu_memory_utilization(case: _Case) -> _Answer:
    s, name = case.s, "raise_gpu_memory_utilization"
    cache = s.history.snapshot.cache if s.history.snapshot else None
    for fact in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if s.number(fact) or (cache is not None and getattr(cache, fact)):
            flag = "--" + fact.replace("_", "-")
            return RejectedFix(name, f"{flag} is set and overrides it: raise that if memory is free.")
    if "suspect_out_of_memory" in case.findings or ("restarted" in case.findings and not _explained(s)):
        return RejectedFix(name, "The server has just restarted; if memory ran out, this makes it worse.")
    used = s.number("gpu_memory_utilization")
    if used is not None and used >= _MOST_UTILIZATION:
        return RejectedFix(name, f"It is at {used:g} already; more leaves too little for everything else.")
    if used is None:
        return FixAdvice(name, missing="set gpu_memory_utilization, gpu_memory_gib and kv_cache_gib")
    gpu, kv = s.number(_GPU_GIB), s.number(_KV_GIB)
    if gpu is None or kv is None:
        return FixAdvice(
            name, value=_MOST_UTILIZATION, missing=f"set {_GPU_GIB} and {_KV_GIB} (vLLM logs it at start)"
        )
    gain = 1 + (_MOST_UTILIZATION - used) * gpu / kv
    inputs = case.memory | {"gpu_memory_utilization": used, _GPU_GIB: gpu, _KV_GIB: kv}
    return FixAdvice(name, value=_MOST_UTILIZATION, gain=gain, suffices=case.enough(gain), inputs=inputs)


def _explained(s: Situation) -> bool:
    """Whether the last restart happened at leisure: nothing ran and the cache was nearly empty."""
    restart = s.history.restart
    return (
        restart is not None and not restart.running and (restart.kv_usage or 0.0) < s.thresholds.kv_roomy / 2
    )


def _fp8_kv_cache(case: _Case) -> _Answer:
    dtype = _word(case.s, "kv_cache_dtype") or "auto"
    if any(narrow in dtype for narrow in _NARROW_DTYPES):
        return RejectedFix("fp8_kv_cache", f"The KV cache is {dtype} already.")
    inputs = case.memory | {"kv_cache_dtype": dtype}
    if dtype == "auto":
        note = "Up to twice the tokens if the cache is 16-bit now (auto does not say); less on hybrid models."
        suffices = None if case.need is None or case.need <= _FP8_GAIN else False
        return FixAdvice("fp8_kv_cache", gain=_FP8_GAIN, suffices=suffices, inputs=inputs, note=note)
    note = "Twice the tokens; less on hybrid models."
    return FixAdvice(
        "fp8_kv_cache", gain=_FP8_GAIN, suffices=case.enough(_FP8_GAIN), inputs=inputs, note=note
    )


def _quantize_weights(case: _Case) -> _Answer:
    weights, kv = case.s.number(_WEIGHTS_GIB), case.s.number(_KV_GIB)
    if weights is None or kv is None:
        return FixAdvice(
            "quantize_weights", missing=f"set {_WEIGHTS_GIB} and {_KV_GIB} (vLLM logs both at start)"
        )
    gain = 1 + weights / 2 / kv
    inputs = case.memory | {_WEIGHTS_GIB: weights, _KV_GIB: kv}
    note = "Assumes weights of half the size."
    return FixAdvice("quantize_weights", gain=gain, suffices=case.enough(gain), inputs=inputs, note=note)


def _raise_tensor_parallel(case: _Case) -> _Answer:
    name = "raise_tensor_parallel"
    now, heads = case.s.number("tensor_parallel_size"), case.s.number("num_kv_heads")
    if now is None:
        return FixAdvice(name, missing="set tensor_parallel_size, num_kv_heads, weights_gib and kv_cache_gib")
    weights, kv = case.s.number(_WEIGHTS_GIB), case.s.number(_KV_GIB)
    inputs = case.memory | {"tensor_parallel_size": now}
    freed = weights / 2 / kv if weights is not None and kv is not None else None
    if heads is None:
        missing = "set num_kv_heads, weights_gib and kv_cache_gib"
        return FixAdvice(name, value=int(2 * now), inputs=inputs, missing=missing)
    if 2 * now <= heads:
        gain = 2.0 if freed is None else 2 * (1 + freed)
        note = "KV heads are split over the GPUs; the weights' share comes on top." if freed is None else ""
    elif freed is None:
        missing = "set weights_gib and kv_cache_gib: beyond the KV heads only the weights make room"
        return FixAdvice(name, value=int(2 * now), inputs=inputs, missing=missing)
    else:
        gain, note = 1 + freed, "Beyond the KV heads only the weights make room."
    inputs |= {"num_kv_heads": heads}
    return FixAdvice(
        name, value=int(2 * now), gain=gain, suffices=case.enough(gain), inputs=inputs, note=note
    )


def _raise_pipeline_parallel(case: _Case) -> _Answer:
    now = case.s.number("pipeline_parallel_size")
    if now is None:
        return FixAdvice("raise_pipeline_parallel", missing="set pipeline_parallel_size")
    inputs = case.memory | {"pipeline_parallel_size": now}
    note = "Half the layers per GPU: twice the tokens, and the room that the weights leave."
    return FixAdvice(
        "raise_pipeline_parallel", int(2 * now), gain=2.0, suffices=case.enough(2.0), inputs=inputs, note=note
    )


def _lower_max_num_seqs(case: _Case) -> _Answer:
    s, name = case.s, "lower_max_num_seqs"
    if case.fit is None or case.held is None:
        missing = "needs vLLM's cache_config_info and the lengths of finished requests"
        return (
            FixAdvice(name, missing=missing)
            if s.seats is not None
            else RejectedFix(name, f"No number: it {missing}.")
        )
    start = s.history.window_start(s.t - s.thresholds.window)
    plateau = s.history.mean("requests_running", start) or 0.0
    fit = max(case.fit, s.baseline.calm_running())
    if fit <= 1:
        return RejectedFix(name, "One request alone nearly fills the cache.")
    most = s.history.highest("requests_running", start) or 0.0
    if fit >= most or (s.seats is not None and fit >= s.seats):
        return RejectedFix(name, f"{most:.0f} run at the most, and a limit of {fit} would not change that.")
    inputs = case.memory | {"held_tokens": round(case.held.mean, 1), "held_from": case.held.source}
    gain = most / fit
    note = f"{plateau:.0f} run on average now, and their preemptions cost more than fewer seats do."
    return FixAdvice(name, fit, gain=gain, suffices=True, inputs=inputs, note=note)


def _set_watermark(case: _Case) -> _Answer:
    now = case.s.number("watermark")
    if now is not None and now >= _WATERMARK:
        return RejectedFix("set_watermark", f"It is {now:g} already.")
    note = "Keeps blocks free when admitting: far fewer preemptions for a little concurrency, and no memory."
    return FixAdvice("set_watermark", value=_WATERMARK, note=note)


def _reserve_full_prompt(case: _Case) -> _Answer:
    if case.s.server_facts.get("scheduler_reserve_full_isl") is False:
        note = "It is off: prompts are admitted by their first chunk and run out of blocks half-way."
        return FixAdvice(
            "reserve_full_prompt", suffices=True if case.verdict == "preemption_thrash" else None, note=note
        )
    return RejectedFix(
        "reserve_full_prompt", "It is on by default since vLLM 0.19, and nothing says that it is off here."
    )


def _drop_full_prompt_reservation(case: _Case) -> _Answer:
    if case.s.server_facts.get("scheduler_reserve_full_isl") is False:
        return RejectedFix("drop_full_prompt_reservation", "It is off already.")
    note = "Lets an oversized prompt start; it can still not finish if it is larger than the pool."
    return FixAdvice("drop_full_prompt_reservation", note=note)


def _enable_prefix_caching(case: _Case) -> _Answer:
    if "prefix_cache_off" in case.findings:
        note = "A preempted request then finds its blocks again, as long as nobody else took them."
        return FixAdvice("enable_prefix_caching", note=note)
    return RejectedFix("enable_prefix_caching", "Nothing says that it is off.")


def _check_client_limits(case: _Case) -> _Answer:
    outputs = case.s.history.output_lengths.lengths()
    mean = outputs.mean if outputs is not None else None
    if case.verdict == "runaway_generation" or (mean is not None and mean >= _LONG_OUTPUT):
        inputs: dict[str, float | str] = {} if mean is None else {"output_tokens_mean": round(mean, 1)}
        return FixAdvice("check_client_limits", inputs=inputs)
    return RejectedFix("check_client_limits", "Answers are not long here.")


def _lower_max_model_len(case: _Case) -> _Answer:
    s, capacity = case.s, case.s.signals.kv_capacity_tokens
    longest = s.number("max_model_len")
    if capacity is None:
        return FixAdvice("lower_max_model_len", missing="needs vLLM's cache_config_info")
    exceeds = "max_model_len_exceeds_pool" in case.findings
    fits = math.floor(capacity if exceeds else capacity / 2)
    if longest is not None and fits >= longest:
        return RejectedFix("lower_max_model_len", "Requests of the maximum length fit.")
    inputs: dict[str, float | str] = {"kv_capacity_tokens": capacity}
    note = "Requests beyond it are refused at once instead of waiting for ever."
    return FixAdvice("lower_max_model_len", fits, suffices=exceeds or None, inputs=inputs, note=note)


def _disable_speculation(case: _Case) -> _Answer:
    if "speculation_enlarges_kv" in case.findings:
        return FixAdvice("disable_speculation", note="Draft tokens take KV slots, and a draft model memory.")
    return RejectedFix("disable_speculation", "No tokens are drafted here.")


def _raise_max_num_seqs(case: _Case) -> _Answer:
    s, name = case.s, "raise_max_num_seqs"
    if s.seats is None:
        return RejectedFix(name, "The limit is not known.")
    start = s.history.window_start(s.t - s.thresholds.window)
    wanted = math.ceil((s.history.mean("requests_waiting", start) or 0.0) + s.seats)
    value = wanted if case.fit is None else min(wanted, case.fit)
    if value <= s.seats:
        return RejectedFix(name, "The KV cache holds no more requests than there are seats.")
    inputs: dict[str, float | str] = {"max_num_seqs": s.seats, "requests_waiting": round(wanted - s.seats, 1)}
    if case.fit is None:
        return FixAdvice(
            name, value, gain=value / s.seats, inputs=inputs, missing="needs lengths to see what KV allows"
        )
    inputs |= case.memory
    return FixAdvice(name, value, gain=value / s.seats, suffices=value >= wanted, inputs=inputs)


def _add_replicas(case: _Case) -> _Answer:
    s = case.s
    wanted = case.need
    if case.verdict in ("seat_bound", "deferred_wait", "queue_not_kv", "prefill_bound") and s.seats:
        start = s.history.window_start(s.t - s.thresholds.window)
        running, waiting = (
            s.history.mean("requests_running", start),
            s.history.mean("requests_waiting", start),
        )
        wanted = None if running is None or waiting is None else (running + waiting) / s.seats
    if wanted is None:
        return FixAdvice("add_replicas", missing="needs cache_config_info and lengths, or max_num_seqs")
    more = max(1, math.ceil(wanted) - 1)
    inputs: dict[str, float | str] = {"need_ratio": round(wanted, 3)}
    note = f"{more} more of the same would hold all that runs and waits."
    return FixAdvice("add_replicas", value=more, gain=1.0 + more, suffices=True, inputs=inputs, note=note)


def _raise_max_num_batched_tokens(case: _Case) -> _Answer:
    now = case.s.number("max_num_batched_tokens")
    if now is None:
        return FixAdvice("raise_max_num_batched_tokens", missing="set max_num_batched_tokens")
    inputs = {"max_num_batched_tokens": now}
    return FixAdvice("raise_max_num_batched_tokens", int(2 * now), gain=2.0, inputs=inputs)


def _lower_max_num_batched_tokens(case: _Case) -> _Answer:
    now = case.s.number("max_num_batched_tokens")
    if now is None:
        return FixAdvice("lower_max_num_batched_tokens", missing="set max_num_batched_tokens")
    return FixAdvice(
        "lower_max_num_batched_tokens", max(1, int(now / 2)), inputs={"max_num_batched_tokens": now}
    )


def _lower_gpu_memory_utilization(case: _Case) -> _Answer:
    now = case.s.number("gpu_memory_utilization")
    if now is None:
        return FixAdvice("lower_gpu_memory_utilization", missing="set gpu_memory_utilization")
    value = round(now - _LOWERED_BY, 2)
    note = "Leaves memory outside the KV cache, where it ran short."
    return FixAdvice("lower_gpu_memory_utilization", value, inputs={"gpu_memory_utilization": now}, note=note)


def _raise_max_loras(case: _Case) -> _Answer:
    lora = case.s.lora
    if lora is None or lora.slots is None or lora.waiting < 1 or lora.running < lora.slots:
        return RejectedFix("raise_max_loras", "No adapter waits for a slot.")
    inputs: dict[str, float | str] = {"max_loras": lora.slots, "adapters_waiting": lora.waiting}
    return FixAdvice("raise_max_loras", lora.slots + lora.waiting, suffices=True, inputs=inputs)


def _check_kv_connector(case: _Case) -> _Answer:
    s = case.s
    values = s.history.snapshot.values if s.history.snapshot else {}
    told = s.server_facts.get("role") in ("prefill", "decode") or s.number("kv_offloading_size")
    seen = [name for name in _CONNECTOR_SIGNS if values.get(name)]
    if case.verdict == "kv_held_no_requests" or told or seen:
        return FixAdvice("check_kv_connector", inputs={name: values[name] for name in seen})
    return RejectedFix("check_kv_connector", "No sign of a KV connector.")


def _check_encoder_cache(case: _Case) -> _Answer:
    values = case.s.history.snapshot.values if case.s.history.snapshot else {}
    if values.get("multimodal_queries"):
        return FixAdvice(
            "check_encoder_cache", note="Multimodal requests are served here; no metric shows their budget."
        )
    return RejectedFix("check_encoder_cache", "No multimodal requests were seen.")


def _scrape_pod_not_service(case: _Case) -> _Answer:
    if case.s.history.sources.by_turns(case.s.t):
        return FixAdvice("scrape_pod_not_service")
    return RejectedFix("scrape_pod_not_service", "One source answers.")


def _send_probe_request(case: _Case) -> _Answer:
    if case.verdict == "data_untrusted" and "stale_gauges" not in case.findings:
        return RejectedFix("send_probe_request", "The gauges are fresh.")
    return FixAdvice("send_probe_request")


def _word(s: Situation, fact: str) -> str | None:
    value = s.server_facts.get(fact)
    if isinstance(value, str):
        return value
    cache = s.history.snapshot.cache if s.history.snapshot else None
    return cache.cache_dtype if cache is not None and fact == "kv_cache_dtype" else None


_FUNCTIONS: Final[Mapping[str, Callable[[_Case], _Answer]]] = {
    "raise_gpu_memory_utilization": _raise_gpu_memory_utilization,
    "fp8_kv_cache": _fp8_kv_cache,
    "quantize_weights": _quantize_weights,
    "raise_tensor_parallel": _raise_tensor_parallel,
    "raise_pipeline_parallel": _raise_pipeline_parallel,
    "lower_max_num_seqs": _lower_max_num_seqs,
    "set_watermark": _set_watermark,
    "reserve_full_prompt": _reserve_full_prompt,
    "drop_full_prompt_reservation": _drop_full_prompt_reservation,
    "enable_prefix_caching": _enable_prefix_caching,
    "check_client_limits": _check_client_limits,
    "lower_max_model_len": _lower_max_model_len,
    "disable_speculation": _disable_speculation,
    "raise_max_num_seqs": _raise_max_num_seqs,
    "add_replicas": _add_replicas,
    "raise_max_num_batched_tokens": _raise_max_num_batched_tokens,
    "lower_max_num_batched_tokens": _lower_max_num_batched_tokens,
    "lower_gpu_memory_utilization": _lower_gpu_memory_utilization,
    "raise_max_loras": _raise_max_loras,
    "check_kv_connector": _check_kv_connector,
    "check_encoder_cache": _check_encoder_cache,
    "scrape_pod_not_service": _scrape_pod_not_service,
    "send_probe_request": _send_probe_request,
}
