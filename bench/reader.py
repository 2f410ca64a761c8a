"""Measures reading one recorded body of about 47 KB, compared with prometheus-client's parser and two floors.

The floors of any reader: look at every byte once, as the C library does when it searches for an absent one;
and split the text into lines.
"""

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench import Row, turns
from exporter.vllm.exposition import Reader

RECORDING = Path(__file__).parent.parent / "tests" / "recordings" / "0.26.0-exhaustion.jsonl.gz"
ROUNDS = 30


def recorded() -> list[bytes]:
    """Return all bodies of a server that gets into a preemption storm, in order."""
    with gzip.open(RECORDING) as lines:
        polls = (json.loads(line) for line in itertools.islice(lines, 1, None))
        return [poll["body"].encode() for poll in polls if "body" in poll]


def storm() -> list[bytes]:
    """Return a hundred consecutive bodies from the middle of the storm."""
    return recorded()[80:180]


def run() -> list[Row]:
    """Compare the parsers; each gets the next body at each call: ours as bytes, the other as text."""
    bodies = storm()
    texts = [body.decode() for body in bodies]
    reader = Reader()
    reader.read(bodies[-1])  # a series is parsed only when it first appears

    def ours(number: int) -> object:
        return reader.read(bodies[number % len(bodies)])

    def theirs(number: int) -> object:
        return list(text_string_to_metric_families(texts[number % len(texts)]))

    def scan(number: int) -> object:
        return bodies[number % len(bodies)].find(b"\0")

    def cut(number: int) -> object:
        return bodies[number % len(bodies)].split(b"\n")

    warm = turns(ROUNDS, ours, theirs, in_a_row=5)
    cold = turns(3 * ROUNDS, ours, theirs)
    floor = turns(ROUNDS, ours, scan, cut, in_a_row=5)
    return [
        Row.of(f"read a body of {len(bodies[0]) / 1000:.0f} kB", micro(warm[0]), "us"),
        Row.of("read it with prometheus-client", micro(warm[1]), "us"),
        Row.of("ratio, turns of five", ratios(warm[1], warm[0]), "x", 75),
        Row.of("ratio, turns of one (cold caches)", ratios(cold[1], cold[0]), "x"),
        Row.of("look at every byte once", micro(floor[1]), "us"),
        Row.of("split the text into lines", micro(floor[2]), "us"),
        Row.of("reading over looking at every byte", ratios(floor[0], floor[1]), "x"),
        Row.of("reading over splitting into lines", ratios(floor[0], floor[2]), "x"),
    ]


def micro(seconds: Sequence[float]) -> Sequence[float]:
    """Convert seconds to microseconds."""
    return [one * 1e6 for one in seconds]


def ratios(over: Sequence[float], under: Sequence[float]) -> Sequence[float]:
    """Return the ratios of pairs that were measured one after the other."""
    return [one / other for one, other in zip(over, under, strict=True)]
