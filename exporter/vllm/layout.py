"""Decides once how the samples of a page are used, by position, for as long as the page has the same series.

A server prints the same series in the same order from poll to poll; only the numbers change. All that depends
on the series alone (the engine, the name of a reading that wins, the series that are added) is decided here,
so that a poll only picks numbers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from exporter.vllm import names
from exporter.vllm.series import CacheConfig, EngineKey, LoraState, Series

__all__ = ["MAX_ENGINES", "EngineLayout", "Layout", "largest", "lay_out"]

# The most engines of one body; a server has some dozens, a hostile one any number.
MAX_ENGINES: Final = 256

Fold = Callable[[Iterable[float]], float]


def largest(values: Iterable[float]) -> float:
    """Return the largest number; NaN only if there is no other."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The positions of one engine's values on a page."""

    key: EngineKey  # the engine
    single: Sequence[tuple[str, int]]  # (reading, position) of readings with one series
    # (reading, function that makes several values one, positions) of those with several series.
    folded: Sequence[tuple[str, Fold, Sequence[int]]]
    # (reading, {source: position}) of gauges that several processes report.
    gauges: Sequence[tuple[str, Mapping[bytes, int]]]
    # (reading, pairs of upper bound and position) of histograms.
    buckets: Sequence[tuple[str, Sequence[tuple[float, int]]]]
    limits: Mapping[str, float]  # reading -> the largest value that makes sense, if there is one
    duplicates: frozenset[str]  # the readings of `gauges`
    cache: CacheConfig | None  # the configuration of the KV cache, if the page has it
    version: tuple[int, ...]  # the oldest release of vLLM that prints all these names


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of everything on a page."""

    engines: Sequence[EngineLayout] = ()  # all engines of the page
    start_time: int | None = None  # position of the start time of the server process
    # (position of the time of the change, adapters since then); old states stay on the page.
    lora: Sequence[tuple[int, LoraState]] = ()
    dropped: int = 0  # number of samples left out because the page has too many engines


# One engine's samples: reading -> those of the name that wins, each with its position.
_Samples = dict[str, list[tuple[int, Series]]]


def lay_out(page: Sequence[Series]) -> Layout:
    """Decide how each sample of a page is used; `page` is their meanings in order."""
    engines: dict[EngineKey, _Samples] = {}
    caches: dict[tuple[str, str], Series] = {}
    start_time = None
    lora = []
    dropped = 0
    for position, series in enumerate(page):
        if series.reading:
            if series.key not in engines and len(engines) == MAX_ENGINES:
                dropped += 1
                continue
            samples = engines.setdefault(series.key, {})
            rivals = samples.setdefault(series.reading, [])
            if rivals and series.rank < rivals[0][1].rank:  # a newer name of the reading
                rivals.clear()
            if not rivals or series.rank == rivals[0][1].rank:
                rivals.append((position, series))
        elif series.kind == "start_time":
            start_time = position
        elif series.kind == "cache":
            caches[series.key.replica, series.key.engine] = series
        elif series.lora:
            lora.append((position, series.lora))
    shared = {
        (key.model, key.replica): {name: samples[name] for name in names.OF_SERVER & samples.keys()}
        for key, samples in engines.items()
        if not names.OF_SERVER.isdisjoint(samples)
    }
    return Layout(
        [
            # The cache's configuration has no model name, and in old versions no engine.
            _engine(
                key,
                {**samples, **shared.get((key.model, key.replica), {})},
                caches.get((key.replica, key.engine)) or caches.get((key.replica, "")),
            )
            for key, samples in engines.items()
            if not names.CORE.isdisjoint(samples)
        ],
        start_time,
        lora,
        dropped,
    )


def _engine(key: EngineKey, samples: _Samples, cache: Series | None) -> EngineLayout:
    single = []
    folded: list[tuple[str, Fold, list[int]]] = []
    gauges = []
    buckets = []
    for reading, found in samples.items():
        # If a page has the same series twice, the last line counts; different series are added.
        places = {(series.bound, series.source): position for position, series in found}
        positions = list(places.values())
        match found[0][1].kind:
            case "buckets":
                buckets.append((reading, [(bound, position) for (bound, _), position in places.items()]))
            case _ if len(positions) == 1:
                single.append((reading, positions[0]))
            case "counter":
                folded.append((reading, sum, positions))
            case "created":
                folded.append((reading, largest, positions))
            case _:
                gauges.append((reading, {source: position for (_, source), position in places.items()}))
    first = [found[0][1] for found in samples.values()]
    return EngineLayout(
        key,
        single,
        folded,
        gauges,
        buckets,
        limits={series.reading: series.most for series in first if series.most < math.inf},
        duplicates=frozenset(reading for reading, _ in gauges),
        cache=cache.cache if cache else None,
        version=max(series.version for series in ([*first, cache] if cache else first)),
    )
