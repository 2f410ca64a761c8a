"""The changes that a forecast simulates: single ones, and combinations on request."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from exporter.simulation.load import Load, fitting_seats
from exporter.simulation.settings import Engine

__all__ = ["NOW", "Candidate", "candidates", "parse_candidate", "scaled_pool"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change of the server."""

    label: str  # for a table: ``watermark 0.05``
    engine: Engine  # after the change
    replicas: int = 1  # servers that share the load, per server of today
    fixes: tuple[str, ...] = ()  # names of fixes, each of which makes this change
    note: str = ""  # requirements or assumptions


NOW: Final = "as it is now"


def scaled_pool(engine: Engine, factor: float) -> Engine:
    """Return an engine with its usable blocks multiplied by a factor."""
    return replace(engine, num_gpu_blocks=max(2, round(engine.usable_blocks * factor) + 1))


def candidates(load: Load, engine: Engine) -> tuple[Candidate, ...]:
    """Return the single changes worth simulating for an engine under a load; the first one is no change."""
    return (
        Candidate(NOW, engine),
        *_pool(engine),
        *_seats(load, engine),
        *_admission(engine),
        Candidate(
            "one more replica", engine, 2, ("add_replicas",), "assumes that 2 servers share the load equally"
        ),
        *_batch(engine),
    )


def _change(engine: Engine, label: str, fix: str, note: str = "", **settings: Any) -> Candidate:
    return Candidate(label, replace(engine, **settings), 1, (fix,), note)


def _pool(engine: Engine) -> Iterator[Candidate]:
    for factor, fixes, note in (
        (1.1, ("raise_gpu_memory_utilization",), "assumes that the GPU has room for it"),
        (2.0, ("fp8_kv_cache", "raise_tensor_parallel"), "assumes that the step time does not change"),
    ):
        yield Candidate(f"pool x{factor:g}", scaled_pool(engine, factor), 1, fixes, note)


def _seats(load: Load, engine: Engine) -> Iterator[Candidate]:
    """Yield several seat counts: those that fit by arithmetic, parts of what can run, and twice as many."""
    fitting = fitting_seats(load, engine)
    plateau = min(engine.max_num_seqs, load.clients or engine.max_num_seqs, 2 * fitting)
    for seats in sorted({fitting, plateau * 3 // 4, plateau // 2, plateau // 4}, reverse=True):
        if 1 <= seats < engine.max_num_seqs:
            yield _change(engine, f"max_num_seqs {seats}", "lower_max_num_seqs", max_num_seqs=seats)
    more = 2 * engine.max_num_seqs
    tokens = max(more, engine.max_num_batched_tokens)
    label = f"max_num_seqs {more}"
    yield _change(engine, label, "raise_max_num_seqs", max_num_seqs=more, max_num_batched_tokens=tokens)


def _admission(engine: Engine) -> Iterator[Candidate]:
    since = "needs vLLM {} or newer"
    for share in (0.01, 0.05, 0.1):
        if share > engine.watermark:
            label = f"watermark {share:g}"
            yield _change(engine, label, "set_watermark", since.format("0.24"), watermark=share)
    if not engine.enable_prefix_caching:
        yield _change(engine, "prefix caching on", "enable_prefix_caching", enable_prefix_caching=True)
    if not engine.reserve_full_prompt:
        label, note = "whole prompts reserved", since.format("0.19")
        yield _change(engine, label, "reserve_full_prompt", note, reserve_full_prompt=True)


def _batch(engine: Engine) -> Iterator[Candidate]:
    now = engine.max_num_batched_tokens
    for tokens, fix in (
        (now * 4, "raise_max_num_batched_tokens"),
        (now // 4, "lower_max_num_batched_tokens"),
    ):
        if tokens >= engine.max_num_seqs:
            yield _change(engine, f"max_num_batched_tokens {tokens}", fix, max_num_batched_tokens=tokens)


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
