"""Converts recordings to input of promtool's unit tests, as Prometheus would have scraped them every 15 s.

    sidecar = scraped_sidecar(story("0.26.0-exhaustion", 10, 90, seconds=600))
    native = scraped_vllm(story("0.26.0-exhaustion", 10, 90, seconds=600))

A story's bodies go through the real pipeline and the real collector for the rules over the sidecar's series,
and as they are for the rules on vLLM's own.
"""

import functools
import gzip
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.config import AnalysisConfig, parse_facts
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import ReadingCollector
from exporter.standin.recording_loop import RecordingLoop
from exporter.vllm.answers import from_header
from exporter.vllm.names import NAMES
from exporter.vllm.recording import Header, Poll, read
from support.metrics_text import text_of

TESTS = Path(__file__).parents[1]
SCRAPE = 15
TARGET = {
    "cluster": "eu",
    "namespace": "prod",
    "pod": "vllm-0",
    "container": "vllm",
    "endpoint": "metrics",
    "job": "vllm-preemption-exporter",
    "instance": "10.0.0.1:21900",
}
VLLM_TARGET = {**TARGET, "job": "vllm", "instance": "10.0.0.1:8000"}
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
# Histograms are none of the rules' business, but for the counts and sums that have a row.
_NAMES = {f"vllm:{row.name}{end}" for row in NAMES for end in ("", "_total") if row.kind != "buckets"}


@dataclass(frozen=True)
class Story:
    """The responses of a server, poll by poll."""

    header: Header
    polls: tuple[Poll, ...]

    def at(self, t: float) -> Poll:
        """Return the last poll at or before a time."""
        return self.polls[bisect_right(self.polls, t + 1e-6, key=lambda poll: poll.t) - 1]


def recording(name: str) -> Path:
    """Read a real recording or a field case."""
    folder = "cases" if re.fullmatch(r"[A-Z]\d+[a-z]?", name) else "recordings"
    return TESTS / folder / f"{name}.jsonl.gz"


@functools.cache
def story(name: str, begin: float = 0.0, end: float = float("inf"), *, seconds: float = 0.0) -> Story:
    """Return a recording, or a part of it, repeated to a length.

    Args:
        name: of the recording.
        begin: of the part, in seconds from the first poll.
        end: of the part.
        seconds: length of the story; 0 for that of the part.
    """
    header, *polls = read(recording(name))
    origin = polls[0].t
    part = [Poll(poll.t - origin - begin, poll.body, poll.error) for poll in polls]
    part = [poll for poll in part if 0 <= poll.t <= end - begin]
    if seconds <= part[-1].t:
        return Story(header, tuple(part))
    loop = RecordingLoop(part)
    times = range(int(seconds) + 1)
    return Story(header, tuple(Poll(float(t), loop.at(t), None) for t in times))


def still(body: bytes, seconds: int, *, every: int = 1) -> Story:
    """Return a server whose responses are always the same."""
    times = range(0, seconds + 1, every)
    return Story(Header("", float(every), {}, {}), tuple(Poll(float(t), body, None) for t in times))


def idle(version: str, kind: str = "idle") -> bytes:
    """Return the body of a server that had no requests yet."""
    return (TESTS / "recordings" / f"{version}-{kind}.txt").read_bytes()


def exposition(version: str) -> bytes:
    """Return the body that a release's own metric code printed."""
    return gzip.decompress((TESTS / "expositions" / f"{version}.txt.gz").read_bytes())


@dataclass
class Scrapes:
    """Series by their text, with one value per scrape; None for a scrape without it."""

    values: dict[str, list[str | None]] = field(default_factory=dict)
    count: int = 0

    def add(self, text: str, labels: Mapping[str, str], keep: Callable[[str], bool]) -> None:
        """Add the text of a scrape, as if from a target with these labels."""
        for line in text.splitlines():
            found = _SAMPLE.fullmatch(line)
            if found and keep(found[1]):
                self.put(_series(found[1], found[2] or "", labels), found[3])

    def put(self, series: str, value: str) -> None:
        """Add one value of the current scrape."""
        row = self.values.setdefault(series, [])
        row += [None] * (self.count - len(row))
        row.append(value)

    def end(self) -> None:
        """End the current scrape."""
        self.count += 1

    def series(self) -> list[dict[str, str]]:
        """Return promtool's `input_series`; a series without a value is marked stale, as in Prometheus."""
        return [{"series": series, "values": _values(row, self.count)} for series, row in self.values.items()]

    def __or__(self, other: "Scrapes") -> "Scrapes":
        """Join the scrapes of two targets."""
        return Scrapes({**self.values, **other.values}, max(self.count, other.count))


def _values(row: list[str | None], count: int) -> str:
    """Print values in promtool's notation, with equal consecutive ones joined."""
    row = row + [None] * (count - len(row))
    words: list[str] = []
    before: str | None = None
    for value in row:
        words.append(value if value is not None else "stale" if before is not None else "_")
        before = value
    return " ".join(words)


def _series(name: str, labels: str, target: Mapping[str, str]) -> str:
    both = [labels] if labels else []
    both += [f'{label}="{value}"' for label, value in target.items()]
    return f"{name}{{{','.join(both)}}}"


def readings(told: Story) -> Iterator[tuple[float, TargetReading]]:
    """Run the story through the real pipeline; returns its readings."""
    facts, _ = parse_facts(told.header.config, strict=False)
    pipeline = Pipeline(AnalysisConfig(), facts, told.header.interval)
    answers = from_header(told.header.probes)
    for poll in told.polls:
        yield poll.t, pipeline.feed(poll.t, poll.body, poll.error, answers)


def never(_scrape: int) -> bool:
    """Miss no scrape."""
    return False


def scraped_sidecar(
    told: Story, target: Mapping[str, str] = TARGET, *, missed: Callable[[int], bool] = never
) -> Scrapes:
    """Return Prometheus' series of a sidecar that watched the story.

    Args:
        told: the story.
        target: labels that Prometheus adds.
        missed: whether a scrape failed, by its number.
    """
    now: list[TargetReading] = []
    counts = PollCounts()
    shown = ReadingCollector(lambda: now[-1], lambda: now[-1].t, lambda: 1.7e9)
    collectors = shown, ExporterMetrics(), counts
    scrapes = Scrapes()

    def scrape() -> None:
        bad = missed(scrapes.count)
        scrapes.put(_series("up", "", target), "0" if bad else "1")
        if not bad:
            scrapes.add(text_of(*collectors), target, lambda name: not name.endswith("_bucket"))
        scrapes.end()

    for t, reading in readings(told):
        while now and scrapes.count * SCRAPE < t:
            scrape()
        now[:] = [reading]
        counts.poll(0.0, 0, reading.error, interval=1.0, unreadable=reading.unreadable)
    scrape()
    return scrapes


def scraped_vllm(
    told: Story, target: Mapping[str, str] = VLLM_TARGET, *, missed: Callable[[int], bool] = never
) -> Scrapes:
    """Return Prometheus' series of a vLLM that answered as in the story."""
    scrapes = Scrapes()
    for number in range(int(told.polls[-1].t) // SCRAPE + 1):
        body = told.at(number * SCRAPE).body
        bad = body is None or missed(number)
        scrapes.put(_series("up", "", target), "0" if bad else "1")
        if body is not None and not bad:
            scrapes.add(body.decode(), target, lambda name: name in _NAMES or name.startswith("ray_"))
        scrapes.end()
    return scrapes
