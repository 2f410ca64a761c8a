"""What is fuzzed, and what must hold for every input."""

import argparse
import copy
import gzip
import itertools
import json
import math
import os
import random
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import requests
from support import real_recordings
from support.metrics_text import text_of

from exporter.analysis.pipeline import MAX_REMEMBERED, Pipeline
from exporter.commands import whatif
from exporter.config import (
    AnalysisConfig,
    ConfigError,
    FileTargetsConfig,
    WhatIfConfig,
    describe,
    load,
    read_url,
)
from exporter.config.labels import is_label_name
from exporter.publish.inert import inert
from exporter.publish.json_text import json_text
from exporter.publish.metrics.table import ReadingCollector
from exporter.publish.status import status_object
from exporter.publish.web.webconfig import read as read_web
from exporter.runtime.discovery import FileSource
from exporter.simulation import worker
from exporter.simulation.engine_forecast import bounded, simulate_engine
from exporter.simulation.from_status import PresentError
from exporter.vllm import names
from exporter.vllm.anonymise import anonymise
from exporter.vllm.exposition import KNOWN, Exposition, ExpositionError, Reader, Snapshot
from exporter.vllm.recording import Header, Poll, RecordingError
from exporter.vllm.recording import read as read_recording
from exporter.vllm.series import MOST_CHARACTERS
from fuzz.mutate import mutant
from fuzz.pages import BETWEEN, sequence
from fuzz.plain import differ

CORPUS = Path(__file__).parent / "corpus"
LONGEST = 6000
# Every so many inputs are held against prometheus-client, which takes much longer.
DIFFERENTIAL = 2
# Every so many statuses that can be simulated are.
SIMULATED = 200
RESERVED = frozenset({"model_name", "engine", "verdict"})
VALUES = (
    None, True, "", "\x1b[2J", "1e999", [], {}, [[]], [None], -1, 0, 1, 0.5, 1e-300, 1e18, 1e308, 10**400,
    math.inf, math.nan, {"value": 1e308}, [[None, 1.0]], [[0.0, -1.0]],
)  # fmt: skip
# The times of changed files, in nanoseconds: two texts of equal length within a tick of the clock look alike.
_STAMPS = itertools.count(10**18)


