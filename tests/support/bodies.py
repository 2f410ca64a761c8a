"""Builds metrics bodies as vLLM prints them, with only the series that a test needs.

    body(engine(running=8, waiting=3, kv=0.97, preemptions=12), start_time=1000.0)

Values that are not given are absent from the body, as in real ones: unknown, not zero.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
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

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Engine:
    """The series of one engine."""

    labels: Labels
    values: Mapping[str, object]
    cache: Mapping[str, object] = field(default_factory=dict)

    def families(self) -> Iterator[tuple[str, list[str]]]:
        """Return the comments of each family, and its lines."""
        for parameter, value in self.values.items():
            if value is not None:
                bounds, values = _counts(parameter, value)
                head, series = _printed(parameter, self.labels, bounds)
                yield head, [each + _number(one) for each, one in zip(series, values, strict=True)]
        if self.cache:
            facts = ((name, str(one)) for name, one in self.cache.items())
            labels = ("engine", dict(self.labels)["engine"]), *facts
            yield _head("cache_config_info", "gauge"), [_series("cache_config_info", labels) + "1.0"]


def _counts(parameter: str, value: object) -> tuple[tuple[float, ...], Sequence[float]]:
    """The bounds of the buckets, where the value has them, and the value of each series."""
    if parameter in LENGTHS:
        buckets, total = value
        return tuple(buckets), (*buckets.values(), max(buckets.values()), total)
    if parameter in HISTOGRAMS:
        total, count = value
        return (), (count, count, total)
    return (), (value, value) if parameter == "steps" else (value,)


@functools.lru_cache(maxsize=1 << 10)
def _printed(parameter: str, labels: Labels, bounds: tuple[float, ...]) -> tuple[str, tuple[str, ...]]:
    """The comments of a family, and its series up to their values."""
    if parameter in GAUGES:
        return _family(GAUGES[parameter], "gauge", ("", labels))
    if parameter in REASONS:
        return _family(REASONS[parameter], "gauge", ("", (*labels, ("reason", parameter))))
    if parameter in COUNTERS:
        return _family(COUNTERS[parameter], "counter", ("_total", labels))
    if parameter == "created":
        return _family("generation_tokens_created", "gauge", ("", labels))
    if parameter == "finished":
        return _family("request_success", "counter", ("_total", (*labels, ("finished_reason", "stop"))))
    infinite = "_bucket", (*labels, ("le", "+Inf"))
    if parameter == "steps":
        return _family(STEPS, "histogram", infinite, ("_count", labels))
    ends = ("_count", labels), ("_sum", labels)
    if parameter in HISTOGRAMS:
        return _family(HISTOGRAMS[parameter], "histogram", infinite, *ends)
    buckets = (("_bucket", (*labels, ("le", _number(bound)))) for bound in bounds)
    return _family(LENGTHS[parameter], "histogram", *buckets, *ends)


def _family(name: str, kind: str, *series: tuple[str, Labels]) -> tuple[str, tuple[str, ...]]:
    return _head(name, kind), tuple(_series(name + suffix, labels) for suffix, labels in series)


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
    return Engine(tuple(labels.items()), values, cache or {})


def body(*engines: Engine, start_time: float | None = None) -> bytes:
    """Print a metrics body of these engines; with `start_time` it has the start of the server process."""
    lines = []
    if start_time is not None:
        lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {start_time!r}"]
    families: dict[str, list[str]] = {}
    for one in engines:
        for head, printed in one.families():
            families.setdefault(head, []).extend(printed)
    for head, printed in families.items():
        lines += [head, *printed]
    return "\n".join([*lines, ""]).encode()


def cut(whole: bytes, name: str) -> bytes:
    """Cut a body in the middle of the first sample whose name begins with `name`."""
    at = whole.index(b"\nvllm:" + name.encode()) + 1
    return whole[: at + len(name)]


def _series(name: str, labels: Labels) -> str:
    block = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"vllm:{name}{{{block}}} "


def _head(family: str, kind: str) -> str:
    return f"# HELP vllm:{family} (text removed)\n# TYPE vllm:{family} {kind}"


NOT_FINITE = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


def _number(value: float) -> str:
    text = repr(float(value))
    return NOT_FINITE.get(text, text)
