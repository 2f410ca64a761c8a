"""A metrics page as vLLM prints it, filled with the figures of engines that are none.

The counterpart of the reader: names, labels, types, order and buckets are those of a page that a real server
printed (``exporter/data/vllm-VERSION.txt.gz``, its last body under load), only the values are new. Counted is
what vLLM's own logger counts, at the moments at which it does. A series that is not named here stays at
what a server that was not asked for it shows, which is 0.
"""

import functools
import gzip
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Final

from exporter.vllm import names
from exporter.vllm.names import PRINTED

__all__ = ["VERSIONS", "EngineFigures", "Finished", "Page"]

VERSIONS: Final = ("0.26.0", "0.32.0")

# Buckets of lengths are 1, 2, 5, 10, ... up to the model's longest sequence.
_LENGTHS: Final = tuple(
    PRINTED[word] for word in ("prompt", "output", "longest_output", "asked_output", "computed")
)
_PREFIX: Final = names.PREFIXES[0]
_HTTP: Final = "/v1/completions"
_TOKEN_BYTES: Final = 6
_REMOVED: Final = "(text removed)"
_SERIES: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)",?')


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended; times in seconds.

    Attributes:
        prompt, output: tokens.
        computed: prompt tokens that were not found in the prefix cache.
        queue: from arrival to its first admission.
        first: from arrival to its first token.
        total: from arrival to its end.
        preemptions: how often it was preempted.
    """

    prompt: int
    output: int
    computed: int
    queue: float
    first: float
    total: float
    preemptions: int


class _Histogram:
    """One histogram's counts."""

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.count = 0
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        at = bisect_left(self.bounds, value)
        if at < len(self.counts):
            self.counts[at] += times
        self.count += times
        self.total += value * times


