"""Parses the text of a series, name and labels, once, and remembers its meaning."""

import functools
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, Final, Literal, NamedTuple

from exporter.vllm import names

# A label block ends where its braces close outside quotes. The possessive quantifiers keep the time linear.
_LABEL: Final = re.compile(
    rb'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"[ \t]*+(,|(?=\}))', re.DOTALL
)
_NAME: Final = re.compile(rb"[ \t]*+([a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]*+(\{)?")
_END_OF_LABELS: Final = re.compile(rb"[ \t]*+\}")
# A carriage return before the number is a blank, as for float() in the fast reader.
_VALUE: Final = re.compile(
    rb"[ \t\r]*+([^ \t\r#]++)(?:[ \t]++([^ \t\r#]++))?+(?:[ \t]++#.*+)?+[ \t\r]*+\Z", re.DOTALL
)
_ESCAPE: Final = re.compile(rb'\\([\\n"])')
_ESCAPED: Final = {b"\\": b"\\", b"n": b"\n", b'"': b'"'}

SeriesKind = Literal["gauge", "counter", "created", "buckets", "start_time", "cache", "lora", "ignored"]


class EngineKey(NamedTuple):
    """The owner of a series: one engine of one model, and of one replica where a label names it."""

    model: str
    engine: str
    replica: str = ""

    @property
    def name(self) -> str:
        """Return the engine's name for outputs: ``0``, or ``REPLICA/0`` where a label names the replica."""
        return f"{self.replica}/{self.engine}" if self.replica else self.engine


NOBODY: Final = EngineKey("", "")
# A longer name of the target's is cut: what a target prints is not trusted.
MOST_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The labels of ``cache_config_info`` that matter, by their names; None if absent or ``None``.

    ``num_gpu_blocks`` is the sum over data-parallel engines and contains one reserved block per engine;
    ``kv_cache_size_tokens`` and ``kv_cache_max_concurrency`` are of one engine.
    """

    block_size: int | None = None
    num_gpu_blocks: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    cache_dtype: str | None = None
    enable_prefix_caching: bool | None = None
    kv_offloading_size: float | None = None


@dataclass(frozen=True, slots=True)
class LoraState:
    """The numbers of adapters in use, without their names, which may be private."""

    slots: int | None  # ``--max-loras``
    running: int  # adapters with a running request
    waiting: int  # adapters with a waiting request


@dataclass(frozen=True, slots=True)
class Series:
    """The meaning of a series' text."""

    kind: SeriesKind
    reading: str = ""  # our word for the quantity; empty for kinds that have none
    rank: int = 0  # 0 is the newest name with the usual prefix; the lowest in a body wins
    # The engine; for ``cache`` the model is empty, and so is the engine if no label names it.
    key: EngineKey = NOBODY
    # Stands for the remaining labels, which distinguish processes that report the same reading.
    source: bytes = b""
    process: bytes = b""  # of `source` what distinguishes processes, without vLLM's own distinctions
    bound: float = math.inf  # upper bound of a bucket
    most: float = math.inf  # the largest value that makes sense; no value may be infinite
    version: tuple[int, ...] = ()  # first release that has the name
    cache: CacheConfig | None = None
    lora: LoraState | None = None


IGNORED: Final = Series("ignored")

# Series text (name and labels as printed) -> meaning. Shared by all targets: pods of one model print the same
# texts. Emptied when full, which costs one slow poll and bounds the memory that a hostile server can fill.
KNOWN: Final[dict[bytes, Series]] = {}
_KNOWN_LEAST: Final = 20_000
_KNOWN_PER_TARGET: Final = 100  # an engine of vLLM 0.26 prints 64 that matter
_KNOWN_LIMIT = _KNOWN_LEAST
_KNOWN_TEXT_LIMIT: Final = 4096
# Mean bytes of the texts when the memory is full: 4 MB together. Those 64 have 71 bytes on average.
_KNOWN_BYTES_EACH: Final = 200
_known_bytes = 0
# vLLM prints no line with more labels: its longest has 38 in 0.33, and grows.
_MOST_LABELS: Final = 128
# Labels by which one process of vLLM divides a counter.
_DIVISIONS: Final = frozenset({"finished_reason", "reason", "source", "transfer_type", "modality", "cause"})
# A source longer than this is replaced by its hash.
_SOURCE_LIMIT: Final = 64


def expect(targets: int) -> None:
    """Make room for the series of this many targets, even if each prints texts of its own."""
    global _KNOWN_LIMIT  # noqa: PLW0603 (as `KNOWN` itself is shared by all)
    _KNOWN_LIMIT = max(_KNOWN_LEAST, _KNOWN_PER_TARGET * targets)


def _by_spelling() -> dict[str, list[tuple[int, names.Name]]]:
    """Return the rows of each spelling with prefix (one for each label value), with their ranks."""
    table: dict[str, list[tuple[int, names.Name]]] = defaultdict(list)
    ranks: dict[str, Iterator[int]] = defaultdict(count)  # by reading
    for row in names.NAMES:
        for spelling in names.spellings(row):
            for prefix in names.PREFIXES:
                table[prefix + spelling].append((next(ranks[row.reading]), row))
    return table


_ROWS: Final = _by_spelling()


def read_line(line: bytes) -> tuple[Series, float] | None:
    """Parse one sample line, without its line feed, slowly and completely.

    Returns:
        The series' meaning and its value, or None if the line cannot be read.
    """
    match = _NAME.match(line)
    if match is None:
        return None
    block = _read_labels(line, match.end()) if match[2] else ({}, match.end())
    if block is None:
        return None
    labels, end = block
    value = _VALUE.match(line, end)
    if value is None or (not match[2] and line[match.end(1) : end] == b""):
        return None
    number = read_number(value[1])
    if number is None or (value[2] and read_number(value[2]) is None):
        return None
    series = _meaning(match[1].decode(), labels)
    # Remembered only if the fast reader's cut, the last blank of the line, is the end of the series.
    if value.start(1) == line.rfind(b" ") + 1 and end <= _KNOWN_TEXT_LIMIT:
        _remember(line[: value.start(1) - 1], series)
    return series, number


