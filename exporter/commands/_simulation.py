"""Parts of `simulate` and `whatif`: the flags that describe an engine, and files of requests."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import Request, WorkloadError, parse_trace, parse_workload

__all__ = ["add_engine_arguments", "engine_changes", "read_workload"]

# Field of `Engine` (a flag is named after its field, and the field after vLLM's flag where vLLM has one), the
# type or the choices of its value, help.
_SETTINGS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("num_gpu_blocks", int, "KV blocks in the pool, null block included"),
    ("block_size", int, "tokens per block"),
    ("max_num_seqs", int, "requests that may run at once"),
    ("max_num_batched_tokens", int, "tokens per step at most"),
    ("max_model_len", int, "longest sequence in tokens"),
    ("watermark", float, "share of the pool kept free at admission"),
    ("swap_blocks", int, "blocks of swap space (default: as many as the pool)"),
    ("policy", ("fcfs", "priority"), "order of admission and preemption"),
    ("recovery", ("recompute", "swap"),
     "how a preempted request resumes: computed again (V1), or copied to host memory and back"),
)  # fmt: skip
# Flag, the field that it sets, to which value, help.
_SWITCHES: Final = (
    ("--no-prefix-caching", "enable_prefix_caching", False, "forget freed blocks at once"),
    ("--no-full-prompt-reservation", "reserve_full_prompt", False,
     "admit a request as soon as its first chunk fits (vLLM before 0.19)"),
    ("--no-chunked-prefill", "enable_chunked_prefill", False, "compute each prompt in one step"),
    ("--async-scheduling", "async_scheduling", True,
     "schedule each step before the output of the last one is known (vLLM's default on GPUs since 0.14)"),
)  # fmt: skip
# Flag, field of `StepTime`, nanoseconds of its unit, help.
_TIMES: Final = (
    ("--step-fixed-ms", "fixed", 1e6, "time of any step"),
    ("--step-token-us", "per_token", 1e3, "time per scheduled token"),
    ("--step-sequence-us", "per_sequence", 1e3, "time per scheduled request"),
    ("--swap-block-us", "per_swapped_block", 1e3, "time to copy one block over PCIe, one way"),
)
_DEFAULTS: Final[Mapping[str, Any]] = {field.name: field.default for field in fields(Engine)}


def add_engine_arguments(parser: argparse.ArgumentParser, *, known: bool = False) -> None:
    """Add the flags; where another source knows the engine (`known`), they only correct it."""
    note = "These override what the server exposes." if known else None
    group = parser.add_argument_group("engine", note, argument_default=argparse.SUPPRESS)

    def default(value: object) -> str:
        return "" if known else f" (default: {'none' if value is None else value})"

    for name, kind, text in _SETTINGS:
        required = name == "num_gpu_blocks" and not known
        value: dict[str, Any] = {"type": kind, "metavar": "N", "required": required}
        if isinstance(kind, tuple):
            value = {"choices": kind, "metavar": "|".join(kind)}
        shown = "" if required or "default" in text else default(_DEFAULTS[name])
        group.add_argument(f"--{name.replace('_', '-')}", help=text + shown, **value)
    for flag, name, constant, text in _SWITCHES:
        group.add_argument(flag, dest=name, action="store_const", const=constant, help=text)
    usual = StepTime()
    for flag, name, unit, text in _TIMES:
        shown = default(f"{getattr(usual, name) / unit:g}")
        group.add_argument(flag, type=float, dest=name, metavar="N", help=text + shown)


def engine_changes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Engine` from flags; raises ValueError if a time is below 0 or not finite."""
    given = vars(options)
    changes = {name: given[name] for name in _DEFAULTS if name in given}
    times = {name: (flag, given[name] * unit) for flag, name, unit, _ in _TIMES if name in given}
    for flag, time in times.values():
        if not 0 <= time < 1e15:  # noqa: PLR2004 (also rejects NaN and infinity)
            raise ValueError(f"{flag}: expected a time of at least 0, got {time}")
    if times:
        changes["step_time"] = replace(StepTime(), **{name: round(time) for name, (_, time) in times.items()})
    if changes.get("recovery") == "swap" and "num_gpu_blocks" in changes:
        changes.setdefault("swap_blocks", changes["num_gpu_blocks"])
    return changes


def read_workload(path: str) -> tuple[Request, ...]:
    """Read a workload file: CSV where its name ends in ``.csv``, else JSON.

    Raises:
        WorkloadError: it is invalid; the text names the file.
        OSError: it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return parse_trace(text.splitlines()) if path.endswith(".csv") else parse_workload(json.loads(text))
    except ValueError as problem:
        raise WorkloadError(f"{path}: {problem}") from problem
