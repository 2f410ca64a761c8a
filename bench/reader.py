"""Reading one recorded body of about 47 KB, against prometheus-client's parser."""

import gzip
import itertools
import json
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench import Row, medians
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

    our_time, their_time = medians(ROUNDS, ours, theirs, in_a_row=5)
    our_cold_time, their_cold_time = medians(3 * ROUNDS, ours, theirs)
    return [
        Row(f"read a body of {len(bodies[0]) / 1000:.0f} kB", our_time * 1e6, "us"),
        Row("the same with prometheus-client", their_time * 1e6, "us"),
        Row("ratio, five in a row by turns", their_time / our_time, "x", bar=50),
        Row("ratio, one by turns (cold caches)", their_cold_time / our_cold_time, "x"),
    ]
