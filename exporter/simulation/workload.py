"""The requests of a simulation, from a file or drawn at random.

A workload file is the JSON of ``workload.json``: ``{"requests": [{"prompt_tokens": 377, "output_tokens":
314, "arrival": null}, ...]}``; ``arrival`` is in seconds from the start and needed only for ``trace``
arrivals. A request may also have ``priority`` (lower is served first), ``prefix`` and ``prefix_tokens`` (the
name of a shared prefix and its length), and ``abort_after`` (seconds until its client gives up).
"""

import csv
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from exporter.config import as_number
from exporter.simulation.rng import Rng
from exporter.simulation.timing import nanoseconds

__all__ = ["Lengths", "Request", "WorkloadError", "parse_trace", "parse_workload", "random_requests"]


class WorkloadError(ValueError):
    """An invalid workload; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, whose lengths in tokens are known in advance (as with ``ignore_eos``)."""

    id: int  # the order of arrival unless requests have times
    prompt_tokens: int  # at least 1
    output_tokens: int  # at least 1; the model length may cut them
    arrival: int | None = None  # nanoseconds; None for burst, closed-loop and Poisson arrivals
    priority: int = 0  # for the priority policy; lower is served first, as in vLLM
    prefix: str | None = None  # name of the shared prefix of its prompt
    prefix_tokens: int = 0
    abort_after: int | None = None  # nanoseconds from arrival until the client gives up


_COLUMNS: Final[Mapping[str, Callable[[str], object]]] = {
    **dict.fromkeys(("prompt_tokens", "output_tokens", "priority", "prefix_tokens"), int),
    **dict.fromkeys(("arrival", "abort_after"), float),
}


def parse_workload(document: Any) -> tuple[Request, ...]:
    """Read a workload file's JSON; raises WorkloadError, which names the invalid request and field."""
    requests = document.get("requests") if isinstance(document, Mapping) else None
    if not isinstance(requests, Sequence) or isinstance(requests, str) or not requests:
        raise WorkloadError('expected {"requests": [...]} with at least one request')
    return tuple(_request(i, fields) for i, fields in enumerate(requests))


def parse_trace(lines: Iterable[str]) -> tuple[Request, ...]:
    """Read a trace CSV: a header with at least prompt_tokens, output_tokens, arrival (seconds).

    Columns may be any field of a workload file. Rows are sorted by arrival.

    Raises:
        WorkloadError: a column is missing or a value is not a number; the message names the line.
    """
    reader = csv.DictReader(lines)
    columns = reader.fieldnames or ()
    missing = [c for c in ("arrival", "prompt_tokens", "output_tokens") if c not in columns]
    if missing:
        raise WorkloadError(
            f"the trace's header lacks {', '.join(missing)}; got {', '.join(columns) or 'nothing'}"
        )
    requests = [_request(i, _numbers(i, row)) for i, row in enumerate(reader)]
    if not requests:
        raise WorkloadError("the trace has no rows")
    requests.sort(key=lambda r: (r.arrival or 0, r.id))
    return tuple(requests)


def _numbers(index: int, row: Mapping[str, str | None]) -> dict[str, Any]:
    """Convert the cells of a CSV row to numbers, without the empty ones."""
    fields: dict[str, Any] = {}
    for name, cell in row.items():
        try:
            if cell:
                fields[name] = _COLUMNS.get(name, str)(cell)
        except ValueError as error:
            raise WorkloadError(f"line {index + 2}: {name}: expected a number, got {cell!r}") from error
    return fields


def _request(index: int, fields: Any) -> Request:
    """Read the fields of a request; unknown fields are ignored."""
    if not isinstance(fields, Mapping):
        raise WorkloadError(f"request {index}: expected an object, got {type(fields).__name__}")
    prompt = _whole(index, "prompt_tokens", fields)
    prefix = fields.get("prefix")
    shared = _whole(index, "prefix_tokens", fields, 0, 0)
    if shared > prompt:
        raise WorkloadError(
            f"request {index}: prefix_tokens: expected at most the prompt's {prompt}, got {shared}"
        )
    return Request(
        id=index,
        prompt_tokens=prompt,
        output_tokens=_whole(index, "output_tokens", fields),
        arrival=_seconds(index, "arrival", fields),
        priority=_whole(index, "priority", fields, None, 0),
        prefix=None if prefix is None else str(prefix),
        prefix_tokens=shared,
        abort_after=_seconds(index, "abort_after", fields),
    )