def _remember(text: bytes, series: Series) -> None:
    global _known_bytes  # noqa: PLW0603 (as `KNOWN` itself is shared by all)
    size = len(text) + len(series.source)
    if len(KNOWN) >= _KNOWN_LIMIT or _known_bytes + size > _KNOWN_LIMIT * _KNOWN_BYTES_EACH:
        KNOWN.clear()
    _known_bytes = size + (_known_bytes if KNOWN else 0)
    KNOWN[text] = series


def read_number(text: bytes) -> float | None:
    """Return a sample's value, or None if it is no number; Python's underscores are not allowed."""
    try:
        return None if b"_" in text else float(text)
    except ValueError:
        return None


def _read_labels(line: bytes, at: int) -> tuple[dict[str, str], int] | None:
    """Return the labels of the block that begins at `at`, and its end; None if it is broken or too long."""
    labels: dict[str, str] = {}
    while match := _LABEL.match(line, at):
        name = match[1].decode()
        if name in labels or len(labels) == _MOST_LABELS:
            return None
        raw = match[2]
        if b"\\" in raw:
            raw = _ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], raw)
        labels[name] = raw.decode("utf-8", "replace")
        at = match.end()
    close = _END_OF_LABELS.match(line, at)
    return None if close is None else (labels, close.end())


def _meaning(name: str, labels: Mapping[str, str]) -> Series:
    """Find the row of a name whose label fits."""
    if name == names.START_TIME:
        return Series("start_time")
    for prefix in names.PREFIXES:
        if name == prefix + names.CACHE_CONFIG:
            return _cache_series(labels)
        if name == prefix + names.LORA_INFO:
            return Series("lora", lora=_lora_state(labels))
    for rank, row in _ROWS.get(name, ()):
        if not row.label or labels.get(row.label) == row.value:
            return _series(rank, row, labels)
    return IGNORED


@functools.lru_cache(maxsize=1024)
def _engine_key(model: str, engine: str, replica: str) -> EngineKey:
    """Return one object per engine, so that the fast reader compares most keys by identity.

    Two keys have two names: what is before the last ``/`` of an engine's label belongs to the replica.
    """
    outer, _, engine = engine.rpartition("/")
    return EngineKey(model, engine, bounded("/".join(filter(None, (replica, outer)))))


def _series(rank: int, row: names.Name, labels: Mapping[str, str]) -> Series:
    bound = math.inf
    own = {"model_name", "model", "engine", "ReplicaId", row.label}
    if row.kind == "buckets":
        number = read_number(labels.get("le", "").encode())
        if number is None or not (number <= names.LARGEST or number == math.inf):  # NaN is neither
            return IGNORED
        bound = number
        own.add("le")
    return Series(
        kind=row.kind,
        reading=row.reading,
        rank=rank,
        key=_engine_key(
            bounded(labels.get("model_name") or labels.get("model", "")),
            bounded(labels.get("engine") or "0"),
            bounded(labels.get("ReplicaId", "")),
        ),
        source=_source(labels, own),
        process=_source(labels, own | _DIVISIONS),
        bound=bound,
        most=row.most,
        version=names.version_key(row.since),
    )


def _source(labels: Mapping[str, str], own: AbstractSet[str]) -> bytes:
    """Return a short text for the labels that are not in `own`, different for different labels."""
    others = sorted((name, value) for name, value in labels.items() if name not in own)
    if not others:
        return b""
    text = repr(others).encode()
    return text if len(text) <= _SOURCE_LIMIT else hashlib.sha256(text).digest()


def _cache_series(labels: Mapping[str, str]) -> Series:
    known = [names.version_key(since) for label, since in names.CACHE_LABEL_SINCE.items() if label in labels]
    return Series(
        kind="cache",
        key=_engine_key("", bounded(labels.get("engine", "")), bounded(labels.get("ReplicaId", ""))),
        version=max(known, default=()),
        cache=CacheConfig(
            **{field.name: _READ[field.type](labels.get(field.name, "")) for field in fields(CacheConfig)}
        ),
    )


def _lora_state(labels: Mapping[str, str]) -> LoraState:
    running, waiting = (
        sum(1 for name in labels.get(f"{state}_lora_adapters", "").split(",") if name.strip())
        for state in ("running", "waiting")
    )
    return LoraState(_whole(labels.get("max_lora", "")), running, waiting)


def _number(text: str) -> float | None:
    """Read a positive number; vLLM prints ``None`` if a value is unknown."""
    number = read_number(text.encode())
    return number if number is not None and 0 < number <= names.LARGEST else None


def _whole(text: str) -> int | None:
    number = _number(text)
    return int(number) if number is not None and number.is_integer() else None


# How a label of each type is read; an empty text is an absent label.
_READ: Final[Mapping[Any, Callable[[str], Any]]] = {
    int | None: _whole,
    float | None: _number,
    bool | None: {"True": True, "False": False}.get,
    str | None: lambda text: bounded(text) if text not in {"", "None"} else None,
}


def bounded(text: str) -> str:
    """Make a label's value fit for our outputs: short, and only printable characters.

    A changed value ends with a hash, so that different values stay different.
    """
    if len(text) <= MOST_CHARACTERS and text.isprintable():
        return text
    start = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[: MOST_CHARACTERS - 9])
    return f"{start}~{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"
