"""Reads a metrics body: bytes in, one `Snapshot` per engine out.

The reader is selective. One regular expression, a trie of the table of names, finds the lines that matter at
C speed. The part before a line's value is looked up among all series seen before, so labels are parsed once
per series and not at every poll. If a page has the same series as the previous one, only the lines that
changed are read. The use of each series is decided once (`exporter.vllm.layout`) and kept until a page has
other series. All of this only saves work: the result depends on the body alone (and, for what several
processes report, on which gauge changed last and since when each counter is there).

It reads the text format (0.0.4, 1.0.0) and OpenMetrics 1.0, in every spelling that `exporter.vllm.names`
lists, with timestamps, exemplars, CRLF and blanks where the formats allow them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, groupby
from operator import ne
from os.path import commonprefix
from typing import Final

from exporter.vllm import names
from exporter.vllm.layout import MAX_ENGINES, EngineLayout, Layout, largest, lay_out
from exporter.vllm.series import KNOWN, CacheConfig, EngineKey, LoraState, Series, read_line

__all__ = [
    "MAX_ENGINES",
    "CacheConfig",
    "EngineKey",
    "Exposition",
    "ExpositionError",
    "LoraState",
    "Reader",
    "Snapshot",
]


class ExpositionError(ValueError):
    """The body is not a metrics text; the message says what it looks like."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One engine's part of a body."""

    key: EngineKey  # the engine
    # Reading -> value; only those that the body has, and that are within their range.
    values: Mapping[str, float]
    # Reading -> reason, for values that cannot be true.
    untrusted: Mapping[str, str] = field(default_factory=dict)
    # Reading -> {upper bound: cumulative count}, for histograms of lengths in tokens.
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    # Readings that several processes report; `values` has the one of a single process.
    duplicates: frozenset[str] = frozenset()
    cache: CacheConfig | None = None  # the configuration of the KV cache, if the body has it
    version: tuple[int, ...] = ()  # the oldest release of vLLM that prints all these names


@dataclass(frozen=True, slots=True)
class Exposition:
    """The content of one body."""

    engines: Mapping[EngineKey, Snapshot]  # by key; empty if the body has no series of an engine
    start_time: float | None = None  # start of the server process in unix seconds; None if unknown
    lora: LoraState | None = None  # the adapters in use, if the server has any
    truncated: bool = False  # the last line had no end and was left out
    unreadable: int = 0  # number of lines of known names that could not be read
    dropped: int = 0  # number of lines of known names left out: too long, too many, or of too many engines


def _trie(words: list[str]) -> str:
    """Return a regular expression for exactly these words that looks at each letter once.

    Python's own alternation tries one word after the other, which takes twice as long for our table.
    """
    common = commonprefix(words)  # noqa: RUF071 - letter by letter is meant
    rest = sorted({word[len(common) :] for word in words}, reverse=True)  # an empty word comes last
    if rest == [""]:
        return re.escape(common)
    branches = (_trie(list(same)) for _, same in groupby(rest, key=lambda word: word[:1]))
    return f"{re.escape(common)}(?:{'|'.join(branches)})"


_SPELLINGS: Final = [spelling for row in names.NAMES for spelling in names.spellings(row)]
_NAMES: Final = (*_SPELLINGS, names.CACHE_CONFIG, names.LORA_INFO)
_WORDS: Final = [*(prefix + name for prefix in names.PREFIXES for name in _NAMES), names.START_TIME]
_FIRST_LINE: Final = re.compile(rf"[ \t]*+({_trie(_WORDS)}[ \t{{].*+)".encode())
_OTHER_LINES: Final = re.compile(rb"\n" + _FIRST_LINE.pattern)
_UNDERSCORE: Final = ord("_")
# The lines of a larger body are not remembered: a hostile server must not fill the memory twice.
_REMEMBERED_BYTES: Final = 1 << 20
# The most lines of known names that are read of one body, and the most bytes of them: sixteen engines print
# 1,024 lines of 90 kB. More would delay the polls of other servers, for lines that no vLLM prints.
_MOST_LINES: Final = 20_000
_MOST_BYTES: Final = 2 << 20
# A body up to this size cannot have more lines, however short their names. A longer line is left out too:
# parsing it needs many times its size.
_FEW_BYTES: Final = _MOST_LINES * (min(map(len, _WORDS)) + len("\n "))
_NOT_METRICS: Final = re.compile(rb'\s*+(?:<|\[|\{\s*+(?:\}|"[^"\n]*+"\s*+:))')


