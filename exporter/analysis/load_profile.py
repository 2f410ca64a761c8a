"""The load of an engine and the pace of its steps: the data that a simulation of it needs. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from exporter.analysis.lengths import LengthHistogram
from exporter.config import as_number

__all__ = ["LoadProfile", "StepSlice", "too_little_seen"]

_DIGITS: Final = 6
_MOST: Final = 1e18  # more than any number of a document
# Less than this is no basis for a forecast.
_LEAST_SECONDS: Final = 30.0
_LEAST_FINISHED: Final = 30.0


def too_little_seen(seconds: float, finished: float) -> str:
    """Return why a window with so many finished requests is no basis for a forecast; empty if it is one."""
    if seconds >= _LEAST_SECONDS and finished >= _LEAST_FINISHED:
        return ""
    return (
        f"{seconds:.0f} s with {finished:.0f} finished requests were observed, "
        f"{_LEAST_SECONDS:.0f} s with {_LEAST_FINISHED:.0f} are needed"
    )


class StepSlice(NamedTuple):
    """Some engine steps in a row; a sum that is unknown is 0."""

    age: float  # seconds from its middle to the last poll
    seconds: float
    steps: float  # those that generated a token
    prompt_tokens: float  # computed, without those that were computed again
    outputs: float  # tokens generated
    preemptions: float = 0.0
    inter_token_seconds: float = 0.0  # sum over the gaps between the tokens of a request
    gaps: float = 0.0
    prefill_seconds: float = 0.0  # sum over the requests that finished, from admission to the first token
    prefills: float = 0.0
    busy: float = 1.0  # 1 if requests were in the engine all the time

    def merged(self, other: "StepSlice") -> "StepSlice":
        """Return both as one slice."""
        age = self.age * self.seconds + other.age * other.seconds
        age /= (self.seconds + other.seconds) or 1.0
        sums = StepSlice(*(mine + others for mine, others in zip(self, other, strict=True)))
        return sums._replace(age=age, busy=min(self.busy, other.busy))


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """Means over a window; None is unknown. The fields have the names of the JSON document."""

    window_seconds: float
    arrivals_per_second: float  # finished requests and the growth of the requests in the engine, per second
    requests_running_mean: float
    requests_running_max: float
    requests_waiting_mean: float
    # Running and waiting requests together, over the polls: the median, and the median distance from it.
    in_flight_median: float
    in_flight_deviation: float
    preemptions_per_minute: float | None  # counted by the server
    requests_finished: float  # in the window
    generation_tokens_per_second: float | None
    inter_token_seconds: float | None  # mean
    prefix_cache_hit_ratio: float | None
    prompt_tokens: LengthHistogram | None  # lengths of finished requests, as are `output_tokens`
    output_tokens: LengthHistogram | None
    steps: tuple[StepSlice, ...]  # slices of the whole history
    kv_capacity_tokens: float | None
    num_gpu_blocks: int | None  # as the server reports it: of all its data-parallel engines together
    block_size: int | None  # tokens per block

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document; the bound of the last bucket is null."""
        values = {
            name: round(value, _DIGITS) if isinstance(value, float) else value
            for name, value in ((each.name, getattr(self, each.name)) for each in fields(self))
        }
        return values | {
            "prompt_tokens": _buckets(self.prompt_tokens),
            "output_tokens": _buckets(self.output_tokens),
            "steps": [[round(value, _DIGITS) for value in slice_] for slice_ in self.steps],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "LoadProfile":
        """Read the JSON document; unknown keys are ignored, missing ones unknown or 0.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: a value of the document is invalid.
        """
        known: dict[str, Any] = {each.name: document.get(each.name) for each in fields(cls)}
        lengths = {name: _histogram(known.pop(name)) for name in ("prompt_tokens", "output_tokens")}
        steps = tuple(StepSlice(*map(_amount, values)) for values in known.pop("steps") or ())
        numbers: dict[str, Any] = {
            name: None if value is None else _amount(value) for name, value in known.items()
        }
        numbers |= {name: numbers[name] or 0.0 for name in _NUMBERS}
        whole = {name: None if numbers[name] is None else int(numbers[name]) for name in _WHOLE}
        return cls(**(numbers | whole | lengths | {"steps": steps}))


_NUMBERS: Final = tuple(each.name for each in fields(LoadProfile) if each.type is float)
_WHOLE: Final = ("num_gpu_blocks", "block_size")


def _amount(value: object) -> float:
    """Return a number of the document; raises ValueError for any other value."""
    number = as_number(value)
    if number is None or not 0 <= number <= _MOST:
        raise ValueError(f"expected a number from 0 to {_MOST:g}, got {value!r:.40}")
    return float(number)


def _buckets(lengths: LengthHistogram | None) -> dict[str, Any] | None:
    if lengths is None or not lengths.count:
        return None
    buckets = [[bound if math.isfinite(bound) else None, inside] for bound, inside in lengths.buckets]
    mean = None if lengths.mean is None else round(lengths.mean, _DIGITS)
    produced = {} if lengths.produced is None else {"produced": lengths.produced}
    return {"mean": mean, **produced, "buckets": buckets}


def _histogram(document: Mapping[str, Any] | None) -> LengthHistogram | None:
    if not document:
        return None
    buckets = tuple(
        (math.inf if bound is None else _amount(bound), _amount(inside))
        for bound, inside in document["buckets"]
    )
    count, mean = sum(inside for _, inside in buckets), document.get("mean")
    total = None if mean is None else _amount(mean) * count
    produced = document.get("produced")
    return LengthHistogram(buckets, count, total, None if produced is None else _amount(produced))
