"""The present of an engine, from what a running exporter says of it: its load, its settings, its pace.

Settings that the exporter does not know are assumed, and every assumption is listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

from exporter.analysis.lengths import LengthHistogram
from exporter.analysis.load_profile import LoadProfile, StepSlice
from exporter.config import as_number
from exporter.simulation.load import Load, observed_load
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepSample, StepTime, fit
from exporter.simulation.workload import Lengths

__all__ = ["Present", "PresentError", "asked", "present_of", "settings"]

# Samples tell the parts of a step's time from each other only where the load differs this much.
_VARIETY: Final = 1.5
# Block count and capacity in tokens that differ by no more tell the same.
_CLOSE: Final = 0.1
# vLLM's own defaults, for a server that does not tell.
_SEATS: Final = 256
_BUDGET: Final = 2048
_BLOCK: Final = 16
_LONGEST: Final = 1 << 20


class PresentError(ValueError):
    """Too little is known of an engine to simulate it; says what is missing."""


@dataclass(frozen=True, slots=True)
class Present:
    """An engine as it is now.

    Attributes:
        load: what is asked of it.
        engine: its settings.
        per_minute: preemptions that the server counted, per minute; None where it does not count.
        assumed: assumptions about unknown settings.
        sentence: all of that for a person.
    """

    load: Load
    engine: Engine
    per_minute: float | None = None
    assumed: tuple[str, ...] = ()
    sentence: str = ""


def present_of(status: Mapping[str, Any], told: Mapping[str, Any] | None = None) -> Present:
    """Read an engine's object out of the exporter's status.

    Args:
        status: with ``load`` and ``limits``.
        told: fields of `Engine` that somebody told, which count before what the exporter knows.

    Raises:
        PresentError: something without which nothing can be simulated is unknown; it is named.
    """
    document = status.get("load")
    if not isinstance(document, Mapping):
        raise PresentError("nothing is known of the engine's load yet: it must have been seen at work")
    facts = {name: each.get("value") for name, each in (status.get("limits") or {}).items()}
    longest = _whole(facts.get("max_model_len")) or _LONGEST
    profile = LoadProfile.from_dict(document)
    prompts = _lengths(profile.prompt_tokens, "prompt", longest)
    outputs = _lengths(profile.output_tokens, "output", longest)
    assumed: list[str] = []
    engine = _engine(profile, facts, dict(told or {}), assumed)
    if profile.arrivals_per_second <= 0 and profile.requests_waiting_mean < 1:
        raise PresentError("no request came while the engine was watched")
    load = observed_load(
        prompts,
        outputs,
        arrivals_per_second=profile.arrivals_per_second,
        running=profile.requests_running_mean,
        waiting=profile.requests_waiting_mean,
        prefix_hit_ratio=profile.prefix_cache_hit_ratio or 0.0,
    )
    sentence = f"{asked(load)}, as seen in {profile.window_seconds:.0f} s; {settings(engine)}"
    return Present(load, engine, profile.preemptions_per_minute, tuple(assumed), sentence)


def _lengths(histogram: LengthHistogram | None, name: str, longest: int) -> Lengths:
    mean = histogram.mean if histogram is not None else None
    if histogram is None or not mean:
        raise PresentError(f"{name} tokens of requests are unknown: none has finished yet")
    counts = accumulate(inside for _, inside in histogram.buckets)
    cumulative = [(bound, count) for (bound, _), count in zip(histogram.buckets, counts, strict=True)]
    if not histogram.detailed:  # one bucket has no more than the mean
        return Lengths.between(max(1, round(mean / 2)), max(1, round(mean * 1.5)))
    return Lengths.from_buckets(cumulative, longest, mean)


def _engine(
    profile: LoadProfile, facts: Mapping[str, Any], told: dict[str, Any], assumed: list[str]
) -> Engine:
    def known(name: str, guess: int) -> int:
        value = told.pop(name, None) or _whole(facts.get(name))
        if value is None:
            assumed.append(f"{name} is not known, {guess} taken")
        return value or guess

    block = told.pop("block_size", None) or profile.block_size
    if block is None:
        block = _BLOCK
        assumed.append(f"block_size is not known, {block} taken")
    blocks = told.pop("num_gpu_blocks", None) or _blocks(profile, block)
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
    if "step_time" not in told:
        told["step_time"] = _step_time(profile.steps, assumed)
    return replace(engine, **told)


def _blocks(profile: LoadProfile, block: int) -> int:
    """Blocks of one engine, the null block included.

    The server tells the number for all its engines together, and the capacity of each in tokens; where the
    two do not fit together (hybrid models) the capacity decides.
    """
    capacity, told = profile.kv_capacity_tokens or 0.0, profile.num_gpu_blocks or 0
    if capacity <= 0:
        raise PresentError("the KV capacity is not known: tell it with --num-gpu-blocks")
    each = told / max(1, round(told * block / capacity))
    if abs(each * block - capacity) <= _CLOSE * capacity:
        return max(2, round(each))
    return max(2, round(capacity / block) + 1)


def _step_time(steps: Sequence[StepSlice], assumed: list[str]) -> StepTime:
    samples = [StepSample(*each) for each in steps]
    usable = [s for s in samples if s.seconds > 0 and s.steps > 0]
    if not usable:
        assumed.append("the time of a step was not seen, that of an 8B model on one GPU taken")
        return StepTime()
    batches = [s.sequences / s.steps for s in usable]
    if max(batches) < _VARIETY * min(batches):
        total = [
            sum(each)
            for each in zip(*((s.seconds, s.steps, s.tokens, s.sequences) for s in usable), strict=True)
        ]
        return fit([StepSample(*total)])
    return fit(usable)


def _whole(value: object) -> int | None:
    number = as_number(value)
    return None if number is None else int(number)


def asked(load: Load) -> str:
    """Return what is asked of an engine, for a person."""
    prompts, outputs = load.lengths()
    rate = load.requests_per_second() or 0.0
    arrivals = f"{load.clients} requests at a time" if load.clients else f"{rate:.3g} requests/s"
    prefix = f" ({load.prefix_tokens} shared)" if load.prefix_tokens else ""
    return f"{arrivals}, prompts of {prompts.mean:.0f} tokens{prefix}, answers of {outputs.mean:.0f}"


def settings(engine: Engine) -> str:
    """Return an engine's settings and its pace, for a person."""
    step = engine.step_time
    return (
        f"{engine.num_gpu_blocks} blocks of {engine.block_size}, max_num_seqs {engine.max_num_seqs}, "
        f"max_num_batched_tokens {engine.max_num_batched_tokens}; a step takes {step.fixed / 1e6:.1f} ms "
        f"+ {step.per_token / 1e3:.0f} us per token + {step.per_sequence / 1e3:.0f} us per request"
    )