class Reader:
    """Reads the bodies of one target, in the order of the polls."""

    __slots__ = ("_carried", "_choices", "_layout", "_page")

    def __init__(self) -> None:
        self._carried: dict[_Place, _Carried] = {}
        self._page = _Page()
        self._layout = Layout()
        self._choices: dict[_Place, _Choice] = {}

    def read(self, body: bytes) -> Exposition:
        """Read one body, in time linear in its length.

        Raises:
            ExpositionError: the body is a web page or JSON, or binary data without an engine.
        """
        if _NOT_METRICS.match(body):
            raise ExpositionError("expected a metrics text, got a web page or JSON")
        end = body.rfind(b"\n") + 1
        truncated = end < len(body) and not body.startswith(b"#", end)
        lines, beyond = _lines(body, end)
        if not self._page.renew(lines):
            self._turn(_Page.of(lines, remember=end <= _REMEMBERED_BYTES))
        layout, numbers = self._layout, self._page.numbers
        # One check of all numbers saves most pages a check of each; a sum with NaN is not below anything.
        sane = bool(numbers) and min(numbers) >= 0 and sum(numbers) <= names.LARGEST
        engines = {engine.key: self._snapshot(engine, numbers, sane=sane) for engine in layout.engines}
        if not engines and b"\0" in body:
            raise ExpositionError("expected a metrics text, got binary data")
        start_time = math.nan if layout.start_time is None else numbers[layout.start_time]
        lora = {(numbers[at], at): state for at, state in layout.lora if not math.isnan(numbers[at])}
        return Exposition(
            engines,
            start_time if 0 < start_time < math.inf else None,
            lora[max(lora)] if lora else None,  # the newest; of equal ones the last
            truncated,
            self._page.unreadable,
            layout.dropped + beyond,
        )

    def _turn(self, page: "_Page") -> None:
        """Continue with another page; if it has other series, decide on its layout."""
        if page.series != self._page.series:
            layout = lay_out(page.series)
            self._carry(_counters(self._layout, self._page), _counters(layout, page))
            self._layout = layout
            places = {(engine.key, reading) for engine in layout.engines for reading in engine.duplicates}
            self._choices = {place: self._choices[place] for place in places & self._choices.keys()}
        self._page = page

    def _carry(self, before: "_Counters", now: "_Counters") -> None:
        """Keep the increase of each counter right when its sources change."""
        if len(self._carried) > MAX_ENGINES:  # of a hostile server; a cut page loses some readings for a poll
            self._carried = {place: carried for place, carried in self._carried.items() if place in now}
        for place in before.keys() & now.keys():
            if before[place].keys() != now[place].keys():
                carried = self._carried.pop(place, _Carried())
                if carried.change(before[place], now[place]):
                    self._carried[place] = carried

    def _snapshot(self, layout: EngineLayout, numbers: Sequence[float], *, sane: bool) -> Snapshot:
        values = {reading: numbers[position] for reading, position in layout.single}
        for reading, fold, positions in layout.folded:
            values[reading] = fold([numbers[position] for position in positions])
        for reading, sources in layout.gauges:
            choice = self._choices.setdefault((layout.key, reading), _Choice())
            values[reading] = choice.value({source: numbers[at] for source, at in sources.items()})
        for (key, reading), carried in self._carried.items():
            if key == layout.key and reading in values:
                values[reading] = carried.value(values[reading])
        buckets = {reading: _counts(places, numbers) for reading, places in layout.buckets}
        untrusted = {}
        for reading in layout.limits if sane else list(values):
            most = layout.limits.get(reading, names.LARGEST)
            if not 0.0 <= values[reading] <= most:  # NaN fails this too
                wanted = "a finite number from 0" if most == names.LARGEST else f"0 to {most:g}"
                untrusted[reading] = f"{reading} is {values.pop(reading)}, expected {wanted}"
        for reading in () if sane else list(buckets):
            if not all(0 <= count <= names.LARGEST for count in buckets[reading].values()):
                untrusted[reading] = f"{reading} has a bucket that is negative or too large"
                del buckets[reading]
        return Snapshot(
            layout.key, values, untrusted, buckets, layout.duplicates, layout.cache, layout.version
        )


def _lines(body: bytes, end: int) -> tuple[list[bytes], int]:
    """Return the lines that begin with a known name, without leading blanks; and the number left out."""
    first = _FIRST_LINE.match(body, 0, end)
    if end <= _FEW_BYTES:
        others = _OTHER_LINES.findall(body, 0, end)
        return [first[1], *others] if first else others, 0
    lines: list[bytes] = []
    left, beyond = _MOST_BYTES, 0
    for match in chain([first] if first else [], _OTHER_LINES.finditer(body, 0, end)):
        size = match.end(1) - match.start(1)
        if size <= min(left, _FEW_BYTES) and len(lines) < _MOST_LINES:
            left -= size
            lines.append(match[1])
        else:
            beyond += 1
    return lines, beyond


