"""Read a metrics body: bytes in, one `Snapshot` per engine out.

A selective reader. One regular expression, a trie made from the table of names, finds the lines that
matter at C speed; all other lines cost no more than finding their end. Of a line that matters the
part before the value is looked up in a memory of series seen before, so labels are taken apart once
in the life of a series and not at every poll. The memory only remembers what a series' text means;
the result depends on nothing but the body (and, for gauges that several processes report, on which
of them changed last).

Understood are the text format (0.0.4, 1.0.0) and OpenMetrics 1.0, in every spelling that
`exporter.vllm.names` lists, with timestamps, exemplars, CRLF and blanks where the formats allow them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from exporter.vllm import names
from exporter.vllm.series import KNOWN, CacheConfig, EngineKey, LoraState, Series, read_line

__all__ = ["CacheConfig", "EngineKey", "Exposition", "ExpositionError", "LoraState", "Reader", "Snapshot"]

# A body may name at most this many engines; a server has some dozens, a hostile one any number.
MAX_ENGINES: Final = 256


class ExpositionError(ValueError):
    """The body is no metrics text at all; the message says what it looks like."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one body says of one engine.

    Attributes:
        key: whose it is.
        values: reading -> value, only what is there and within its range.
        untrusted: reading -> reason, for values that are there and cannot be true.
        buckets: reading -> {upper bound: cumulative count}, for histograms of lengths in tokens.
        duplicates: readings that several processes report; `values` holds one of theirs.
        cache: the configuration of the KV cache, if the body tells it.
        version: the oldest release of vLLM that prints all these names.
    """

    key: EngineKey
    values: Mapping[str, float]
    untrusted: Mapping[str, str] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    duplicates: frozenset[str] = frozenset()
    cache: CacheConfig | None = None
    version: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Exposition:
    """What one body says.

    Attributes:
        engines: by key; empty when the body has no series of an engine.
        start_time: when the server process began, unix seconds; None where it is not told.
        lora: the adapters in use, where the server has any.
        truncated: the last line had no end and was left out.
        unreadable: lines of known names that could not be read.
        dropped: samples left out because the body names too many engines.
    """

    engines: Mapping[EngineKey, Snapshot]
    start_time: float | None = None
    lora: LoraState | None = None
    truncated: bool = False
    unreadable: int = 0
    dropped: int = 0


def _trie(words: Iterable[str]) -> str:
    """A regular expression for exactly these words that looks at each letter once.

    Python's own alternation tries one word after the other, at twice the cost for our table.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        branches = [re.escape(letter) + expression(node[letter]) for letter in sorted(node) if letter]
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
        return f"(?:{joined})?" if "" in node else joined

    return expression(tree)


def _line_pattern() -> re.Pattern[bytes]:
    words = {spelling for row in names.NAMES for spelling in names.spellings(row)}
    table = _trie(names.PREFIXES) + _trie(words | {names.CACHE_CONFIG, names.LORA_INFO})
    return re.compile(rf"\n[ \t]*+((?:{table}|{names.START_TIME})(?=[ \t{{]).*+)".encode())


_LINES: Final = _line_pattern()
_UNDERSCORE: Final = ord("_")
_NOT_METRICS: Final = re.compile(rb'\s*+(?:<|\[|\{\s*+(?:\}|"[^"\n]*+"\s*+:))')


@dataclass(slots=True)
class _Draft:
    """A snapshot in the making; `first` says which series a reading's value came from first."""

    values: dict[str, float] = field(default_factory=dict)
    first: dict[str, Series] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    sources: dict[str, dict[bytes, float]] = field(default_factory=dict)

    def add_bucket(self, series: Series, value: float) -> None:
        """Take one bucket: of the newest name, added to what other processes say of the same bound."""
        reading, rank = series.reading, series.rank
        first = self.first.get(reading)
        if first is None or rank < first.rank:
            self.first[reading] = series
            self.buckets[reading] = {series.bound: value}
        elif rank == first.rank:
            counts = self.buckets[reading]
            counts[series.bound] = counts.get(series.bound, 0.0) + value

    def combine(self, series: Series, value: float) -> None:
        """Take another sample of a reading: the newest name wins, counters add up, gauges await a choice."""
        reading = series.reading
        first = self.first[reading]
        if series.rank > first.rank:
            return
        if series.rank < first.rank:
            self.first[reading] = series
            self.values[reading] = value
            self.sources.pop(reading, None)
        elif series.kind == "counter":
            self.values[reading] += value
        elif series.kind == "created":
            self.values[reading] = _largest((self.values[reading], value))
        else:
            sources = self.sources.setdefault(reading, {first.source: self.values[reading]})
            sources[series.source] = value


