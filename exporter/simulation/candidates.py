"""The changes that a forecast simulates: single ones, and combinations on request."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from exporter.simulation.load import Load, fitting_seats
from exporter.simulation.settings import Engine

__all__ = ["NOW", "Candidate", "candidates", "parse_candidate", "scaled_pool"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change of the server.

    Attributes:
        label: The change, for a table: ``watermark 0.05``.
        engine: The settings after the change.
        replicas: Servers that share the load, per server of today.
        fixes: Names of fixes, each of which makes this change.
        note: Requirements or assumptions, or "".
    """

    label: str
    engine: Engine
    replicas: int = 1
    fixes: tuple[str, ...] = ()
    note: str = ""


NOW: Final = "as it is now"


def scaled_pool(engine: Engine, factor: float) -> Engine:
    """Return an engine with its usable blocks multiplied by a factor."""
    return replace(engine, num_gpu_blocks=max(2, round(engine.usable_blocks * factor) + 1))


def candidates(load: Load, engine: Engine) -> tuple[Candidate, ...]:
    """Return the single changes worth simulating for an engine under a load; the first one is no change."""
    shared = "assumes that 2 servers share the load equally"
    return (
        Candidate(NOW, engine),
        *_pool(engine),
        *_seats(load, engine),
        *_admission(engine),
        Candidate("one more replica", engine, 2, ("add_replicas",), shared),
        *_batch(engine),
    )


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
    values = {fitting, plateau * 3 // 4, plateau // 2, plateau // 4}
    for seats in sorted(values, reverse=True):
        if 1 <= seats < engine.max_num_seqs:
            label = f"max_num_seqs {seats}"
            yield Candidate(label, replace(engine, max_num_seqs=seats), 1, ("lower_max_num_seqs",))
    more = 2 * engine.max_num_seqs
    raised = replace(
        engine, max_num_seqs=more, max_num_batched_tokens=max(more, engine.max_num_batched_tokens)
    )
    yield Candidate(f"max_num_seqs {more}", raised, 1, ("raise_max_num_seqs",))


def _admission(engine: Engine) -> Iterator[Candidate]:
    since = "needs vLLM {} or newer"
    for watermark in (0.01, 0.05, 0.1):
        if watermark > engine.watermark:
            changed = replace(engine, watermark=watermark)
            yield Candidate(f"watermark {watermark:g}", changed, 1, ("set_watermark",), since.format("0.24"))
    if not engine.enable_prefix_caching:
        changed = replace(engine, enable_prefix_caching=True)
        yield Candidate("prefix caching on", changed, 1, ("enable_prefix_caching",))
    if not engine.reserve_full_prompt:
        changed, fixes = replace(engine, reserve_full_prompt=True), ("reserve_full_prompt",)
        yield Candidate("whole prompts reserved", changed, 1, fixes, since.format("0.19"))


def _batch(engine: Engine) -> Iterator[Candidate]:
    now = engine.max_num_batched_tokens
    for tokens, fix in (
        (now * 4, "raise_max_num_batched_tokens"),
        (now // 4, "lower_max_num_batched_tokens"),
    ):
        if tokens >= engine.max_num_seqs and tokens:
            changed = replace(engine, max_num_batched_tokens=tokens)
            yield Candidate(f"max_num_batched_tokens {tokens}", changed, 1, (fix,))


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


def _changed(engine: Engine, name: str, value: str) -> Engine:
    """Return the engine with one part of a combination applied."""
    switches = {"on": True, "off": False}
    if name == "pool":
        if value.startswith("x"):
            return scaled_pool(engine, float(value[1:]))
        return replace(engine, num_gpu_blocks=int(value))
    if name == "seats":
        return replace(engine, max_num_seqs=int(value))
    if name == "batched-tokens":
        return replace(engine, max_num_batched_tokens=int(value))
    if name == "watermark":
        return replace(engine, watermark=float(value))
    if name in ("prefix-caching", "full-prompt-reservation"):
        if value not in switches:
            raise ValueError(f"expected on or off, got {value!r}")
        if name == "prefix-caching":
            return replace(engine, enable_prefix_caching=switches[value])
        return replace(engine, reserve_full_prompt=switches[value])
    raise ValueError(
        "expected pool, seats, watermark, batched-tokens, prefix-caching, full-prompt-reservation or replicas"
    )
