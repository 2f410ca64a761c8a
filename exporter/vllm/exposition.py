"""Read a metrics body: bytes in, one `Snapshot` per engine out.

A selective reader. One regular expression, a trie made from the table of names, finds the lines that
matter at C speed; all other lines cost no more than finding their end. Of a line that matters the
part before the value is looked up in a memory of series seen before, so labels are taken apart once
in the life of a series and not at every poll; a page that has the series of the one before it is not
looked up at all, and of its lines only those that changed are read; and what the series of a page are
for is worked out once (`exporter.vllm.layout`) and kept until a page has other series. All of this only
saves work: the result depends on nothing but the body (and, for gauges that several processes report,
on which of them changed last).

Understood are the text format (0.0.4, 1.0.0) and OpenMetrics 1.0, in every spelling that
`exporter.vllm.names` lists, with timestamps, exemplars, CRLF and blanks where the formats allow them.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import ne
from typing import Any, Final

from exporter.vllm import names
from exporter.vllm.layout import EngineLayout, Layout, largest, lay_out
from exporter.vllm.series import KNOWN, CacheConfig, EngineKey, LoraState, Series, read_line

__all__ = ["CacheConfig", "EngineKey", "Exposition", "ExpositionError", "LoraState", "Reader", "Snapshot"]


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
        dropped: lines of known names left out: too long, too many of them, or of too many engines.
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
        node[""] = {}  # the word ends here; tried last

    def expression(node: dict[str, Any]) -> str:
        branches = [re.escape(letter) + expression(node[letter]) for letter in sorted(node, reverse=True)]
        if not branches:
            return ""
        return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

    return expression(tree)


def _line_pattern() -> str:
    bare = [spelling for row in names.NAMES for spelling in names.spellings(row)]
    bare += [names.CACHE_CONFIG, names.LORA_INFO]
    words = _trie([*(prefix + name for prefix in names.PREFIXES for name in bare), names.START_TIME])
    return rf"[ \t]*+({words}[ \t{{].*+)"


_FIRST_LINE: Final = re.compile(_line_pattern().encode())
_OTHER_LINES: Final = re.compile(rb"\n" + _FIRST_LINE.pattern)
_UNDERSCORE: Final = ord("_")
# Of a larger body the lines are not remembered: a hostile server must not have them kept twice.
_REMEMBERED_BYTES: Final = 1 << 20
# So many lines of known names are read of one body, and so many bytes of them: sixteen engines print 1,024
# lines of 90 kB. What is beyond costs others their polls, and says nothing that a server would say.
_MOST_LINES: Final = 20_000
_MOST_BYTES: Final = 2 << 20
# A body up to this size cannot have more lines, however short their names. A longer line is left out too: to
# take it apart needs many times its size.
_SHORTEST_LINE: Final = (
    min(map(len, names.PREFIXES))
    + min(len(spelling) for row in names.NAMES for spelling in names.spellings(row))
    + len("\n ")
)
_FEW_BYTES: Final = _MOST_LINES * _SHORTEST_LINE
_NOT_METRICS: Final = re.compile(rb'\s*+(?:<|\[|\{\s*+(?:\}|"[^"\n]*+"\s*+:))')


class Reader:
    """Reads the bodies of one target, in the order in which they came."""

    __slots__ = ("_choices", "_layout", "_page")

    def __init__(self) -> None:
        self._page = _Page()
        self._layout = Layout()
        self._choices: dict[tuple[EngineKey, str], _Choice] = {}

    def read(self, body: bytes) -> Exposition:
        """Read one body, in time linear in its length.

        Raises:
            ExpositionError: the body is a web page or JSON, or binary data in which no engine is found.
        """
        if _NOT_METRICS.match(body):
            raise ExpositionError("expected a metrics text, got a web page or JSON")
        end, truncated = _end_of_lines(body)
        lines, beyond = _lines(body, end)
        if not self._page.renew(lines):
            self._turn(_Page.of(lines, remember=end <= _REMEMBERED_BYTES))
        layout, numbers = self._layout, self._page.numbers
        # One look at all numbers spares most pages a look at each; a sum with NaN is not below anything.
        sane = bool(numbers) and min(numbers) >= 0 and sum(numbers) <= names.LARGEST
        engines = {engine.key: self._snapshot(engine, numbers, sane=sane) for engine in layout.engines}
        if not engines and b"\0" in body:
            raise ExpositionError("expected a metrics text, got binary data")
        return Exposition(
            engines,
            _start_time(layout, numbers),
            _newest_state(layout, numbers),
            truncated,
            self._page.unreadable,
            layout.dropped + beyond,
        )

    def _turn(self, page: "_Page") -> None:
        """Go on with another page, whose layout is worked out where it has other series."""
        if page.series != self._page.series:
            self._layout = lay_out(page.series)
            places = {
                (engine.key, reading) for engine in self._layout.engines for reading in engine.duplicates
            }
            self._choices = {place: self._choices[place] for place in places & self._choices.keys()}
        self._page = page

    def _snapshot(self, layout: EngineLayout, numbers: Sequence[float], *, sane: bool) -> Snapshot:
        values = {reading: numbers[position] for reading, position in layout.single}
        for reading, fold, positions in layout.folded:
            values[reading] = fold([numbers[position] for position in positions])
        for reading, sources in layout.gauges:
            choice = self._choices.setdefault((layout.key, reading), _Choice())
            values[reading] = choice.value(
                {source: numbers[position] for source, position in sources.items()}
            )
        buckets = {reading: _counts(places, numbers) for reading, places in layout.buckets}
        untrusted = {}
        for reading in layout.limits if sane else list(values):
            most = layout.limits.get(reading, names.LARGEST)
            if not 0.0 <= values[reading] <= most:  # NaN fails this too
                untrusted[reading] = _reason(reading, values.pop(reading), most)
        if not sane:
            for reading in [
                reading for reading, counts in buckets.items() if not _are_counts(counts.values())
            ]:
                untrusted[reading] = f"{reading} has a bucket that is negative or beyond all bounds"
                del buckets[reading]
        return Snapshot(
            layout.key, values, untrusted, buckets, layout.duplicates, layout.cache, layout.version
        )


def _lines(body: bytes, end: int) -> tuple[list[bytes], int]:
    """The lines that begin with a known name, without the blanks before it; and how many are left out."""
    first = _FIRST_LINE.match(body, 0, end)
    if end > _FEW_BYTES:
        others = _OTHER_LINES.finditer(body, 0, end)
        return _bounded(others if first is None else chain([first], others))
    lines = _OTHER_LINES.findall(body, 0, end)
    if first:
        lines.insert(0, first[1])
    return lines, 0


def _bounded(matches: Iterable[re.Match[bytes]]) -> tuple[list[bytes], int]:
    """As many lines as a server may have. One that is too long does not cost those behind it."""
    lines: list[bytes] = []
    left, beyond = _MOST_BYTES, 0
    for match in matches:
        size = match.end(1) - match.start(1)
        if size <= min(left, _FEW_BYTES) and len(lines) < _MOST_LINES:
            left -= size
            lines.append(match[1])
        else:
            beyond += 1
    return lines, beyond


@dataclass(slots=True)
class _Page:
    """The samples of one body, and what spares work on the next: most have the same series in the same order.

    Attributes:
        series: what each sample means.
        numbers: their values.
        unreadable: lines of known names that could not be read and have no sample.
        lines: of the samples, as they were; none where the next body has to be read without them.
        heads: of each line what stands before its value.
    """

    series: list[Series] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    unreadable: int = 0
    lines: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, lines: list[bytes], *, remember: bool) -> "_Page":
        """Read a body without knowing what to expect."""
        page = cls()
        known = KNOWN
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
                # What is not known by its text has its value elsewhere: then only the same line is the same.
                page.heads.append(text + blank if known.get(text) is series else line + b"\n")
        if remember and not page.unreadable:
            page.lines = lines
        else:
            page.heads.clear()
        return page

    def renew(self, lines: list[bytes]) -> bool:
        """Take the next body's values; False, with nothing changed, where it has other series than this one.

        The hot loop: everything in it is paid 64 times for a body of vLLM 0.26.
        """
        if not lines or len(lines) != len(self.lines):
            return False
        numbers = self.numbers.copy()
        for at in compress(range(len(lines)), map(ne, lines, self.lines)):
            number = lines[at].removeprefix(self.heads[at])  # the whole line where it has another series
            if _UNDERSCORE in number:  # float() would take 1_0
                return False
            try:
                numbers[at] = float(number)
            except ValueError:
                return False
        self.lines, self.numbers = lines, numbers
        return True


def _counts(places: Sequence[tuple[float, int]], numbers: Sequence[float]) -> dict[float, float]:
    """A histogram's buckets by upper bound."""
    counts = {bound: numbers[position] for bound, position in places}
    if len(counts) < len(places):  # several processes count, each for itself
        counts = dict.fromkeys(counts, 0.0)
        for bound, position in places:
            counts[bound] += numbers[position]
    return counts


def _are_counts(numbers: Iterable[float]) -> bool:
    return all(0 <= number <= names.LARGEST for number in numbers)


def _start_time(layout: Layout, numbers: Sequence[float]) -> float | None:
    if layout.start_time is None:
        return None
    value = numbers[layout.start_time]
    return value if 0 < value < math.inf else None


def _newest_state(layout: Layout, numbers: Sequence[float]) -> LoraState | None:
    newest, state = -math.inf, None
    for position, candidate in layout.lora:
        if numbers[position] >= newest:
            newest, state = numbers[position], candidate
    return state


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
        return largest(told.values()) if self.chosen is None else told[self.chosen]


def _end_of_lines(body: bytes) -> tuple[int, bool]:
    """Where the last whole line ends, and whether a line after it was cut off and is left out."""
    if not body or body.endswith(b"\n"):
        return len(body), False
    end = body.rfind(b"\n") + 1
    return end, not body.startswith(b"#", end)


def _reason(reading: str, value: float, most: float) -> str:
    wanted = "a finite number from 0" if most == names.LARGEST else f"0 to {most:g}"
    return f"{reading} is {value}, expected {wanted}"
