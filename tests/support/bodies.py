"""Builds metrics bodies as vLLM prints them, with only the series that a test needs.

    body(engine(running=8, waiting=3, kv=0.97, preemptions=12), start_time=1000.0)

Values that are not given are absent from the body, as in real ones: unknown, not zero.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Lengths = Mapping[float, float]

# Parameter of `engine` -> vLLM's name after "vllm:".
GAUGES = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv": "kv_cache_usage_perc",
}
REASONS = {"capacity": "num_requests_waiting_by_reason", "deferred": "num_requests_waiting_by_reason"}
COUNTERS = {
    "preemptions": "num_preemptions",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_queries": "prefix_cache_queries",
    "prefix_hits": "prefix_cache_hits",
}
# Given as (sum, count).
HISTOGRAMS = {
    "queue": "request_queue_time_seconds",
    "inter_token": "inter_token_latency_seconds",
    "first_token": "time_to_first_token_seconds",
}
# Given as {upper bound: requests up to it} with their sum apart.
LENGTHS = {"prompt_lengths": "request_prompt_tokens", "output_lengths": "request_generation_tokens"}
STEPS = "iteration_tokens_total"

Sample = tuple[str, str, str, float]  # family, type, series as printed, value


@dataclass(frozen=True)
class Engine:
    """The series of one engine."""

    labels: Mapping[str, str]
    values: Mapping[str, object]
    cache: Mapping[str, object] = field(default_factory=dict)

    def samples(self) -> Iterator[Sample]:
        """Return every sample, family by family."""
        for parameter, value in self.values.items():
            if value is not None:
                yield from self._family(parameter, value)
        if self.cache:
            facts = ((name, str(one)) for name, one in self.cache.items())
            labels = ("engine", self.labels["engine"]), *facts
            yield "cache_config_info", "gauge", _series("cache_config_info", labels), 1.0

    def _family(self, parameter: str, value: object) -> Iterator[Sample]:
        if parameter in GAUGES:
            yield self._sample(GAUGES[parameter], "gauge", "", value)
        elif parameter in REASONS:
            yield self._sample(REASONS[parameter], "gauge", "", value, reason=parameter)
        elif parameter in COUNTERS:
            yield self._sample(COUNTERS[parameter], "counter", "_total", value)
        elif parameter == "created":
            yield self._sample("generation_tokens_created", "gauge", "", value)
        elif parameter == "finished":
            yield self._sample("request_success", "counter", "_total", value, finished_reason="stop")
        elif parameter == "steps":
            yield self._sample(STEPS, "histogram", "_bucket", value, le="+Inf")
            yield self._sample(STEPS, "histogram", "_count", value)
        elif parameter in HISTOGRAMS:
            total, count = value
            yield self._sample(HISTOGRAMS[parameter], "histogram", "_bucket", count, le="+Inf")
            yield self._sample(HISTOGRAMS[parameter], "histogram", "_count", count)
            yield self._sample(HISTOGRAMS[parameter], "histogram", "_sum", total)
        else:
            yield from self._lengths(LENGTHS[parameter], *value)

    def _lengths(self, name: str, buckets: Lengths, total: float) -> Iterator[Sample]:
        for bound, count in buckets.items():
            yield self._sample(name, "histogram", "_bucket", count, le=_number(bound))
        yield self._sample(name, "histogram", "_count", max(buckets.values()))
        yield self._sample(name, "histogram", "_sum", total)

    def _sample(self, family: str, kind: str, suffix: str, value: object, **more: str) -> Sample:
        labels = tuple(({**self.labels, **more} if more else self.labels).items())
        return family, kind, _series(family + suffix, labels), float(value)


def engine(
    name: str = "0",
    *,
    model: str = "demo-7b",
    replica: str | None = None,
    cache: Mapping[str, object] | None = None,
    **values: object,
) -> Engine:
    """Build one engine.

    Args:
        name: its ``engine`` label.
        model: its ``model_name``.
        replica: its ``ReplicaId``, as Ray has it.
        cache: labels of ``cache_config_info``.
        values: gauges ``running waiting kv capacity deferred`` (the latter two: waiting, by reason);
            counters ``preemptions finished steps prompt_tokens generation_tokens prefix_queries
            prefix_hits``; ``created`` in unix seconds; ``queue inter_token first_token`` as
            ``(sum, count)``; ``prompt_lengths output_lengths`` as ``({bound: cumulative count}, sum)``.
    """
    known = {*GAUGES, *REASONS, *COUNTERS, *HISTOGRAMS, *LENGTHS, "created", "finished", "steps"}
    assert known >= values.keys(), f"wanted some of {sorted(known)}, got {sorted(values)}"
    labels = {"engine": name, "model_name": model} | ({"ReplicaId": replica} if replica else {})
    return Engine(labels, values, cache or {})


def body(*engines: Engine, start_time: float | None = None) -> bytes:
    """Print a metrics body of these engines; with `start_time` it has the start of the server process."""
    lines = []
    if start_time is not None:
        lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {start_time!r}"]
    families: dict[str, list[Sample]] = {}
    for one in engines:
        for sample in one.samples():
            families.setdefault(sample[0], []).append(sample)
    for family, samples in families.items():
        lines += [f"# HELP vllm:{family} (text removed)", f"# TYPE vllm:{family} {samples[0][1]}"]
        lines += [f"vllm:{series} {_number(value)}" for _, _, series, value in samples]
    return "".join(line + "\n" for line in lines).encode()


def cut(whole: bytes, name: str) -> bytes:
    """Cut a body in the middle of the first sample whose name begins with `name`."""
    at = whole.index(b"\nvllm:" + name.encode()) + 1
    return whole[: at + len(name)]


@functools.lru_cache(maxsize=1 << 14)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    block = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"{name}{{{block}}}"


NOT_FINITE = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


def _number(value: float) -> str:
    text = repr(float(value))
    return NOT_FINITE.get(text, text)
