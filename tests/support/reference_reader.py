"""A second reader, slow and plain, built on prometheus-client's parsers, to compare with the fast one.

It shares only the table of names with the fast reader.
"""

import functools
import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from exporter.vllm import names

TESTS = Path(__file__).parent.parent
RECORDINGS = TESTS / "recordings"
EXPOSITIONS = TESTS / "expositions"

Sample = tuple[str, dict[str, str], float]
Rank = tuple[int, int, int]


def bodies(path: Path) -> Iterator[bytes]:
    """Return every body of a recording (``.jsonl.gz``), or the body of a text file, gzipped or not."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    if ".jsonl" not in path.suffixes:
        yield text.encode()
        return
    for line in text.splitlines()[1:]:
        body = json.loads(line).get("body")
        if body is not None:
            yield body.encode()


def exposition(version: str) -> bytes:
    """Return the text that a release's own metric code printed."""
    return gzip.decompress((EXPOSITIONS / f"{version}.txt.gz").read_bytes())


VERSIONS = sorted(
    (path.name.removesuffix(".txt.gz") for path in EXPOSITIONS.iterdir()), key=names.version_key
)


@functools.lru_cache(maxsize=2000)
def _samples_of_family(text: str) -> tuple[Sample, ...]:
    return tuple(
        (sample.name, sample.labels, float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


def classic_samples(body: bytes) -> list[Sample]:
    """Return all samples of a classic text; families with a known text are not parsed again."""
    blocks = re.split(r"^(?=# HELP )", body.decode(), flags=re.MULTILINE)
    return [sample for block in blocks for sample in _samples_of_family(block)]


def openmetrics_samples(body: bytes) -> list[Sample]:
    """Return all samples of an OpenMetrics text."""
    return [
        (sample.name, sample.labels, float(sample.value))
        for family in openmetrics.text_string_to_metric_families(body.decode())
        for sample in family.samples
    ]


@dataclass
class Engine:
    """The reference's readings of one engine."""

    values: dict[str, float] = field(default_factory=dict)
    untrusted: set[str] = field(default_factory=set)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    duplicates: set[str] = field(default_factory=set)
    version: tuple[int, ...] = ()


@functools.cache
def rows_named(name: str) -> list[tuple[Rank, names.Name]]:
    """Yield the rows that a sample's name may belong to, by row, then by spelling, then by prefix."""
    found = []
    for at, row in enumerate(names.NAMES):
        one_spelling = row.kind != "counter" or row.name.endswith(("_sum", "_count"))
        for spelling, suffix in enumerate([""] if one_spelling else ["_total", "", "_total_total"]):
            for order, prefix in enumerate(names.PREFIXES):
                if name == prefix + row.name + suffix:
                    found.append(((at, spelling, order), row))
    return found


def row_of(name: str, labels: dict[str, str]) -> tuple[Rank, names.Name] | None:
    """Return the row of a sample, with its rank: the smaller one wins."""
    for rank, row in rows_named(name):
        if labels.get(row.label, "") == row.value:
            return rank, row
    return None


def engines(samples: list[Sample]) -> dict[tuple[str, str, str], Engine]:
    """Apply the rules of the table to the samples of one body that is the first of its target."""
    found: dict[tuple[str, str, str], dict[str, dict[Rank, list]]] = defaultdict(lambda: defaultdict(dict))
    for name, labels, value in samples:
        place = row_of(name, labels)
        if place is None:
            continue
        rank, row = place
        if row.kind == "buckets" and not _is_number(labels.get("le", "")):
            continue
        model = labels.get("model_name") or labels.get("model", "")
        key = (model, *_engine_and_replica(labels, "0"))
        found[key][row.reading].setdefault(rank, []).append((row, labels, value))
    caches = _cache_versions(samples)
    of_server = {
        (key[0], key[2]): {name: readings[name] for name in names.OF_SERVER & readings.keys()}
        for key, readings in found.items()
        if names.OF_SERVER & readings.keys()
    }
    return {
        key: _engine(
            readings | of_server.get((key[0], key[2]), {}),
            caches.get(key[2:] + key[1:2]) or caches.get((key[2], "")) or (),
        )
        for key, readings in found.items()
        if names.CORE & set(readings)
    }


def _cache_versions(samples: list[Sample]) -> dict[tuple[str, str], tuple[int, ...]]:
    caches = {}
    for name, labels, _ in samples:
        if name in [prefix + names.CACHE_CONFIG for prefix in names.PREFIXES]:
            since = [names.version_key(names.CACHE_LABEL_SINCE.get(label, "0")) for label in labels]
            newest = max(since, default=())
            caches[_engine_and_replica(labels, "")[::-1]] = () if newest == (0,) else newest
    return caches


def _engine_and_replica(labels: dict[str, str], without: str) -> tuple[str, str]:
    """The engine, and its replica with what the engine's label has before its last slash."""
    *outer, engine = (labels.get("engine") or without).split("/")
    return engine, "/".join(filter(None, (labels.get("ReplicaId", ""), "/".join(outer))))


def _is_number(text: str) -> bool:
    try:
        return "_" not in text and not math.isnan(float(text))
    except ValueError:
        return False


def _engine(readings: dict[str, dict[Rank, list]], version: tuple[int, ...]) -> Engine:
    engine = Engine(version=version)
    for reading, ranks in readings.items():
        winners = ranks[min(ranks)]
        row = winners[0][0]
        engine.version = max(engine.version, names.version_key(row.since))
        # A repeated series counts once, with its last line.
        series = {_source(row, labels): value for _, labels, value in winners}
        if row.kind == "buckets":
            buckets: dict[float, float] = {}
            for (bound, _), value in series.items():
                buckets[bound] = buckets[bound] + value if bound in buckets else value
            if all(0 <= value <= names.LARGEST for value in buckets.values()):
                engine.buckets[reading] = buckets
            else:
                engine.untrusted.add(reading)
            continue
        if row.kind == "counter":
            total = sum(series.values())
        elif row.kind == "created":
            total = _largest(list(series.values()))
        else:
            total = _largest(list(series.values()))
            if len(series) > 1:
                engine.duplicates.add(reading)
        if 0 <= total <= min(row.most, names.LARGEST):
            engine.values[reading] = total
        else:
            engine.untrusted.add(reading)
    return engine


def _source(row: names.Name, labels: dict[str, str]) -> tuple[float, frozenset]:
    own = {"model_name", "model", "engine", "ReplicaId", row.label}
    bound = math.inf
    if row.kind == "buckets":
        own, bound = own | {"le"}, float(labels["le"])
    return bound, frozenset((name, value) for name, value in labels.items() if name not in own)


def _largest(values: list[float]) -> float:
    """Return the largest number; NaN only without any number."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)
