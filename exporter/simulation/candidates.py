"""The changes that a forecast simulates: single ones, and combinations on request."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from exporter.simulation.settings import Engine

__all__ = [
    "ASSUMED_POOLS", "NOW", "Candidate", "parse_candidate", "scaled_pool", "seats_at", "singles",
    "watermark_at",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change of the server."""

    label: str  # for a table: ``watermark 0.05``
    engine: Engine  # after the change
    replicas: int = 1  # servers that share the load, per server of today
    fixes: tuple[str, ...] = ()  # names of fixes, each of which makes this change
    note: str = ""  # requirements or assumptions
    value: float | None = None  # of the setting that is changed
    parts: "tuple[Candidate, ...]" = ()  # the changes that a pair consists of


NOW: Final = "as it is now"
ASSUMED_POOLS: Final[Mapping[str, float]] = {
    "raise_gpu_memory_utilization": 1.1, "fp8_kv_cache": 2.0, "raise_tensor_parallel": 2.0,
}  # fmt: skip
"""How many times as many tokens the pool holds after a fix, where the server's sizes are not known."""
_SINCE: Final = "needs vLLM {} or newer"


def scaled_pool(engine: Engine, factor: float) -> Engine:
    """Return an engine with its usable blocks multiplied by a factor."""
    return replace(engine, num_gpu_blocks=max(2, round(engine.usable_blocks * factor) + 1))


def singles(engine: Engine, pools: Mapping[str, float], replicas: int = 1) -> tuple[Candidate, ...]:
    """Return the single changes of an engine that have no value to search for.

    Args:
        engine: as it is.
        pools: how many times as many tokens the pool holds after each fix about memory; see `ASSUMED_POOLS`.
        replicas: more servers that share the load.
    """
    return (
        *_pools(engine, pools),
        *_switches(engine),
        Candidate(
            f"{replicas} more replica{'s' if replicas > 1 else ''}",
            engine,
            1 + replicas,
            ("add_replicas",),
            f"assumes that {1 + replicas} servers share the load equally",
            replicas,
        ),
        *_batch(engine),
    )


def seats_at(engine: Engine, seats: int) -> Candidate:
    """Return the engine with another number of seats."""
    fix = "lower_max_num_seqs" if seats < engine.max_num_seqs else "raise_max_num_seqs"
    return Candidate(f"max_num_seqs {seats}", replace(engine, max_num_seqs=seats), 1, (fix,), "", seats)


def watermark_at(engine: Engine, share: float) -> Candidate:
    """Return the engine with another watermark."""
    changed = replace(engine, watermark=share)
    return Candidate(f"watermark {share:g}", changed, 1, ("set_watermark",), _SINCE.format("0.24"), share)


def _change(engine: Engine, label: str, fix: str, note: str = "", **settings: Any) -> Candidate:
    return Candidate(label, replace(engine, **settings), 1, (fix,), note)


def _pools(engine: Engine, pools: Mapping[str, float]) -> Iterator[Candidate]:
    by_factor: dict[float, list[str]] = {}
    for fix, factor in pools.items():
        by_factor.setdefault(factor, []).append(fix)
    for factor, fixes in sorted(by_factor.items()):
        note = "assumes that the GPU has room for it and that the step time does not change"
        yield Candidate(f"pool x{factor:g}", scaled_pool(engine, factor), 1, tuple(fixes), note)


def _switches(engine: Engine) -> Iterator[Candidate]:
    if not engine.enable_prefix_caching:
        yield _change(engine, "prefix caching on", "enable_prefix_caching", enable_prefix_caching=True)
    if not engine.reserve_full_prompt:
        label, note = "whole prompts reserved", _SINCE.format("0.19")
        yield _change(engine, label, "reserve_full_prompt", note, reserve_full_prompt=True)


def _batch(engine: Engine) -> Iterator[Candidate]:
    now = engine.max_num_batched_tokens
    for tokens, fix in (
        (now * 2, "raise_max_num_batched_tokens"),
        (now // 2, "lower_max_num_batched_tokens"),
    ):
        if tokens >= engine.max_num_seqs:
            label, changed = (
                f"max_num_batched_tokens {tokens}",
                replace(engine, max_num_batched_tokens=tokens),
            )
            yield Candidate(label, changed, 1, (fix,), "", tokens)


def parse_candidate(text: str, engine: Engine) -> Candidate:
    """Read a combination such as ``pool=x1.5+seats=64+watermark=0.05``.

    Parts: ``pool=xFACTOR`` or ``pool=BLOCKS``, ``seats=N``, ``watermark=SHARE``, ``batched-tokens=N``,
    ``prefix-caching=on|off``, ``full-prompt-reservation=on|off``, ``replicas=xFACTOR``.

    Raises:
        ValueError: a part is invalid, or vLLM would reject it; the message names it.
    """
    replicas = 1
    for part in text.split("+"):
        name, _, value = part.strip().partition("=")
        try:
            if name == "replicas":
                replicas = int(value.removeprefix("x"))
                if replicas < 1:
                    raise ValueError("expected at least x1")  # noqa: TRY301 -- raised again with the part's name below
            else:
                engine = _changed(engine, name, value)
        except ValueError as error:
            raise ValueError(f"candidate {text!r}: {part.strip()!r}: {error}") from error
    return Candidate(text, engine, replicas)


def _switch(value: str) -> bool:
    if value not in ("on", "off"):
        raise ValueError(f"expected on or off, got {value!r}")
    return value == "on"


# Setting and reader of each part of a combination.
_PARTS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "pool": ("num_gpu_blocks", int),
    "seats": ("max_num_seqs", int),
    "watermark": ("watermark", float),
    "batched-tokens": ("max_num_batched_tokens", int),
    "prefix-caching": ("enable_prefix_caching", _switch),
    "full-prompt-reservation": ("reserve_full_prompt", _switch),
}


def _changed(engine: Engine, name: str, value: str) -> Engine:
    """Return the engine with one part of a combination applied."""
    if name == "pool" and value.startswith("x"):
        return scaled_pool(engine, float(value[1:]))
    if name not in _PARTS:
        raise ValueError(f"expected {', '.join(_PARTS)} or replicas")
    setting, read = _PARTS[name]
    return replace(engine, **{setting: read(value)})
