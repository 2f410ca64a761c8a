"""A metrics page that looks like vLLM's, with the figures of simulated engines.

Names, labels, types, order and buckets are those of a real server's page under load
(``exporter/data/vllm-VERSION.txt.gz``); only the values are new. They count what vLLM's own logger counts, at
the same moments. All other series stay at 0, as on a server that does not use the feature.
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

__all__ = ["VERSIONS", "EngineFigures", "Finished", "MetricsPage"]

VERSIONS: Final = ("0.26.0", "0.32.0")

# Their buckets are 1, 2, 5, 10, ... up to the model's longest sequence.
_LENGTHS: Final = tuple(
    PRINTED[word] for word in ("prompt", "output", "longest_output", "asked_output", "computed")
)
_PREFIX: Final = names.PREFIXES[0]
_SERIES: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)",?')


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished request; times in seconds."""

    prompt: int  # tokens
    output: int  # tokens
    computed: int  # prompt tokens that were not in the prefix cache
    queue: float  # from arrival to the first admission
    first: float  # from arrival to the first token
    total: float  # from arrival to the end
    preemptions: int  # how often it was preempted


class _Histogram:
    """The counts of one histogram; the last one is that of values above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class EngineFigures:
    """The metrics of one engine since its process started, counted as vLLM's logger does."""

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        # Gauges and counters by name and by the value of their extra label.
        self.values: dict[tuple[str, str], float] = {}
        self.histograms = {name: _Histogram(each) for name, each in bounds.items()}  # by name

    def gauges(self, running: int, waiting: int, kv_usage: float, deferred: int = 0) -> None:
        """Set the gauges after a step; the waiting requests that are not deferred wait for capacity."""
        for word, value in (("running", running), ("waiting", waiting), ("usage", kv_usage)):
            self.values[PRINTED[word], ""] = value
        self.values[PRINTED["waiting_by_reason"], "capacity"] = waiting - deferred
        self.values[PRINTED["waiting_by_reason"], "deferred"] = deferred

    def preempted(self, total: int) -> None:
        """Set the preemption counter."""
        self.values[PRINTED["preempted"], ""] = total

    def steps(self, count: int, tokens: int) -> None:
        """Count steps that generated a token, and the tokens that they computed."""
        if count > 0:
            self._observe("step", tokens / count, count)

    def first_token(self, prompt: int, cached: int, seconds: float) -> None:
        """Count the first token of a request, and its prompt."""
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
        """Count tokens, each generated `seconds` after the one before it."""
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

    def _add(self, word: str, value: float, extra: str = "") -> None:
        key = PRINTED[word], extra
        self.values[key] = self.values.get(key, 0.0) + value

    def _observe(self, word: str, value: float, times: int = 1) -> None:
        histogram = self.histograms.get(PRINTED[word])
        if histogram is not None:  # this version has it
            histogram.observe(value, times)


@dataclass(frozen=True, slots=True)
class _Line:
    """One series of the recorded page: its name, its labels without ``le``, and the recorded value."""

    name: str
    labels: Mapping[str, str]
    value: str
    bound: str = ""

    @property
    def extra(self) -> str:
        """The value of the label that not all series have, or an empty text."""
        return next((v for k, v in self.labels.items() if k not in ("engine", "model_name")), "")


@dataclass(slots=True)
class _Family:
    """A metric family of the recorded page."""

    name: str
    kind: str
    lines: list[_Line] = field(default_factory=list)

    @property
    def per_engine(self) -> bool:
        """Whether each engine has its own series."""
        return bool(self.lines) and "engine" in self.lines[0].labels


