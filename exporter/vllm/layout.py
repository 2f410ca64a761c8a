"""What the samples of a page mean, by position: worked out once, and kept while the page has the same series.

A server prints the same series in the same order from poll to poll; only the numbers change. So what
depends on the series alone (whose it is, which name of a reading wins, what is added to what) is
decided here, and a poll is left with picking numbers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from exporter.vllm import names
from exporter.vllm.series import CacheConfig, EngineKey, LoraState, Series

__all__ = ["EngineLayout", "Layout", "largest", "lay_out"]

# A body may name at most this many engines; a server has some dozens, a hostile one any number.
MAX_ENGINES: Final = 256

Fold = Callable[[Iterable[float]], float]


def largest(values: Iterable[float]) -> float:
    """The largest number; NaN only where there is nothing else."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Where on a page the values of one engine stand.

    Attributes:
        key: the engine.
        single: (reading, position) of what one series holds.
        folded: (reading, how several become one, positions) of what several series hold together.
        gauges: (reading, {source: position}) of what several processes report, each for itself.
        buckets: (reading, pairs of upper bound and position) of histograms.
        limits: reading -> the largest value that makes sense, where that is not any number.
        duplicates: the readings of `gauges`.
        cache: the configuration of the KV cache, if the page tells it.
        version: the oldest release of vLLM that prints all these names.
    """

    key: EngineKey
    single: Sequence[tuple[str, int]]
    folded: Sequence[tuple[str, Fold, Sequence[int]]]
    gauges: Sequence[tuple[str, Mapping[bytes, int]]]
    buckets: Sequence[tuple[str, Sequence[tuple[float, int]]]]
    limits: Mapping[str, float]
    duplicates: frozenset[str]
    cache: CacheConfig | None
    version: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where on a page everything stands.

    Attributes:
        engines: all engines of the page.
        start_time: position of the time at which the server process began.
        lora: (position of the time of the change, adapters since then); old states stay on the page.
        dropped: samples left out because the page names too many engines.
    """

    engines: Sequence[EngineLayout] = ()
    start_time: int | None = None
    lora: Sequence[tuple[int, LoraState]] = ()
    dropped: int = 0


# One engine's samples: reading -> those of the name that wins, each with its position.
_Samples = dict[str, list[tuple[int, Series]]]


def lay_out(page: Sequence[Series]) -> Layout:
    """Decide what each sample of a page is for.

    Args:
        page: the meaning of each sample, in the order in which they stand.
    """
    engines: dict[EngineKey, _Samples] = {}
    caches: dict[tuple[str, str], Series] = {}
    start_time = None
    lora = []
    dropped = 0
    for position, series in enumerate(page):
        if series.reading:
            if series.key in engines or len(engines) < MAX_ENGINES:
                _add(engines.setdefault(series.key, {}), position, series)
            else:
                dropped += 1
        elif series.kind == "start_time":
            start_time = position
        elif series.kind == "cache":
            caches[series.key.replica, series.key.engine] = series
        elif series.lora:
            lora.append((position, series.lora))
    return Layout(
        [
            # The cache's configuration has no model name, and in old versions no engine.
            _engine(key, samples, caches.get((key.replica, key.engine)) or caches.get((key.replica, "")))
            for key, samples in engines.items()
            if not names.CORE.isdisjoint(samples)
        ],
        start_time,
        lora,
        dropped,
    )


def _add(samples: _Samples, position: int, series: Series) -> None:
    """Keep a sample unless a newer name of its reading is there; older names are forgotten."""
    rivals = samples.get(series.reading)
    if rivals is None or series.rank < rivals[0][1].rank:
        samples[series.reading] = [(position, series)]
    elif series.rank == rivals[0][1].rank:
        rivals.append((position, series))


def _engine(key: EngineKey, samples: _Samples, cache: Series | None) -> EngineLayout:
    single = []
    folded: list[tuple[str, Fold, list[int]]] = []
    gauges = []
    buckets = []
    for reading, found in samples.items():
        # A series that stands there twice is one, and the last line of it counts; other ones are added.
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
