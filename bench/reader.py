"""Reading one recorded body of about 47 KB, against prometheus-client's parser and against the bytes alone.

The floor of anything that reads a text: look at every byte once, as the C library does when it seeks one that
is not there; and cut the text into its lines.
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
    """All bodies of a server that gets into a preemption storm, in their order."""
    with gzip.open(RECORDING) as lines:
        polls = (json.loads(line) for line in itertools.islice(lines, 1, None))
        return [poll["body"].encode() for poll in polls if "body" in poll]


def storm() -> list[bytes]:
    """A hundred of them in a row out of the middle of the storm."""
    return recorded()[80:180]


def run() -> list[Row]:
    """Both parsers get the next body at each call: ours as bytes, the other as the text that it takes."""
    bodies = storm()
    texts = [body.decode() for body in bodies]
    reader = Reader()
    reader.read(bodies[-1])  # a series is taken apart at its first sight only

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
        Row.of("the same with prometheus-client", micro(warm[1]), "us"),
        Row.of("ratio, five in a row by turns", ratios(warm[1], warm[0]), "x", 75),
        Row.of("ratio, one by turns (cold caches)", ratios(cold[1], cold[0]), "x"),
        Row.of("look at every byte once", micro(floor[1]), "us"),
        Row.of("cut the text into lines", micro(floor[2]), "us"),
        Row.of("reading over looking at every byte", ratios(floor[0], floor[1]), "x"),
        Row.of("reading over cutting into lines", ratios(floor[0], floor[2]), "x"),
    ]


def micro(seconds: Sequence[float]) -> Sequence[float]:
    """In microseconds."""
    return [one * 1e6 for one in seconds]


def ratios(over: Sequence[float], under: Sequence[float]) -> Sequence[float]:
    """Of pairs that were measured one after the other."""
    return [one / other for one, other in zip(over, under, strict=True)]