class MetricsPage:
    """The page of one server process."""

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
        """Start with nothing counted.

        Args:
            version: one of `VERSIONS`.
            model: the name of the served model.
            started: unix seconds.
            max_model_len: tokens.
            cache: labels of ``cache_config_info`` that differ from those of the recorded server.
            engines: data-parallel engines.
        """
        self._model = _escape(model)
        self._started = started
        self._cache = cache
        self._families = _families(version)
        self._prefixes: dict[tuple[int, int], str] = {}  # series as text, by line and engine
        bounds: dict[str, list[float]] = {}
        for family in self._families:
            name = family.name.removeprefix(_PREFIX)
            if name in _LENGTHS:
                bounds[name] = _one_two_five(max_model_len)
            elif family.kind == "histogram" and family.per_engine:
                bounds[name] = [float(line.bound) for line in family.lines if line.bound not in ("", "+Inf")]
        # The figures of each of its data-parallel engines.
        self.engines = tuple(EngineFigures(bounds) for _ in range(engines))

    def body(self, now: float) -> bytes:
        """Return the page at a time in unix seconds."""
        lines: list[str] = []
        numbers = range(len(self.engines))
        for family in self._families:
            text = "(simulated)" if family.name.startswith(_PREFIX) else "(text removed)"
            lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
            if not family.per_engine:
                lines += (self._process_series(line, now) for line in family.lines)
            elif family.kind == "histogram":
                for number in numbers:
                    lines += self._histogram(family.name, number)
            else:
                lines += (self._engine_series(line, number) for line in family.lines for number in numbers)
        return ("\n".join(lines) + "\n").encode()

    def _engine_series(self, line: _Line, number: int) -> str:
        name = line.name.removeprefix(_PREFIX)
        prefix = self._prefixes.get((id(line), number))
        if prefix is None:
            labels = {**self._shared(line), "engine": str(number)}
            if name == names.CACHE_CONFIG:
                labels |= {key: _escape(value) for key, value in self._cache.items() if key in labels}
            prefix = self._prefixes[id(line), number] = f"{line.name}{_block(labels)}"
        if name == names.CACHE_CONFIG or line.extra == "awake":
            value = 1.0
        elif name.endswith("_created"):
            value = self._started
        else:
            value = self.engines[number].values.get((name, line.extra), 0.0)
        return f"{prefix} {float(value)!r}"

    def _histogram(self, family: str, number: int) -> Iterator[str]:
        histogram = self.engines[number].histograms[family.removeprefix(_PREFIX)]
        before, after = f'{family}_bucket{{engine="{number}",le="', f'",model_name="{self._model}"}} '
        count = 0.0
        for bound, inside in zip((*map(float, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            count += inside
            yield f"{before}{bound}{after}{count!r}"
        block = f'{{engine="{number}",model_name="{self._model}"}}'
        yield f"{family}_count{block} {count!r}"
        yield f"{family}_sum{block} {histogram.total!r}"

    def _shared(self, line: _Line) -> dict[str, str]:
        return {**line.labels, **({"model_name": self._model} if "model_name" in line.labels else {})}

    def _process_series(self, line: _Line, now: float) -> str:
        """A series of the process, or of its web server, which counts nothing."""
        labels, value = self._shared(line), line.value
        if line.bound:
            labels["le"] = line.bound
        if line.name == names.START_TIME or line.name.endswith("_created"):
            value = repr(float(self._started))
        elif line.name == "process_cpu_seconds_total":
            value = repr(round(max(0.0, float(now - self._started)), 2))
        elif line.name.startswith("http_"):
            value = "0.0"
        return f"{line.name}{_block(dict(sorted(labels.items())))} {value}"


@functools.cache
def _families(version: str) -> tuple[_Family, ...]:
    """Read the recorded page of a version."""
    if version not in VERSIONS:
        raise ValueError(f"expected one of the versions {', '.join(VERSIONS)}, got {version}")
    packed = (resources.files("exporter") / "data" / f"vllm-{version}.txt.gz").read_bytes()
    families: list[_Family] = []
    for text in gzip.decompress(packed).decode().splitlines():
        if text.startswith("# TYPE "):
            _, _, name, kind = text.split(" ")
            families.append(_Family(name, kind))
        elif not text.startswith("#"):
            match = _SERIES.fullmatch(text)
            assert match is not None, text  # noqa: S101 (the page is part of the program)
            labels = dict(_LABEL.findall(match[2] or ""))
            families[-1].lines.append(_Line(match[1], labels, match[3], labels.pop("le", "")))
    return tuple(families)


def _one_two_five(longest: int) -> list[float]:
    """Return 1, 2, 5, 10, ... up to a length, as vLLM's ``build_1_2_5_buckets``."""
    bounds = (float(digit * 10**power) for power in range(len(str(longest))) for digit in (1, 2, 5))
    return [bound for bound in bounds if bound <= longest]


def _block(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