def stored(name: str) -> list[bytes]:
    """The corpus of a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def bodies() -> list[bytes]:
    """Small seeds out of recorded bodies: some families each, of several releases and one storm."""
    random_ = random.Random(5)
    seeds = stored("reader")
    for path in real_recordings.EXPOSITIONS[::4]:
        families = real_recordings.exposition(path).split(b"# HELP ")
        core = [one for one in families if one.startswith(b"vllm:num_requests_running")]
        for _ in range(6):
            seeds.append(b"# HELP ".join([b"", *core, *random_.sample(families, 6)])[:LONGEST])
    for poll in real_recordings.polls(real_recordings.EXHAUSTION)[100:160:10]:
        lines = [line for line in poll.body.splitlines(keepends=True) if not line.startswith(b"#")]
        seeds.append(b"".join(random_.sample(lines, min(len(lines), 40))))
    return seeds


def pages_of_few_lines() -> list[bytes]:
    """Pages as servers print them, of few lines each, so that most changes matter."""
    random_ = random.Random(7)
    seeds = []
    for path in real_recordings.EXPOSITIONS[::6]:
        lines = [
            line for line in real_recordings.exposition(path).splitlines(keepends=True) if line[:1] != b"#"
        ]
        ours = [line for line in lines if line.startswith(b"vllm:") and b"_bucket" not in line]
        core = [line for line in ours if b"num_requests_running" in line]
        seeds += [b"".join(core + random_.sample(ours, 4)) for _ in range(3)]
    return seeds


class Target:
    """What is fed with mutants of its seeds."""

    seeds: Sequence[bytes]

    def mutant(self, random_: random.Random) -> bytes:
        """The next input."""
        return mutant(random_, self.seeds, LONGEST)

    def __call__(self, text: bytes) -> None:
        """Take one input; whatever is raised is a fault."""
        raise NotImplementedError


class ReaderTarget(Target):
    """The reader of bodies: refuses by its own error, reads the same twice, and as prometheus-client does."""

    def __init__(self) -> None:
        self.seeds = bodies()
        self._used = Reader()
        self._number = 0

    def __call__(self, body: bytes) -> None:
        """Read one body with a new reader and with a used one."""
        self._number += 1
        fresh, used = read(Reader(), body), read(self._used, body)
        assert (fresh is None) == (used is None), "a used reader disagrees on what can be read"
        if fresh is not None and used is not None:
            check_values(fresh)
            check_values(used)
            check_end(body, fresh)
            same = certain(fresh, self._used) == certain(used, self._used)
            assert same, "a used reader reads another thing"
        if self._number % DIFFERENTIAL == 0:
            KNOWN.clear()
            assert read(Reader(), body) == fresh, "what is remembered of series changes the result"
            difference = differ(body)
            assert not difference, difference


class SequenceTarget(Target):
    """A reader that has read the pages before reads each page as one that has read nothing."""

    def __init__(self) -> None:
        self.seeds = stored("sequence") + pages_of_few_lines()

    def mutant(self, random_: random.Random) -> bytes:
        """Pages that are alike."""
        return sequence(random_, self.seeds)

    def __call__(self, text: bytes) -> None:
        """Read the pages one after the other."""
        used = Reader()
        KNOWN.clear()
        for page in text.split(BETWEEN):
            again, known = read(used, page), dict(KNOWN)
            KNOWN.clear()
            fresh = read(Reader(), page)
            assert (fresh is None) == (again is None), "a used reader disagrees on what can be read"
            if fresh is not None and again is not None:
                check_values(again)
                check_end(page, fresh)
                assert certain(again, used) == certain(fresh, used), "a used reader reads another thing"
            difference = differ(page)
            assert not difference, difference
            KNOWN.clear()
            KNOWN.update(known)


def read(reader: Reader, body: bytes) -> Exposition | None:
    """What a reader says; None where it refuses."""
    try:
        return reader.read(body)
    except ExpositionError:
        return None


def certain(exposition: Exposition, used: Reader) -> Exposition:
    """Without what depends on the bodies before: the process that is believed, and sources that left."""

    def kept(engine: Snapshot, readings: Mapping[str, Any]) -> dict[str, Any]:
        history = engine.duplicates | {reading for key, reading in used._carried if key == engine.key}
        return {reading: one for reading, one in readings.items() if reading not in history}

    engines = {
        key: replace(engine, values=kept(engine, engine.values), untrusted=kept(engine, engine.untrusted))
        for key, engine in exposition.engines.items()
    }
    return replace(exposition, engines=engines)


def check_end(body: bytes, exposition: Exposition) -> None:
    """A line that is cut off says nothing."""
    if exposition.truncated:
        whole = read(Reader(), body[: body.rfind(b"\n") + 1])
        assert whole == replace(exposition, truncated=False), "a line that is cut off changes the result"


def check_values(exposition: Exposition) -> None:
    """Whatever was read: numbers are numbers, and what is kept is bounded."""
    assert len(exposition.engines) <= MAX_REMEMBERED
    for key, engine in exposition.engines.items():
        assert max(map(len, key)) <= MOST_CHARACTERS
        assert all(map(str.isprintable, key))
        assert all(0 <= value <= names.LARGEST for value in engine.values.values())
        for counts in engine.buckets.values():
            assert all(0 <= count <= names.LARGEST for count in counts.values())
            assert not any(map(math.isnan, counts))
    assert exposition.start_time is None or 0 < exposition.start_time < math.inf


def refused(word: str) -> None:
    """Refuse a number that JSON lacks."""
    raise AssertionError(f"{word} is no JSON")


class PipelineTarget(Target):
    """The way of a body to the exported text and the API: nothing raises, no counter of an engine falls."""

    def __init__(self) -> None:
        self.seeds = bodies()
        self._start()

    def _start(self) -> None:
        self._t = 0.0
        self._polls = 0
        self._counted: dict[tuple[str, str, str], float] = {}
        self._pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
        self._failed: list[str] = []

    def __call__(self, body: bytes) -> None:
        """One poll more; now and then a scrape, and a new pipeline."""
        if self._polls >= 1000:
            self._start()
        self._polls += 1
        self._t += 1.0
        reading = self._pipeline.feed(self._t, body, None)
        for key, engine in reading.engines.items():
            counted = engine.signals.preemptions_total
            if counted is not None:
                assert counted >= self._counted.get(key, 0.0), "a counter fell"
                assert counted < math.inf
                self._counted[key] = counted
        if self._polls % 50 == 0:
            text_of(ReadingCollector(lambda: reading, lambda: self._t, lambda: 1.7e9, self._failed.append))
            assert not self._failed, f"metrics that failed: {self._failed}"
            status = status_object("http://a/metrics", reading, self._t, self._pipeline.loads())
            json.loads(json_text(status), parse_constant=refused)


class RecordingTarget(Target):
    """The reader of recordings: all that is readable, then its own error; and names are made anonymous."""

    def __init__(self) -> None:
        header = b'{"case": "fuzz", "interval": 1.0, "config": {"max_num_seqs": 8}, "probes": {}}\n'
        lines = [
            header,
            b'{"t": 0.5, "body": "vllm:num_requests_running{model_name=\\"m\\"} 1\\n"}\n',
            b'{"t": 1.5, "error": "timeout"}\n',
        ]
        plain = b"".join(lines)
        self.seeds = [
            *stored("recording"),
            plain,
            gzip.compress(plain, 9, mtime=0),
            b"".join(gzip.compress(one, 9, mtime=0) for one in lines),
        ]
        self._file = tempfile.NamedTemporaryFile(dir=_in_memory())  # noqa: SIM115 (as long as the target)

    def __call__(self, text: bytes) -> None:
        """Read one file."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()
        before = -math.inf
        with suppress(RecordingError):
            for number, line in enumerate(read_recording(self._file.name)):
                assert isinstance(line, Poll if number else Header)
                if isinstance(line, Poll):
                    assert line.t >= before
                    before = line.t
        anonymise(text)


