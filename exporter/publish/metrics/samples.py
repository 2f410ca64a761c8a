"""Samples of exported metrics, and their text.

The text is byte for byte what prometheus-client would write, and made many times faster.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias

from prometheus_client.utils import floatToGoString

__all__ = ["PREFIX", "Labels", "MetricRow", "RowCollector", "Samples", "histogram"]

PREFIX: Final = "vllm_pressure_"

# Operators filter by this name, which is older than this module.
log = logging.getLogger("exporter.publish.metrics.table")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One exported metric."""

    name: str  # without the prefix; a counter's without ``_total``, an info's without ``_info``
    type: Literal["gauge", "counter", "histogram", "info"]
    labels: tuple[str, ...]  # in the order of the output
    help: str  # what it is, with its window and source
    signal: str = ""  # the signal with its value, empty if a function of its collector makes it

    @property
    def series(self) -> str:
        """The name in queries; for a histogram the prefix of its series."""
        ending = {"counter": "_total", "info": "_info"}.get(self.type, "")
        return f"{PREFIX}{self.name}{ending}"


class Labels:
    """Labels that several samples share, and their text."""

    __slots__ = ("_around", "pairs", "text")

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self.pairs = tuple(sorted(pairs))  # by name
        inside = ",".join(_texts(self.pairs))
        self.text = f"{{{inside}}}" if inside else ""  # after a sample's name; empty without labels
        self._around: dict[str, tuple[str, str]] = {}

    def also(self, **more: str) -> "Labels":
        """Return these labels and more, which override those of the same name."""
        return Labels((dict(self.pairs) | more).items())

    def around(self, name: str) -> tuple[str, str]:
        """Return the text before and after the value of another label, in its place among the others."""
        around = self._around.get(name)
        if around is None:
            before = [*_texts(pair for pair in self.pairs if pair[0] < name), f'{name}="']
            after = ['"', *_texts(pair for pair in self.pairs if pair[0] > name)]
            around = self._around[name] = ("{" + ",".join(before), ",".join(after) + "}")
        return around


def _texts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (f'{name}="{_escaped(value)}"' for name, value in pairs)


@functools.lru_cache(maxsize=4096)
def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


# Ending of the name, labels, name and value of one more label (empty where there is none), value.
Samples: TypeAlias = list[tuple[str, Labels, str, str, float]]


def histogram(labels: Labels, bounds: Sequence[str], counts: Iterable[int], total: float) -> Samples:
    """Return the samples of a histogram.

    Args:
        labels: of every sample.
        bounds: upper bounds as printed, ``+Inf`` last.
        counts: observations by bucket, each counted once.
        total: the sum of all observed values.
    """
    sums = zip(bounds, itertools.accumulate(counts), strict=True)
    found: Samples = [("_bucket", labels, "le", bound, float(count)) for bound, count in sums]
    return [*found, ("_count", labels, "", "", found[-1][-1]), ("_sum", labels, "", "", total)]


_PLAIN: Final = 1e6  # smaller numbers have no exponent in Go either


def _number(value: float) -> str:
    if -_PLAIN < value < _PLAIN:
        return repr(float(value))
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


class RowCollector:
    """Makes the samples of a table of metrics; an error costs that metric only."""

    rows: ClassVar[tuple[MetricRow, ...]]
    # The samples of each metric from the collector; None leaves out its help too.
    makers: ClassVar[Mapping[str, Callable[[Any], Samples | None]]] = {}

    def __init__(self, on_failure: Callable[[str], None] = lambda _name: None) -> None:
        """Begin; `on_failure` is called with the name of a metric that could not be built."""
        self._on_failure = on_failure
        self._failing: set[str] = set()

    def begin(self) -> bool:
        """Prepare one scrape; False if there is nothing to show."""
        return True

    def samples(self, row: MetricRow) -> Samples | None:
        """Return the samples of one metric now, None to leave out its help too."""
        make = self.makers.get(row.name)
        return make(self) if make else None

    def texts(self) -> list[str | None]:
        """Return the lines of all samples per row of the table, without help and type."""
        if not self.begin():
            return [None] * len(self.rows)
        return [self._safely(row) for row in self.rows]

    def _safely(self, row: MetricRow) -> str | None:
        try:
            samples = self.samples(row)
            lines = None if samples is None else _lines(row, samples)
        except Exception:
            self._on_failure(row.name)
            if row.name not in self._failing:
                self._failing.add(row.name)
                log.exception("cannot build a metric name=%s", row.name)
            return None
        self._failing.discard(row.name)
        return lines


def _lines(row: MetricRow, samples: Samples) -> str:
    whole = PREFIX + row.name
    lines = []
    for ending, labels, name, value, number in samples:
        if name:
            before, after = labels.around(name)
            lines.append(f"{whole}{ending}{before}{_escaped(value)}{after} {_number(number)}\n")
        else:
            lines.append(f"{whole}{ending}{labels.text} {_number(number)}\n")
    return "".join(lines)
