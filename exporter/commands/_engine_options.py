"""The flags that describe a simulated engine, for `simulate run` and `whatif`."""

import argparse
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime

__all__ = ["add_engine_arguments", "engine_changes"]


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag for a field of `Engine`; with a `value` it is a switch that sets it."""

    flag: str
    field: str
    help: str
    kind: type[int] | type[float] = int
    choices: tuple[str, ...] = ()
    value: bool | None = None


# Named as vLLM's own where vLLM has them.
_ENGINE: Final = (
    _Flag("--num-gpu-blocks", "num_gpu_blocks", "KV blocks in the pool, null block included"),
    _Flag("--block-size", "block_size", "tokens per block"),
    _Flag("--max-num-seqs", "max_num_seqs", "requests that may run at once"),
    _Flag("--max-num-batched-tokens", "max_num_batched_tokens", "tokens per step at most"),
    _Flag("--max-model-len", "max_model_len", "longest sequence in tokens"),
    _Flag("--watermark", "watermark", "share of the pool kept free at admission", float),
    _Flag("--no-prefix-caching", "enable_prefix_caching", "forget freed blocks at once", value=False),
    _Flag(
        "--no-full-prompt-reservation",
        "reserve_full_prompt",
        "admit a request as soon as its first chunk fits (vLLM before 0.19)",
        value=False,
    ),
    _Flag("--no-chunked-prefill", "enable_chunked_prefill", "compute each prompt in one step", value=False),
    _Flag("--policy", "policy", "order of admission and preemption", choices=("fcfs", "priority")),
    _Flag(
        "--async-scheduling",
        "async_scheduling",
        "schedule each step before the output of the last one is known (vLLM's default on GPUs since 0.14)",
        value=True,
    ),
    _Flag(
        "--recovery",
        "recovery",
        "how a preempted request resumes: computed again (V1), or copied to host memory and back",
        choices=("recompute", "swap"),
    ),
    _Flag("--swap-blocks", "swap_blocks", "blocks of swap space (default: as many as the pool)"),
)
# Flag, field of `StepTime`, nanoseconds of its unit, help.
_TIMES: Final = (
    ("--step-fixed-ms", "fixed", 1e6, "time of any step"),
    ("--step-token-us", "per_token", 1e3, "time per scheduled token"),
    ("--step-sequence-us", "per_sequence", 1e3, "time per scheduled request"),
    ("--swap-block-us", "per_swapped_block", 1e3, "time to copy one block over PCIe, one way"),
)
_DEFAULTS: Final = {field.name: field.default for field in fields(Engine)}


def add_engine_arguments(parser: argparse.ArgumentParser, *, known: bool = False) -> None:
    """Add the flags.

    Args:
        parser: gets them.
        known: whether another source knows the engine, so that flags only correct it.
    """
    group = parser.add_argument_group("engine", "These go before what the server exposes." if known else None)
    for row in _ENGINE:
        options: dict[str, Any] = {"dest": row.field, "default": argparse.SUPPRESS, "help": row.help}
        if row.value is not None:
            group.add_argument(row.flag, action="store_const", const=row.value, **options)
            continue
        if row.field == "num_gpu_blocks":
            options["required"] = not known
        elif not known and "default" not in row.help:
            default = _DEFAULTS[row.field]
            options["help"] += f" (default: {'none' if default is None else default})"
        if row.choices:
            options |= {"choices": row.choices, "metavar": "|".join(row.choices)}
        else:
            options |= {"type": row.kind, "metavar": "N"}
        group.add_argument(row.flag, **options)
    usual = StepTime()
    for flag, name, unit, text in _TIMES:
        shown = "" if known else f" (default: {getattr(usual, name) / unit:g})"
        group.add_argument(
            flag, type=float, dest=name, default=argparse.SUPPRESS, metavar="N", help=text + shown
        )


def engine_changes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Engine` that flags were given for.

    Raises:
        ValueError: a time is below 0 or not finite.
    """
    given = vars(options)
    changes = {row.field: given[row.field] for row in _ENGINE if row.field in given}
    times = {}
    for flag, name, unit, _ in _TIMES:
        if name in given:
            times[name] = given[name] * unit
            if not 0 <= times[name] < 1e15:  # noqa: PLR2004 (also rejects NaN and infinity)
                raise ValueError(f"{flag}: wanted a time of at least 0, got {times[name]}")
    if times:
        changes["step_time"] = replace(StepTime(), **{name: round(value) for name, value in times.items()})
    if changes.get("recovery") == "swap" and "num_gpu_blocks" in changes:
        changes.setdefault("swap_blocks", changes["num_gpu_blocks"])
    return changes