class ConfigurationTarget(Target):
    """Files of configuration, both kinds: a good one, or all that is wrong with it."""

    def __init__(self) -> None:
        self.seeds = stored("configuration")

    def __call__(self, text: bytes) -> None:
        """Load one text as both."""
        try:
            shown = text.decode()
        except UnicodeDecodeError:
            return
        _outcome(lambda: describe(load({"config.file": "fuzz.yaml"}, {}, lambda _path: shown)))
        _outcome(lambda: read_web(shown, "web.yml"))
        # The same text as a value of every kind that a flag may have.
        for key in (
            "web.listen_address",
            "poll.interval",
            "poll.max_body_bytes",
            "engine.args",
            "target.url",
        ):
            with suppress(ConfigError):
                load({key: shown[:200]}, {}, lambda _path: "")


class TargetFilesTarget(Target):
    """Files of targets, both forms: known targets stay until a text is certain, and each has a valid URL."""

    def __init__(self) -> None:
        self.seeds = stored("target_files")
        folder = tempfile.mkdtemp(dir=_in_memory())
        weakref.finalize(self, shutil.rmtree, folder)
        self._paths = [Path(folder) / name for name in ("t.json", "t.yml")]
        self._source = FileSource(FileTargetsConfig(files=(f"{folder}/t.*",)), RESERVED)
        self._known: Sequence[str] = []

    def __call__(self, text: bytes) -> None:
        """Write one text in both forms; look three times, as the first one may be in the midst of writing."""
        for path in self._paths:
            path.write_bytes(text)
            os.utime(path, ns=(0, next(_STAMPS)))
        for look in range(3):
            files = self._source._read_all()
            self._source._files = files
            yaml = next(file for name, file in files.items() if name.endswith(".yml"))
            targets = [target.config.url for target in yaml.targets]
            assert look or targets == self._known or not self._known, "half a file counts"
            for target in (target for file in files.values() for target in file.targets):
                assert read_url(target.config.url) == target.config.url
                assert all(is_label_name(name) and name not in RESERVED for name, _ in target.labels)
                assert all(value.isprintable() for _, value in target.labels)
        self._known = targets


class StatusTarget(Target):
    """Answers in the place of an exporter's status, as ``whatif URL`` reads them: a forecast, or why not."""

    def __init__(self) -> None:
        self.seeds = stored("status")
        self._number = 0
        self._options = argparse.Namespace(engine=None)
        self._documents = [json.loads(seed) for seed in self.seeds]

    def mutant(self, random_: random.Random) -> bytes:
        """Half of the inputs are damaged bytes, half have other values in some places."""
        if random_.random() < 0.5:
            return super().mutant(random_)
        document = copy.deepcopy(random_.choice(self._documents))
        for _ in range(random_.choice((1, 1, 2, 4))):
            place, holder, key = document, {"": document}, ""
            while isinstance(place, dict | list) and place and random_.random() < 0.95:
                holder, key = (
                    place,
                    random_.choice(list(place) if isinstance(place, dict) else range(len(place))),
                )
                place = holder[key]
            holder[key] = copy.deepcopy(random_.choice(VALUES))
        return json.dumps(document).encode()

    def __call__(self, text: bytes) -> None:
        """Read one answer; simulate some of them, for a moment."""
        self._number += 1
        answer = requests.Response()
        answer.status_code, answer._content = 200, text
        with patch.object(whatif.requests, "get", lambda *_arguments, **_options: answer):
            try:
                name, present = whatif._read_answer("http://a", self._options)
            except PresentError:
                return
        engine = bounded(present)
        if self._number % SIMULATED == 0:
            thresholds = WhatIfConfig(seeds=1)
            result = simulate_engine(engine, thresholds, [], (1.0, 1.0), None, map)
            assert inert(worker.to_text(name, present, result).split("\n")[0]).isprintable()
            json.loads(json_text(worker.to_dict(name, present, result)), parse_constant=refused)


def _in_memory() -> Path | None:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else None


def _outcome(reading: Callable[[], object]) -> None:
    """Read, or be told all that is wrong."""
    try:
        reading()
    except ConfigError as problem:
        refused = problem.problems
    else:
        return
    assert refused, "refused without a reason"


# Name -> target, and its share of the inputs: the dearer the fewer.
TARGETS: Mapping[str, tuple[Callable[[], Target], float]] = {
    "reader": (ReaderTarget, 0.25),
    "sequence": (SequenceTarget, 0.25),
    "pipeline": (PipelineTarget, 0.1),
    "recording": (RecordingTarget, 0.248),
    "configuration": (ConfigurationTarget, 0.1),
    "target_files": (TargetFilesTarget, 0.05),
    "status": (StatusTarget, 0.002),
}


def corpus_files() -> Iterator[tuple[str, Path]]:
    """Every stored input with its target."""
    for name in TARGETS:
        for path in sorted((CORPUS / name).glob("*")):
            yield name, path
