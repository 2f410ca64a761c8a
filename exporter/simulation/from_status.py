"""Reads an engine's load, settings and step time from the status of a running exporter.

Unknown values get defaults, which are listed as assumptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Final

from exporter.analysis.lengths import LengthHistogram
from exporter.analysis.load_profile import LoadProfile
from exporter.config import as_number, seat_limit
from exporter.simulation.calibration import Observed
from exporter.simulation.identify import identify
from exporter.simulation.load import Load
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import Lengths

__all__ = ["Present", "PresentError", "describe_engine", "describe_load", "present_from_status"]

# Short answers finish first: while less than this number of requests has finished per running one, the mean
# is corrected by the tokens that unfinished requests have generated.
_FEW_FINISHED: Final = 4.0
_LONGER: Final = 3.0
# A block count and a capacity in tokens agree if they differ by at most this.
_CLOSE: Final = 0.1
# vLLM's defaults, for a server whose settings are unknown.
_SEATS: Final = 256
_BUDGET: Final = 2048
_BLOCK: Final = 16
_LONGEST: Final = 1 << 20


class PresentError(ValueError):
    """Too little is known of an engine to simulate it; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Present:
    """The current state of an engine."""

    load: Load
    engine: Engine
    step_times: tuple[StepTime, ...] = ()  # all that the observations allow, best first
    observed: Observed | None = None  # what the server did meanwhile
    assumed: tuple[str, ...] = ()  # unknown settings and their defaults, as sentences
    known: tuple[str, ...] = ()  # known settings with their sources: ``max_num_seqs 64 (argument line)``
    sentence: str = ""  # load and settings, for a person
    fixes: tuple[Mapping[str, Any], ...] = ()  # those that are advised, with the numbers they rest on