class EngineFigures:
    """What one engine has counted since its process began, in the words of vLLM's logger."""

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self.values: dict[tuple[str, str], float] = {}
        self.histograms = {name: _Histogram(each) for name, each in bounds.items()}

    def gauges(self, running: int, waiting: int, kv_usage: float) -> None:
        """Set what the last step left behind; whoever waits waits for room."""
        for word, value in (("running", running), ("waiting", waiting), ("usage", kv_usage)):
            self.values[PRINTED[word], ""] = value
        self.values[PRINTED["waiting_by_reason"], "capacity"] = waiting

    def preempted(self, total: int) -> None:
        """Set the counter of preemptions."""
        self.values[PRINTED["preempted"], ""] = total

    def steps(self, count: int, tokens: int) -> None:
        """Count steps that put out a token, and the tokens computed in them."""
        if count > 0:
            self._observe("step", tokens / count, count)

    def first_token(self, prompt: int, cached: int, seconds: float) -> None:
        """Count a request's first token, and with it its prompt."""
        self._add("prompts", prompt)
        self._add("prompts_by_source", prompt - cached, "local_compute")
        self._add("prompts_by_source", cached, "local_cache_hit")
        self._add("prompts_cached", cached)
        self._add("prompts_cached_by_source", cached, "device")
        self._add("prefix_queried", prompt)
        self._add("prefix_found", cached)
        self._add("generated", 1)
        self._observe("first_token", seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """Count tokens that each came so many seconds after the one before it."""
        if count > 0:
            self._add("generated", count)
            self._observe("inter_token", seconds, count)

    def finished(self, request: Finished) -> None:
        """Count a request that ended by its length."""
        self._add("finished", 1, "length")
        decode = request.total - request.first
        for word, value in (
            ("prompt", request.prompt),
            ("output", request.output),
            ("longest_output", request.output),
            ("asked_output", request.output),
            ("asked_answers", 1),
            ("computed", request.computed),
            ("per_token", decode / max(1, request.output - 1)),
            ("total", request.total),
            ("queue", request.queue),
            ("inference", request.total - request.queue),
            ("prefill", request.first - request.queue),
            ("decode", decode),
            ("preemptions_of_one", request.preemptions),
        ):
            self._observe(word, value)

    def value(self, name: str, extra: str) -> float | None:
        """The value of a counter or gauge; None where it is none of those that are counted."""
        return self.values.get((name, extra))

    def _add(self, word: str, value: float, extra: str = "") -> None:
        name = PRINTED[word]
        self.values[name, extra] = self.values.get((name, extra), 0.0) + value

    def _observe(self, word: str, value: float, times: int = 1) -> None:
        histogram = self.histograms.get(PRINTED[word])
        if histogram is not None:  # this version has it
            histogram.observe(value, times)


@dataclass(frozen=True, slots=True)
class _Line:
    """One series of the page: its name, its labels without engine, model and bound, and its value there."""

    name: str
    labels: Mapping[str, str]
    value: str
    bound: str = ""

    @property
    def extra(self) -> str:
        """The value of the label beside those that all series have, or nothing."""
        return next((v for k, v in self.labels.items() if k not in ("engine", "model_name", "le")), "")


@dataclass(slots=True)
class _Family:
    """A family as it stands on the page."""

    name: str
    kind: str
    lines: list[_Line] = field(default_factory=list)

    @property
    def engines(self) -> bool:
        """Whether each engine has series of its own in it."""
        return bool(self.lines) and "engine" in self.lines[0].labels


class Page:
    """The page of one server process.

    Attributes:
        engines: what each of its data-parallel engines counts.
    """

    def __init__(
        self,
        version: str,
        model: str,
        started: float,
        *,
        max_model_len: int,
        cache: Mapping[str, str],
        engines: int = 1,
    ) -> None:
        """Begin with nothing counted.

        Args:
            version: one of `VERSIONS`.
            model: the served model's name.
            started: unix seconds.
            max_model_len: tokens.
            cache: labels of ``cache_config_info`` that differ from the recorded server's.
            engines: data-parallel engines.
        """
        self._model = _escaped(model)
        self._started = started
        self._cache = cache
        self._longest = max_model_len
        self._families = _families(version)
        self._prefixes: dict[tuple[int, int], str] = {}  # series as text, by line and engine
        bounds = {
            family.name.removeprefix(_PREFIX): self._bounds(family)
            for family in self._families
            if family.kind == "histogram" and family.engines
        }
        self.engines = tuple(EngineFigures(bounds) for _ in range(engines))

    def _bounds(self, family: _Family) -> list[float]:
        if family.name.removeprefix(_PREFIX) in _LENGTHS:
            return _one_two_five(self._longest)
        return [float(line.bound) for line in family.lines if line.bound and line.bound != "+Inf"]

    def body(self, now: float) -> bytes:
        """The page at a time in unix seconds."""
        lines: list[str] = []
        for family in self._families:
            text = _REMOVED if not family.name.startswith(_PREFIX) else "(simulated)"
            lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
            if not family.engines:
                lines += self._others(family, now)
            elif family.kind == "histogram":
                for number in range(len(self.engines)):
                    lines += self._histogram(family, number)
            else:
                lines += [
                    self._series(line, number) for line in family.lines for number in range(len(self.engines))
                ]
        return ("\n".join(lines) + "\n").encode()

    def _series(self, line: _Line, number: int) -> str:
        name = line.name.removeprefix(_PREFIX)
        prefix = self._prefixes.get((id(line), number))
        if prefix is None:
            prefix = self._prefixes[id(line), number] = f"{line.name}{_block(self._labels(line, number))}"
        if name == names.CACHE_CONFIG:
            return f"{prefix} 1.0"
        value = self.engines[number].value(name, line.extra)
        if value is not None:
            return f"{prefix} {_number(value)}"
        if name.endswith("_created"):
            return f"{prefix} {_number(self._started)}"
        return f"{prefix} {'1.0' if line.extra == 'awake' else '0.0'}"

    def _labels(self, line: _Line, number: int) -> dict[str, str]:
        labels = {**line.labels, "engine": str(number)}
        if "model_name" in labels:
            labels["model_name"] = self._model
        if line.name == _PREFIX + names.CACHE_CONFIG:
            labels |= {key: _escaped(value) for key, value in self._cache.items() if key in labels}
        return labels

    def _histogram(self, family: _Family, number: int) -> Iterator[str]:
        histogram = self.engines[number].histograms[family.name.removeprefix(_PREFIX)]
        before, after = f'{family.name}_bucket{{engine="{number}",le="', f'",model_name="{self._model}"}} '
        seen = 0
        for bound, inside in zip(histogram.bounds, histogram.counts, strict=True):
            seen += inside
            yield f"{before}{float(bound)!r}{after}{float(seen)!r}"
        yield f"{before}+Inf{after}{_number(histogram.count)}"
        block = f'{{engine="{number}",model_name="{self._model}"}}'
        yield f"{family.name}_count{block} {_number(histogram.count)}"
        yield f"{family.name}_sum{block} {_number(histogram.total)}"

    def _others(self, family: _Family, now: float) -> Iterator[str]:
        """Series of the process and of its web server, which follow from what was counted."""
        for line in family.lines:
            labels, value = dict(line.labels), line.value
            if "model_name" in labels:
                labels["model_name"] = self._model
            if line.name == names.START_TIME or line.name.endswith("_created"):
                value = _number(self._started)
            elif line.name == "process_cpu_seconds_total":
                value = _number(round(max(0.0, now - self._started), 2))
            elif line.name.startswith("http_") and (not labels or labels.get("handler") == _HTTP):
                value = self._web(line)
            if line.bound:
                labels["le"] = line.bound
            yield f"{line.name}{_block(dict(sorted(labels.items())))} {value}"

    def _web(self, line: _Line) -> str:
        """A figure of the web server about completions; sizes are taken as some bytes per token."""
        latencies = [engine.histograms[PRINTED["total"]] for engine in self.engines]
        count = sum(each.count for each in latencies)
        if line.name.endswith("_bucket"):
            bound = float(line.bound)
            return _number(
                sum(sum(each.counts[: bisect_left(each.bounds, bound + 1e-9)]) for each in latencies)
                if bound < max(latencies[0].bounds)
                else count
            )
        if not line.name.endswith("_sum"):
            return _number(count)
        if "duration" in line.name:
            return _number(sum(each.total for each in latencies))
        tokens = PRINTED["prompt" if "request_size" in line.name else "output"]
        return _number(_TOKEN_BYTES * sum(engine.histograms[tokens].total for engine in self.engines))


@functools.cache
def _families(version: str) -> tuple[_Family, ...]:
    """The recorded page of a version, family by family."""
    if version not in VERSIONS:
        raise ValueError(f"wanted one of the versions {', '.join(VERSIONS)}, got {version}")
    packed = (resources.files("exporter") / "data" / f"vllm-{version}.txt.gz").read_bytes()
    families: list[_Family] = []
    for line in gzip.decompress(packed).decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            families.append(_Family(name, kind))
        elif not line.startswith("#"):
            families[-1].lines.append(_line(line))
    return tuple(families)


def _line(text: str) -> _Line:
    found = _SERIES.fullmatch(text)
    assert found is not None, text  # noqa: S101 -- the page is part of the program
    labels = dict(_LABEL.findall(found[2] or ""))
    return _Line(found[1], {k: v for k, v in labels.items() if k != "le"}, found[3], labels.get("le", ""))


def _one_two_five(longest: int) -> list[float]:
    """1, 2, 5, 10, ... up to a length, as vLLM's ``build_1_2_5_buckets``."""
    bounds: list[float] = []
    power = 1
    while True:
        for each in (1, 2, 5):
            if each * power > longest:
                return bounds
            bounds.append(float(each * power))
        power *= 10


def _block(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    return repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
