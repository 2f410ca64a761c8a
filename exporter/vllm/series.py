"""What the text of one series means: name and labels, taken apart once and then remembered."""

import functools
import hashlib
import math
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from exporter.vllm import names

# A label block ends where its braces close outside quotes. The possessive quantifiers keep the time
# linear whatever the bytes are.
_LABEL: Final = re.compile(
    rb'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"[ \t]*+(,|(?=\}))', re.DOTALL
)
_NAME: Final = re.compile(rb"[ \t]*+([a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]*+(\{)?")
_END_OF_LABELS: Final = re.compile(rb"[ \t]*+\}")
_VALUE: Final = re.compile(
    # A carriage return before the number is a blank, as it is to float() in the fast reader.
    rb"[ \t\r]*+([^ \t\r#]++)(?:[ \t]++([^ \t\r#]++))?+(?:[ \t]++#.*+)?+[ \t\r]*+\Z",
    re.DOTALL,
)
_ESCAPE: Final = re.compile(rb'\\([\\n"])')
_ESCAPED: Final = {b"\\": b"\\", b"n": b"\n", b'"': b'"'}

SeriesKind = Literal["gauge", "counter", "created", "buckets", "start_time", "cache", "lora", "ignored"]


class EngineKey(NamedTuple):
    """Who a series belongs to: one engine of one model, of one replica where those are told apart."""

    model: str
    engine: str
    replica: str = ""

    @property
    def name(self) -> str:
        """The engine's name in outputs: ``0``, or ``REPLICA/0`` where a replica label tells engines apart."""
        return f"{self.replica}/{self.engine}" if self.replica else self.engine


NOBODY: Final = EngineKey("", "")
# A name of the target's is used up to this length: what it prints is not ours to trust.
MOST_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The labels of ``cache_config_info`` that matter; None where the label is absent or says so.

    ``num_gpu_blocks`` is the sum over data-parallel engines and holds one reserved block per engine;
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
    """Adapters in use, as counts: their names are the operator's business.

    Attributes:
        slots: ``--max-loras``.
        running: adapters with a running request.
        waiting: adapters with a waiting request.
    """

    slots: int | None
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Series:
    """What a series' text means.

    Attributes:
        reading: our word for the quantity; empty for kinds that have none.
        rank: 0 is the newest name with the usual prefix; the lowest in a body wins.
        key: whose it is; for ``cache`` the model is empty, and the engine too where no label names it.
        source: stands for the remaining labels, which tell apart processes that report the same reading.
        bound: upper bound of a bucket.
        most: the largest value that makes sense; no value may be infinite.
        version: first release that has the name.
    """

    kind: SeriesKind
    reading: str = ""
    rank: int = 0
    key: EngineKey = NOBODY
    source: bytes = b""
    bound: float = math.inf
    most: float = math.inf
    version: tuple[int, ...] = ()
    cache: CacheConfig | None = None
    lora: LoraState | None = None


IGNORED: Final = Series("ignored")

# Series text (name and labels as printed) -> meaning. Shared by all targets: pods of one model print
# the same texts. Emptied when full, which costs one slow poll and bounds what a hostile server can do.
KNOWN: Final[dict[bytes, Series]] = {}
_KNOWN_LEAST: Final = 20_000
_KNOWN_PER_TARGET: Final = 100  # an engine of vLLM 0.26 prints 64 that matter
_KNOWN_LIMIT = _KNOWN_LEAST
_KNOWN_TEXT_LIMIT: Final = 4096
# Bytes of text for each that may be remembered: 4 MB together. The 64 are of 71 bytes on average.
_KNOWN_BYTES_EACH: Final = 200
_known_bytes = 0
# A line with more labels than this is none of vLLM's, whose longest had 38 in 0.33 and gets more.
_MOST_LABELS: Final = 128
# What tells processes apart is kept by its hash where it is longer than this.
_SOURCE_LIMIT: Final = 64


def expect(targets: int) -> None:
    """Make room for the series of so many targets, were each to print texts of its own."""
    global _KNOWN_LIMIT  # noqa: PLW0603 (as `KNOWN` itself is shared by all)
    _KNOWN_LIMIT = max(_KNOWN_LEAST, _KNOWN_PER_TARGET * targets)


def _by_spelling() -> dict[str, list[tuple[int, names.Name]]]:
    """Spelling with prefix -> its rows (one name may serve several label values) with their ranks."""
    table: dict[str, list[tuple[int, names.Name]]] = {}
    position: dict[str, int] = {}
    for row in names.NAMES:
        for spelling in names.spellings(row):
            rank = position.get(row.reading, 0)
            position[row.reading] = rank + len(names.PREFIXES)
            for offset, prefix in enumerate(names.PREFIXES):
                table.setdefault(prefix + spelling, []).append((rank + offset, row))
    return table


_ROWS: Final = _by_spelling()