def _whole(
    index: int, name: str, fields: Mapping[str, Any], least: int | None = 1, default: int | None = None
) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        wanted = "a whole number" if least is None else f"a whole number of at least {least}"
        raise WorkloadError(f"request {index}: {name}: expected {wanted}, got {value!r}")
    return value


def _seconds(index: int, name: str, fields: Mapping[str, Any]) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    number = as_number(value)
    if number is None or not 0 <= number < 1e9:  # noqa: PLR2004
        raise WorkloadError(f"request {index}: {name}: expected seconds of at least 0, got {value!r}")
    return nanoseconds(number)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: ranges, each with a weight, uniform within a range."""

    ranges: tuple[tuple[int, int, int], ...]  # (least, most, weight), including both ends

    def __post_init__(self) -> None:
        if not self.ranges or any(lo < 1 or hi < lo or w < 0 for lo, hi, w in self.ranges):
            raise ValueError(f"expected ranges of at least 1 token in order, got {self.ranges!r}")
        if not sum(w for _, _, w in self.ranges):
            raise ValueError("expected at least one range with a weight above 0")

    @classmethod
    def between(cls, least: int, most: int) -> "Lengths":
        """Return a uniform distribution from one length to another, both included."""
        return cls(((least, most, 1),))

    @classmethod
    def from_buckets(
        cls, buckets: Iterable[tuple[float, float]], longest: int, mean: float | None = None
    ) -> "Lengths":
        """Read a Prometheus histogram's cumulative buckets ``(le, count)``, in order.

        Lengths within a bucket are assumed to be equally likely; the ``+Inf`` bucket ends at ``longest``.
        The last bucket may end far above its longest value: given the ``mean`` (``_sum`` / ``_count``), its
        end is lowered until the means agree.
        """
        ranges: list[tuple[int, int, int]] = []
        below, seen = 0, 0.0
        for bound, count in buckets:
            most = max(min(int(bound), longest) if bound < longest else longest, below + 1)
            if count > seen:
                ranges.append((below + 1, most, round(count - seen)))
            below, seen = most, max(seen, count)
        lengths = cls(tuple(ranges))
        if mean is None:
            return lengths
        total = sum(weight for _, _, weight in ranges)
        least, most, weight = ranges[-1]
        # The mean of the last range is (least + most) / 2: move its end by twice the error of the total.
        end = round(most - 2 * (lengths.mean - mean) * total / weight)
        return cls((*ranges[:-1], (least, min(max(end, least), most), weight)))

    @property
    def mean(self) -> float:
        """The mean length in tokens."""
        total = sum(w for _, _, w in self.ranges)
        return sum((lo + hi) / 2 * w for lo, hi, w in self.ranges) / total

    def draw(self, rng: Rng) -> int:
        """Draw one length."""
        at = rng.below(sum([weight for _, _, weight in self.ranges]))
        for least, most, weight in self.ranges:
            if at < weight:
                return least + rng.below(most - least + 1)
            at -= weight
        raise AssertionError("a number below the sum of the weights is in one of the ranges")


def random_requests(
    prompts: Lengths, outputs: Lengths, rng: Rng, *, prefixes: int = 0, prefix_tokens: int = 0
) -> Iterator[Request]:
    """Yield an endless stream of requests, with lengths drawn independently.

    With ``prefixes`` above 0, each prompt starts with one of that many shared prefixes of ``prefix_tokens``
    tokens, within its drawn length.
    """
    for number in itertools.count():
        prompt, output = prompts.draw(rng), outputs.draw(rng)
        prefix = f"text-{rng.below(prefixes)}" if prefixes and prefix_tokens else None
        shared = min(prefix_tokens, prompt) if prefix else 0
        yield Request(number, prompt, output, prefix=prefix, prefix_tokens=shared)