class Reader:
    """Reads the bodies of one target, in the order in which they came."""

    __slots__ = ("_choices",)

    def __init__(self) -> None:
        self._choices: dict[tuple[EngineKey, str], _Choice] = {}

    def read(self, body: bytes) -> Exposition:
        """Read one body, in time linear in its length.

        Raises:
            ExpositionError: the body is a page, JSON or binary data.
        """
        if _NOT_METRICS.match(body) or b"\0" in body:
            raise ExpositionError("expected a metrics text, got a page, JSON or binary data")
        text, truncated = _whole_lines(body)
        page = _Page()
        self._fill(page, text)
        engines = {
            key: self._snapshot(key, draft, page.cache_of(key))
            for key, draft in page.drafts.items()
            if not names.CORE.isdisjoint(draft.first)
        }
        if self._choices:
            self._choices = {place: choice for place, choice in self._choices.items() if place[0] in engines}
        return Exposition(engines, page.start_time, page.lora, truncated, page.unreadable, page.dropped)

    @staticmethod
    def _fill(page: "_Page", text: bytes) -> None:
        """The hot loop: every call and every look-up in it is paid 64 times for a body of vLLM 0.26."""
        known = KNOWN
        key, draft = None, _Draft()
        for line in _LINES.findall(text):
            series_text, _, number = line.rpartition(b" ")
            try:
                series, value = known[series_text], float(number)
            except (KeyError, ValueError):
                number = b"_"
            if _UNDERSCORE in number:  # float() would take 1_0
                sample = read_line(line)
                if sample is None:
                    page.unreadable += 1
                    continue
                series, value = sample
            if series.key is not key:  # rare: most lines speak of the same engine as the line before
                if not series.reading:
                    page.note(series, value)
                    continue
                found = page.draft_of(series.key)
                if found is None:
                    continue
                key, draft, first, values = series.key, found, found.first, found.values
            reading = series.reading
            if series.kind == "buckets":
                draft.add_bucket(series, value)
            elif reading not in first:
                first[reading] = series
                values[reading] = value
            else:
                draft.combine(series, value)

    def _snapshot(self, key: EngineKey, draft: _Draft, cache: Series | None) -> Snapshot:
        values, first, buckets = draft.values, draft.first, draft.buckets
        for reading, sources in draft.sources.items():
            choice = self._choices.setdefault((key, reading), _Choice())
            values[reading] = choice.value(sources)
        untrusted = {
            reading: _reason(reading, value, first[reading].most)
            for reading, value in values.items()
            if not 0.0 <= value <= first[reading].most  # NaN fails this too
        }
        for reading in untrusted:
            del values[reading]
        for reading in [reading for reading, counts in buckets.items() if not _are_counts(counts)]:
            untrusted[reading] = f"{reading} has a bucket that is negative or not finite"
            del buckets[reading]
        version = max([series.version for series in first.values()])
        config = None
        if cache:
            version = max(version, cache.version)
            config = cache.cache
        return Snapshot(key, values, untrusted, buckets, frozenset(draft.sources), config, version)


@dataclass(slots=True)
class _Page:
    """What was read of a body so far."""

    drafts: dict[EngineKey, _Draft] = field(default_factory=dict)
    caches: dict[tuple[str, str], Series] = field(default_factory=dict)
    start_time: float | None = None
    lora: LoraState | None = None
    lora_changed: float = -math.inf
    unreadable: int = 0
    dropped: int = 0

    def draft_of(self, key: EngineKey) -> _Draft | None:
        """The engine's draft, a new one where there was none; None when there are too many engines."""
        draft = self.drafts.get(key)
        if draft is None:
            if len(self.drafts) >= MAX_ENGINES:
                self.dropped += 1
                return None
            draft = self.drafts[key] = _Draft()
        return draft

    def note(self, series: Series, value: float) -> None:
        """Take a sample that is no engine's reading."""
        if series.kind == "cache":
            self.caches[series.key.replica, series.key.engine] = series
        elif series.kind == "start_time":
            self.start_time = value if 0 < value < math.inf else None
        elif series.kind == "lora" and value >= self.lora_changed:
            # Old label sets stay on the page; the value is the time of the last change.
            self.lora, self.lora_changed = series.lora, value

    def cache_of(self, key: EngineKey) -> Series | None:
        """The cache's configuration has no model name, and in old versions no engine."""
        caches = self.caches
        return caches.get((key.replica, key.engine)) or caches.get((key.replica, ""))


@dataclass(slots=True)
class _Choice:
    """Which of several processes that report one gauge is believed: the one that changed last.

    While none has changed it is the one with the largest value.
    """

    sources: Mapping[bytes, float] = field(default_factory=dict)
    chosen: bytes | None = None

    def value(self, sources: Mapping[bytes, float]) -> float:
        told = {name: value for name, value in sources.items() if not math.isnan(value)} or sources
        changed = [name for name, value in told.items() if self.sources.get(name, value) != value]
        if changed:
            self.chosen = max(changed, key=told.__getitem__)
        elif self.chosen not in told:
            self.chosen = None
        self.sources = told
        return _largest(told.values()) if self.chosen is None else told[self.chosen]


def _largest(values: Iterable[float]) -> float:
    """The largest number; NaN only where there is nothing else."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _are_counts(buckets: Mapping[float, float]) -> bool:
    counts = buckets.values()
    return min(counts) >= 0 and math.isfinite(sum(counts))


def _whole_lines(body: bytes) -> tuple[bytes, bool]:
    """The body with a line feed before every line, and whether its last line was cut off and left out."""
    if not body or body.endswith(b"\n"):
        return b"\n" + body, False
    end = body.rfind(b"\n") + 1
    return b"\n" + body[:end], not body[end:].startswith(b"#")


def _reason(reading: str, value: float, most: float) -> str:
    wanted = f"0 to {most:g}" if most <= 1 else "a finite number from 0"
    return f"{reading} is {value:g}, expected {wanted}"
