"""The flags that describe a simulated engine, for `simulate run` and `whatif`."""

import argparse
from dataclasses import fields, replace
from typing import Any, Final

from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime

__all__ = ["add_engine_arguments", "engine_changes"]

# Fields of `Engine`; a flag is named after its field, and the field after vLLM's flag where vLLM has one.
_NUMBERS: Final = {
    "num_gpu_blocks": "KV blocks in the pool, null block included",
    "block_size": "tokens per block",
    "max_num_seqs": "requests that may run at once",
    "max_num_batched_tokens": "tokens per step at most",
    "max_model_len": "longest sequence in tokens",
    "watermark": "share of the pool kept free at admission",
    "swap_blocks": "blocks of swap space (default: as many as the pool)",
}
_CHOICES: Final = {
    "policy": (("fcfs", "priority"), "order of admission and preemption"),
    "recovery": (
        ("recompute", "swap"),
        "how a preempted request resumes: computed again (V1), or copied to host memory and back",
    ),
}
# Flag: the field that it sets, to which value.
_SWITCHES: Final = {
    "--no-prefix-caching": ("enable_prefix_caching", False, "forget freed blocks at once"),
    "--no-full-prompt-reservation": (
        "reserve_full_prompt",
        False,
        "admit a request as soon as its first chunk fits (vLLM before 0.19)",
    ),
    "--no-chunked-prefill": ("enable_chunked_prefill", False, "compute each prompt in one step"),
    "--async-scheduling": (
        "async_scheduling",
        True,
        "schedule each step before the output of the last one is known (vLLM's default on GPUs since 0.14)",
    ),
}
# Flag: field of `StepTime`, nanoseconds of its unit, help.
_TIMES: Final = {
    "--step-fixed-ms": ("fixed", 1e6, "time of any step"),
    "--step-token-us": ("per_token", 1e3, "time per scheduled token"),
    "--step-sequence-us": ("per_sequence", 1e3, "time per scheduled request"),
    "--swap-block-us": ("per_swapped_block", 1e3, "time to copy one block over PCIe, one way"),
}
_DEFAULTS: Final = {field.name: field.default for field in fields(Engine)}


def add_engine_arguments(parser: argparse.ArgumentParser, *, known: bool = False) -> None:
    """Add the flags.

    Args:
        parser: gets them.
        known: whether another source knows the engine, so that flags only correct it.
    """
    group = parser.add_argument_group(
        "engine",
        "These override what the server exposes." if known else None,
        argument_default=argparse.SUPPRESS,
    )

    def default(value: object) -> str:
        return "" if known else f" (default: {'none' if value is None else value})"

    for name, text in _NUMBERS.items():
        kind = float if name == "watermark" else int
        required = name == "num_gpu_blocks" and not known
        shown = "" if required or "default" in text else default(_DEFAULTS[name])
        group.add_argument(_flag(name), type=kind, required=required, metavar="N", help=text + shown)
    for name, (choices, text) in _CHOICES.items():
        shown = default(_DEFAULTS[name])
        group.add_argument(_flag(name), choices=choices, metavar="|".join(choices), help=text + shown)
    for flag, (name, value, text) in _SWITCHES.items():
        group.add_argument(flag, dest=name, action="store_const", const=value, help=text)
    usual = StepTime()
    for flag, (name, unit, text) in _TIMES.items():
        shown = default(f"{getattr(usual, name) / unit:g}")
        group.add_argument(flag, type=float, dest=name, metavar="N", help=text + shown)


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def engine_changes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Engine` that flags were given for.

    Raises:
        ValueError: a time is below 0 or not finite.
    """
    given = vars(options)
    changes = {name: given[name] for name in _DEFAULTS if name in given}
    times = {}
    for flag, (name, unit, _) in _TIMES.items():
        if name in given:
            times[name] = given[name] * unit
            if not 0 <= times[name] < 1e15:  # noqa: PLR2004 (also rejects NaN and infinity)
                raise ValueError(f"{flag}: expected a time of at least 0, got {times[name]}")
    if times:
        changes["step_time"] = replace(StepTime(), **{name: round(value) for name, value in times.items()})
    if changes.get("recovery") == "swap" and "num_gpu_blocks" in changes:
        changes.setdefault("swap_blocks", changes["num_gpu_blocks"])
    return changes