@dataclass(slots=True)
class _Page:
    """The samples of one body. Most bodies have the same series in the same order as the previous one."""

    series: list[Series] = field(default_factory=list)  # the meaning of each sample
    numbers: list[float] = field(default_factory=list)  # their values
    unreadable: int = 0  # number of lines of known names that could not be read and have no sample
    # Of the samples, unchanged; empty if the next body must be read without them.
    lines: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)  # the part of each line before its value

    @classmethod
    def of(cls, lines: list[bytes], *, remember: bool) -> "_Page":
        """Read the lines of a body whose series are unknown."""
        page, known = cls(), KNOWN
        for line in lines:
            text, blank, number = line.rpartition(b" ")
            try:
                series, value = known[text], float(number)
            except (KeyError, ValueError):
                number = b"_"
            if _UNDERSCORE in number:  # float() would take 1_0
                sample = read_line(line)
                if sample is None:
                    page.unreadable += 1
                    continue
                series, value = sample
            page.series.append(series)
            page.numbers.append(value)
            if remember:
                # A series that is not known by this text has its value elsewhere: only an equal line matches.
                page.heads.append(text + blank if known.get(text) is series else line + b"\n")
        if remember and not page.unreadable:
            page.lines = lines
        else:
            page.heads.clear()
        return page

    def renew(self, lines: list[bytes]) -> bool:
        """Replace the values by the next body's; False, with nothing changed, if it has other series.

        This is the hot loop: it runs for each changed one of the 64 lines of vLLM 0.26.
        """
        if not lines or len(lines) != len(self.lines):
            return False
        numbers = self.numbers.copy()
        for at in compress(range(len(lines)), map(ne, lines, self.lines)):
            number = lines[at].removeprefix(self.heads[at])  # the whole line if it has another series
            if _UNDERSCORE in number:  # float() would take 1_0
                return False
            try:
                numbers[at] = float(number)
            except ValueError:
                return False
        self.lines, self.numbers = lines, numbers
        return True


def _counts(places: Sequence[tuple[float, int]], numbers: Sequence[float]) -> dict[float, float]:
    """Return a histogram's buckets by upper bound."""
    counts = {bound: numbers[position] for bound, position in places}
    if len(counts) < len(places):  # several processes have counts of their own
        counts = dict.fromkeys(counts, 0.0)
        for bound, position in places:
            counts[bound] += numbers[position]
    return counts


_Place = tuple[EngineKey, str]
# Of each counter: source -> (process, value).
_Counters = Mapping[_Place, Mapping[bytes, tuple[bytes, float]]]


def _counters(layout: Layout, page: _Page) -> _Counters:
    counters: dict[_Place, dict[bytes, tuple[bytes, float]]] = {}
    for engine in layout.engines:
        single = [(reading, [position]) for reading, position in engine.single]
        for reading, positions in chain(single, ((reading, places) for reading, _, places in engine.folded)):
            found = [(page.series[position], page.numbers[position]) for position in positions]
            if found[0][0].kind == "counter":
                counters[engine.key, reading] = {one.source: (one.process, value) for one, value in found}
    return counters


@dataclass(slots=True)
class _Carried:
    """What the sum of a counter's sources needs so that it changes only by what they counted while seen.

    A source that vanishes stays in the sum, and another process begins with nothing. A new value of a label
    of vLLM's, such as a finish reason, is new work.
    """

    added: float = 0.0  # to the sum of the present sources
    total: float = 0.0  # the last sum of the present sources
    left: dict[bytes, float] = field(default_factory=dict)  # last values of those that vanished

    def change(
        self, before: Mapping[bytes, tuple[bytes, float]], now: Mapping[bytes, tuple[bytes, float]]
    ) -> bool:
        """Take other sources; False if nothing is carried, as when the others fell: the server restarted."""
        common = before.keys() & now.keys()
        if not common or sum(now[one][1] for one in common) < sum(before[one][1] for one in common):
            return False
        for source in before.keys() - now.keys():
            self.left[source] = before[source][1]
            self.added += before[source][1]
        processes = {process for process, _ in before.values()}
        for source in now.keys() - before.keys():
            process, value = now[source]
            if source in self.left:
                self.added -= self.left.pop(source)
            elif process not in processes:
                self.added -= value
        self.total = sum(value for _, value in now.values())
        return len(self.left) <= MAX_ENGINES and math.isfinite(self.added)

    def value(self, total: float) -> float:
        """Return the counter's value for the sum of the present sources, which falls at a restart."""
        restarted = total < self.total and (self.added > 0 or total + self.added < 0)
        if restarted or total + self.added > names.LARGEST:
            self.added = 0.0
            self.left.clear()
        self.total = total
        return max(0.0, total + self.added)


@dataclass(slots=True)
class _Choice:
    """Chooses among several processes that report one gauge: the one that changed last.

    While none has changed, it is the one with the largest value.
    """

    sources: Mapping[bytes, float] = field(default_factory=dict)
    chosen: bytes | None = None

    def value(self, sources: Mapping[bytes, float]) -> float:
        known = {name: value for name, value in sources.items() if not math.isnan(value)} or sources
        changed = [name for name, value in known.items() if self.sources.get(name, value) != value]
        if changed:
            self.chosen = max(changed, key=known.__getitem__)
        elif self.chosen not in known:
            self.chosen = None
        self.sources = known
        return largest(known.values()) if self.chosen is None else known[self.chosen]