def read_line(line: bytes) -> tuple[Series, float] | None:
    """Take one sample line apart, slowly and completely.

    Args:
        line: without its line feed.

    Returns:
        The series' meaning and its value, or None when the line cannot be read.
    """
    match = _NAME.match(line)
    if match is None:
        return None
    end = match.end()
    labels: dict[str, str] = {}
    if match[2]:
        after = _read_labels(line, end, labels)
        if after is None:
            return None
        end = after
    value = _VALUE.match(line, end)
    if value is None or (not match[2] and line[match.end(1) : end] == b""):
        return None
    number = read_number(value[1])
    if number is None or (value[2] and read_number(value[2]) is None):
        return None
    series = _meaning(match[1].decode(), labels)
    # Remembered only where the fast reader's cut, the last blank of the line, is the end of the series.
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
    """A sample's value, or None when it is no number: what Python alone would take is refused."""
    if b"_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _read_labels(line: bytes, start: int, labels: dict[str, str]) -> int | None:
    """Fill `labels` from the block that begins at `start`; returns where it ends.

    None when it is broken, and when it has so many that no server means them.
    """
    at = start
    while True:
        match = _LABEL.match(line, at)
        if match is None:
            break
        name = match[1].decode()
        if name in labels or len(labels) == _MOST_LABELS:
            return None
        raw = match[2]
        if b"\\" in raw:
            raw = _ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], raw)
        labels[name] = raw.decode("utf-8", "replace")
        at = match.end()
    close = _END_OF_LABELS.match(line, at)
    return None if close is None else close.end()


def _meaning(name: str, labels: Mapping[str, str]) -> Series:
    """Look a name up in the table and pick the row whose label fits."""
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
    """One object per engine, so that the fast reader mostly compares keys by identity."""
    return EngineKey(model, engine, replica)


def _series(rank: int, row: names.Name, labels: Mapping[str, str]) -> Series:
    bound = math.inf
    if row.kind == "buckets":
        number = read_number(labels.get("le", "").encode())
        if number is None or not (number <= names.LARGEST or number == math.inf):  # NaN is neither
            return IGNORED
        bound = number
    own = {"model_name", "model", "engine", "ReplicaId", row.label}
    if row.kind == "buckets":
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
        bound=bound,
        most=row.most,
        version=names.version_key(row.since),
    )


def _source(labels: Mapping[str, str], own: AbstractSet[str]) -> bytes:
    """What a line's other labels say, in as few bytes as tell it from what others say."""
    others = sorted((name, value) for name, value in labels.items() if name not in own)
    if not others:
        return b""
    text = repr(others).encode()
    return text if len(text) <= _SOURCE_LIMIT else hashlib.sha256(text).digest()


def _cache_series(labels: Mapping[str, str]) -> Series:
    known = [names.version_key(since) for label, since in names.CACHE_LABEL_SINCE.items() if label in labels]
    return Series(
        kind="cache",
        key=EngineKey("", bounded(labels.get("engine", "")), bounded(labels.get("ReplicaId", ""))),
        version=max(known, default=()),
        cache=CacheConfig(
            block_size=_whole(labels, "block_size"),
            num_gpu_blocks=_whole(labels, "num_gpu_blocks"),
            num_gpu_blocks_override=_whole(labels, "num_gpu_blocks_override"),
            kv_cache_size_tokens=_whole(labels, "kv_cache_size_tokens"),
            kv_cache_max_concurrency=_number(labels, "kv_cache_max_concurrency"),
            kv_cache_memory_bytes=_whole(labels, "kv_cache_memory_bytes"),
            gpu_memory_utilization=_number(labels, "gpu_memory_utilization"),
            cache_dtype=_word(labels, "cache_dtype"),
            enable_prefix_caching={"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")),
            kv_offloading_size=_number(labels, "kv_offloading_size"),
        ),
    )


def _lora_state(labels: Mapping[str, str]) -> LoraState:
    def count(label: str) -> int:
        return sum(1 for name in labels.get(label, "").split(",") if name.strip())

    return LoraState(
        _whole(labels, "max_lora"), count("running_lora_adapters"), count("waiting_lora_adapters")
    )


def _number(labels: Mapping[str, str], label: str) -> float | None:
    """A label that holds a positive number; vLLM writes ``None`` for what it does not know."""
    number = read_number(labels.get(label, "").encode())
    return number if number is not None and 0 < number <= names.LARGEST else None


def _whole(labels: Mapping[str, str], label: str) -> int | None:
    number = _number(labels, label)
    return int(number) if number is not None and number.is_integer() else None


def _word(labels: Mapping[str, str], label: str) -> str | None:
    word = labels.get(label, "None")
    return bounded(word) if word and word != "None" else None


def bounded(text: str) -> str:
    """A label's value as it may become a label of ours: short, and without characters that cannot be seen.

    What is cut off or replaced leaves a hash behind, so that different values stay different.
    """
    if len(text) <= MOST_CHARACTERS and text.isprintable():
        return text
    start = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:MOST_CHARACTERS]
    )
    return f"{start[: MOST_CHARACTERS - 9]}~{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"
