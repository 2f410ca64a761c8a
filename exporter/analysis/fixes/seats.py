"""Fixes that change how many requests run, here or on other replicas. Pure."""

import math
from collections.abc import Mapping
from typing import Final

from exporter.analysis.fixes.case import Answer, Case, FixAdvice, FixRule, Inputs, RejectedFix
from exporter.config import seat_limit

__all__ = ["SEATS"]

# Verdicts under which replicas are counted by seats; under others by KV.
_BY_SEATS: Final = frozenset({"seat_bound", "deferred_wait", "queue_not_kv", "prefill_bound"})


def _lower_max_num_seqs(name: str, case: Case) -> Answer:
    s = case.s
    if case.fit is None or case.context is None:
        missing = "needs vLLM's cache_config_info and the lengths of finished requests"
        if s.seats is not None:
            return FixAdvice(name, missing=missing)
        return RejectedFix(name, f"No number: it {missing}.")
    plateau = s.history.mean("requests_running", case.minute) or 0.0
    most = s.history.highest("requests_running", case.minute) or 0.0
    # Never below the mean: that many run now, between their preemptions.
    fit = max(case.fit, s.baseline.calm_running(), math.floor(plateau))
    if fit <= 1:
        return RejectedFix(name, "One request alone nearly fills the cache.")
    if fit >= most or (s.seats is not None and fit >= s.seats):
        return RejectedFix(name, f"At most {most:.0f} run, and a limit of {fit} would not change that.")
    inputs = case.memory | {"held_tokens": round(case.context.mean, 1), "held_from": case.context.source}
    note = f"{plateau:.0f} run on average now. Fewer seats can cost throughput: watch tokens/s."
    return FixAdvice(name, fit, inputs=inputs, note=note)


def _raise_max_num_seqs(name: str, case: Case) -> Answer:
    s = case.s
    if s.seats is None:
        return RejectedFix(name, "The limit is not known.")
    wanted = math.ceil((s.history.mean("requests_waiting", case.minute) or 0.0) + s.seats)
    budget = s.number("max_num_batched_tokens") or math.inf  # vLLM refuses more seats than this
    if budget <= s.seats:
        return RejectedFix(name, "vLLM takes no more seats than max_num_batched_tokens.")
    value = int(min(wanted, budget)) if case.fit is None else int(min(wanted, case.fit, budget))
    if value <= s.seats:
        return RejectedFix(name, "The KV cache holds no more requests than there are seats.")
    inputs: Inputs = {seat_limit(s.server_facts): s.seats, "requests_waiting": round(wanted - s.seats, 1)}
    if case.fit is None:
        return FixAdvice(name, value, inputs=inputs, missing="needs lengths to see what KV allows")
    return FixAdvice(name, value, inputs=inputs | case.memory)


def _add_replicas(name: str, case: Case) -> Answer:
    s, wanted = case.s, case.need
    if case.verdict in _BY_SEATS and s.seats:
        wanted = None if s.demand is None else s.demand / s.seats
    if wanted is None:
        return FixAdvice(name, missing="needs cache_config_info and lengths, or max_num_seqs")
    more = max(1, math.ceil(wanted) - 1)
    inputs: Inputs = {"need_ratio": round(wanted, 3)}
    note = f"{more} more of the same would hold all requests."
    return FixAdvice(name, value=more, inputs=inputs, note=note)


def _raise_max_loras(name: str, case: Case) -> Answer:
    lora = case.s.lora
    if lora is None or lora.slots is None or lora.waiting < 1 or lora.running < lora.slots:
        return RejectedFix(name, "No adapter waits for a slot.")
    inputs: Inputs = {"max_loras": lora.slots, "adapters_waiting": lora.waiting}
    return FixAdvice(name, lora.slots + lora.waiting, inputs=inputs)


SEATS: Final[Mapping[str, FixRule]] = {
    "lower_max_num_seqs": _lower_max_num_seqs,
    "raise_max_num_seqs": _raise_max_num_seqs,
    "add_replicas": _add_replicas,
    "raise_max_loras": _raise_max_loras,
}
