"""The requests of a simulation: what they are, how they are read from a file, how they are made up.

A workload file is the JSON of ``workload.json``: ``{"requests": [{"prompt_tokens": 377, "output_tokens":
314, "arrival": null}, ...]}``; ``arrival`` is in seconds from the start and only needed for arrivals
``trace``. A request may also have ``priority`` (lower is served first), ``prefix`` and ``prefix_tokens``
(its first tokens are the text of that name, shared with others), and ``abort_after`` (seconds until its
client gives up).
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from exporter.config import as_number
from exporter.simulation.rng import Dice
from exporter.simulation.timing import nanoseconds

__all__ = ["Lengths", "Request", "WorkloadError", "made_up", "parse_trace", "parse_workload"]


class WorkloadError(ValueError):
    """A workload that cannot be read; says what was wanted and what was got."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, with its lengths in tokens known beforehand (as with ``ignore_eos``).

    Attributes:
        id: Its number; arrivals are in this order unless they have times.
        prompt_tokens: Length of the prompt, at least 1.
        output_tokens: Tokens it will generate, at least 1, if the model length allows.
        arrival: Nanoseconds from the start, or None where something else decides (burst, closed, Poisson).
        priority: For the priority policy; lower is served first, as in vLLM.
        prefix: Name of the text that its prompt begins with, if others begin with it too.
        prefix_tokens: How many of its prompt tokens are that text.
        abort_after: Nanoseconds from arrival until the client gives up, or None.
    """

    id: int
    prompt_tokens: int
    output_tokens: int
    arrival: int | None = None
    priority: int = 0
    prefix: str | None = None
    prefix_tokens: int = 0
    abort_after: int | None = None


_WHOLE: Final = ("prompt_tokens", "output_tokens", "priority", "prefix_tokens")
_SECONDS: Final = ("arrival", "abort_after")


def parse_workload(document: Any) -> tuple[Request, ...]:
    """Read the JSON document of a workload file.

    Raises:
        WorkloadError: when it is not of that form; the message names the request and the field.
    """
    requests = document.get("requests") if isinstance(document, Mapping) else None
    if not isinstance(requests, Sequence) or isinstance(requests, str) or not requests:
        raise WorkloadError('wanted {"requests": [...]} with at least one request')
    return tuple(_request(i, fields) for i, fields in enumerate(requests))


def parse_trace(lines: Iterable[str]) -> tuple[Request, ...]:
    """Read a trace CSV: a header with at least prompt_tokens, output_tokens, arrival (seconds).

    The other fields of a workload file may be columns too. Rows are put in order of arrival.

    Raises:
        WorkloadError: when a column is missing or a value is not a number; names the line.
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
    """Turn a CSV row's cells into numbers; empty cells are left out."""
    fields: dict[str, Any] = {}
    for name, cell in row.items():
        if not cell:
            continue
        try:
            if name in _WHOLE:
                fields[name] = int(cell)
            elif name in _SECONDS:
                fields[name] = float(cell)
            else:
                fields[name] = cell
        except ValueError as error:
            raise WorkloadError(f"line {index + 2}: {name}: wanted a number, got {cell!r}") from error
    return fields


def _request(index: int, fields: Any) -> Request:
    """Read one request's fields; unknown ones are left alone (a file may say more than is used)."""
    if not isinstance(fields, Mapping):
        raise WorkloadError(f"request {index}: wanted an object, got {type(fields).__name__}")
    prompt = _whole(index, "prompt_tokens", fields)
    prefix = fields.get("prefix")
    shared = _whole(index, "prefix_tokens", fields, 0, 0)
    if shared > prompt:
        raise WorkloadError(
            f"request {index}: prefix_tokens: wanted at most the prompt's {prompt}, got {shared}"
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
        raise WorkloadError(f"request {index}: {name}: wanted {wanted}, got {value!r}")
    return value


def _seconds(index: int, name: str, fields: Mapping[str, Any]) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    number = as_number(value)
    if number is None or not 0 <= number < 1e9:  # noqa: PLR2004
        raise WorkloadError(f"request {index}: {name}: wanted seconds of at least 0, got {value!r}")
    return nanoseconds(number)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: whole ranges, each with a weight, even inside a range.

    Attributes:
        ranges: ``(least, most, weight)``, both ends included; weights are whole numbers.
    """

    ranges: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if not self.ranges or any(lo < 1 or hi < lo or w < 0 for lo, hi, w in self.ranges):
            raise ValueError(f"wanted ranges of at least 1 token in order, got {self.ranges!r}")
        if not sum(w for _, _, w in self.ranges):
            raise ValueError("wanted at least one range with a weight above 0")

    @classmethod
    def between(cls, least: int, most: int) -> "Lengths":
        """Return a distribution that is even between two lengths, both included."""
        return cls(((least, most, 1),))

    @classmethod
    def from_buckets(
        cls, buckets: Iterable[tuple[float, float]], longest: int, mean: float | None = None
    ) -> "Lengths":
        """Read a Prometheus histogram's cumulative buckets ``(le, count)``, in order.

        Inside a bucket every length is taken as equally likely; the ``+Inf`` bucket ends at ``longest``.
        The last bucket may reach far beyond the longest value in it: with the ``mean`` (``_sum`` over
        ``_count``) its end is drawn in until the means agree.
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
        # The last range's mean is (least + most) / 2: move its end by what the whole is off.
        end = round(most - 2 * (lengths.mean - mean) * total / weight)
        return cls((*ranges[:-1], (least, min(max(end, least), most), weight)))

    @property
    def mean(self) -> float:
        """The mean length in tokens."""
        total = sum(w for _, _, w in self.ranges)
        return sum((lo + hi) / 2 * w for lo, hi, w in self.ranges) / total

    def draw(self, dice: Dice) -> int:
        """Draw one length."""
        at = dice.below(sum([weight for _, _, weight in self.ranges]))
        for least, most, weight in self.ranges:
            if at < weight:
                return least + dice.below(most - least + 1)
            at -= weight
        raise AssertionError("a die below the sum of the weights falls into one of the ranges")


def made_up(
    prompts: Lengths, outputs: Lengths, dice: Dice, *, prefixes: int = 0, prefix_tokens: int = 0
) -> Iterator[Request]:
    """Yield requests without end, with lengths drawn independently.

    With ``prefixes`` above 0 each prompt begins with one of so many shared texts of ``prefix_tokens``
    tokens, within its drawn length (a shorter prompt is a part of the text).
    """
    number = 0
    while True:
        prompt, output = prompts.draw(dice), outputs.draw(dice)
        prefix = f"text-{dice.below(prefixes)}" if prefixes and prefix_tokens else None
        shared = min(prefix_tokens, prompt) if prefix else 0
        yield Request(number, prompt, output, prefix=prefix, prefix_tokens=shared)
        number += 1