def present_from_status(status: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Present:
    """Read the state of an engine from the exporter's status.

    Args:
        status: the engine's object, with ``load`` and ``limits``.
        overrides: fields of `Engine` that replace the values of the exporter.

    Raises:
        PresentError: a value that a simulation needs is unknown; the message names it.
    """
    document = status.get("load")
    if not isinstance(document, Mapping):
        raise PresentError("the load of the engine is unknown: the exporter has not seen it at work yet")
    profile = LoadProfile.from_dict(document)
    limits = dict(status.get("limits") or {})
    seats = limits.get(seat_limit({name: each.get("value") for name, each in limits.items()}))
    if seats is not None:  # the simulated scheduler has one limit
        limits["max_num_seqs"] = seats
    facts = {name: each.get("value") for name, each in limits.items()}
    facts["block_size"] = profile.block_size
    longest = _whole(facts.get("max_model_len")) or _LONGEST
    prompts = _lengths(profile.prompt_tokens, "prompt", max(1, longest - 1))  # longer ones are refused
    outputs = _stretched(_lengths(profile.output_tokens, "output", longest), profile, longest)
    assumed: list[str] = []
    engine = _engine(profile, facts, dict(overrides or {}), assumed)
    if profile.arrivals_per_second <= 0 and profile.requests_waiting_mean < 1:
        raise PresentError("no request arrived while the engine was watched")
    fitted = "step_time" not in (overrides or {})
    found = identify(profile, prompts, outputs, engine, fitted=fitted)
    step_times = found.step_times or (engine.step_time,)
    engine = replace(engine, step_time=step_times[0])
    observed = _observed(profile, guessed=not found.step_times)
    sentence = (
        f"{describe_load(found.load)}, as seen in {profile.window_seconds:.0f} s; {describe_engine(engine)}"
    )
    known = _sources(limits, overrides or {})
    fixes = tuple(each for each in status.get("fixes") or () if isinstance(each["fix"], str))
    if not all(isinstance(each.get("inputs") or {}, Mapping) for each in fixes):
        raise PresentError("the inputs of a fix have an unexpected form")
    assumptions = (*assumed, *found.assumed)
    return Present(found.load, engine, step_times, observed, assumptions, known, sentence, fixes)


def _sources(limits: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that a simulation uses, each with the source that the exporter has it from."""
    used = {field.name for field in fields(Engine)} - overrides.keys()
    return tuple(
        f"{name} {str(each['value']).lower()} ({each['source']})"
        for name, each in limits.items()
        if name in used and each.get("source")
    )


def _observed(profile: LoadProfile, *, guessed: bool) -> Observed:
    """Return the figures of the server in the window, as far as they are known."""
    preempted, finished = profile.preemptions_per_minute, profile.requests_finished
    per_request = None
    if preempted is not None and finished > 0:
        per_request = preempted * profile.window_seconds / 60 / finished
    figures = {
        "preemptions_per_minute": preempted,
        "preemptions_per_request": per_request,
        "output_tokens_per_second": profile.generation_tokens_per_second,
        "running": profile.requests_running_mean,
        "waiting": profile.requests_waiting_mean,
        "inter_token_seconds": profile.inter_token_seconds,
    }
    known = {name: value for name, value in figures.items() if value is not None}
    return Observed(known, profile.window_seconds, finished, "the step time" if guessed else "")


def _lengths(histogram: LengthHistogram | None, name: str, longest: int) -> Lengths:
    mean = histogram.mean if histogram is not None else None
    if histogram is None or not mean:
        raise PresentError(f"{name} tokens of requests are unknown: no request has finished yet")
    counts = accumulate(inside for _, inside in histogram.buckets)
    cumulative = [(bound, count) for (bound, _), count in zip(histogram.buckets, counts, strict=True)]
    if not histogram.detailed:  # one bucket has no more than the mean
        return Lengths.between(max(1, round(mean / 2)), max(1, round(mean * 1.5)))
    return Lengths.from_buckets(cumulative, longest, mean)


def _stretched(outputs: Lengths, profile: LoadProfile, longest: int) -> Lengths:
    """Return the lengths of answers, longer if those that have finished so far are only the short ones."""
    lengths = profile.output_tokens
    in_flight = profile.requests_running_mean + profile.requests_waiting_mean
    if lengths is None or not lengths.total or lengths.count >= _FEW_FINISHED * in_flight:
        return outputs
    factor = min(_LONGER, (lengths.produced or 0.0) / lengths.total)
    if factor <= 1:
        return outputs
    ranges = ((least, min(longest, round(most * factor)), weight) for least, most, weight in outputs.ranges)
    return Lengths(tuple((min(round(least * factor), most), most, weight) for least, most, weight in ranges))


def _engine(
    profile: LoadProfile, facts: Mapping[str, Any], overrides: dict[str, Any], assumed: list[str]
) -> Engine:
    def known(name: str, guess: int) -> int:
        value = overrides.pop(name, None) or _whole(facts.get(name))
        if value is None:
            assumed.append(f"{name} = {guess} (unknown)")
        return value or guess

    block = known("block_size", _BLOCK)
    blocks = overrides.pop("num_gpu_blocks", None) or _blocks(profile, block)
    seats = known("max_num_seqs", max(_SEATS, round(profile.requests_running_max)))
    engine = Engine(
        num_gpu_blocks=blocks,
        block_size=block,
        max_num_seqs=seats,
        max_num_batched_tokens=known("max_num_batched_tokens", max(_BUDGET, seats)),
        max_model_len=_whole(facts.get("max_model_len")),
        watermark=float(facts.get("watermark") or 0.0),
        enable_prefix_caching=facts.get("enable_prefix_caching") is not False,
        reserve_full_prompt=facts.get("scheduler_reserve_full_isl") is not False,
        enable_chunked_prefill=facts.get("enable_chunked_prefill") is not False,
        policy="priority" if facts.get("scheduling_policy") == "priority" else "fcfs",
        async_scheduling=facts.get("async_scheduling") is True,
    )
    return replace(engine, **overrides)


def _blocks(profile: LoadProfile, block: int) -> int:
    """Return the blocks of one engine, including the null block.

    The server exposes the number for all its engines together, and the capacity in tokens of each. If they
    disagree (hybrid models), the capacity counts.
    """
    capacity, total = profile.kv_capacity_tokens or 0.0, profile.num_gpu_blocks or 0
    if capacity <= 0:
        raise PresentError("the KV capacity is unknown: pass --num-gpu-blocks")
    blocks: float = total / max(1, round(total * block / capacity))
    if abs(blocks * block - capacity) <= _CLOSE * capacity:
        return max(2, round(blocks))
    return max(2, round(capacity / block) + 1)


def _whole(value: object) -> int | None:
    number = as_number(value)
    return None if number is None else int(number)


def describe_load(load: Load) -> str:
    """Describe a load for a person."""
    prompts, outputs = load.lengths()
    rate = load.requests_per_second() or 0.0
    arrivals = f"{load.clients} requests at a time" if load.clients else f"{rate:.3g} requests/s"
    prefix = f" ({load.prefix_tokens} shared)" if load.prefix_tokens else ""
    return f"{arrivals}, prompts of {prompts.mean:.0f} tokens{prefix}, answers of {outputs.mean:.0f}"


def describe_engine(engine: Engine) -> str:
    """Describe the settings and step time of an engine for a person."""
    step = engine.step_time
    request = step.per_token + step.per_sequence
    return (
        f"{engine.num_gpu_blocks} blocks of {engine.block_size}, max_num_seqs {engine.max_num_seqs}, "
        f"max_num_batched_tokens {engine.max_num_batched_tokens}; a step takes {step.fixed / 1e6:.1f} ms "
        f"+ {step.per_token / 1e3:.0f} us per prompt token + {request / 1e3:.0f} us per running request"
    )
