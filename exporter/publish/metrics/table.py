"""The table of exported metrics and the collector that fills it from the latest reading.

`METRICS` is the only place for an exported metric's name, type and labels; the help of a signal is in
`exporter.analysis.words`. The collector builds new samples at every scrape from values in memory, without
I/O or waiting. A metric that fails costs only that metric.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Literal

from exporter.analysis import catalogue
from exporter.analysis.engine import ENGINE_VERDICTS
from exporter.analysis.history import KV_BOUNDS
from exporter.analysis.pipeline import EngineReading, TargetReading
from exporter.analysis.words import WORDS
from exporter.publish.metrics.samples import PREFIX, Labels, MetricRow, RowCollector, Samples, histogram

__all__ = [
    "EXPORTER_METRICS", "METRICS", "PREFIX", "SERIES_PER_ENGINE", "TARGET_VERDICTS", "MetricRow", "ReadingCollector",
]  # fmt: skip

# No engine has more series than this, whatever holds.
SERIES_PER_ENGINE: Final = 94
# More findings or fixes than these are not exported; they stand in the API and on the page.
MOST_FINDINGS: Final = 2
MOST_FIXES: Final = 4
_MOST_VALUES: Final = 3
_ENGINE: Final = ("model_name", "engine")
_INFO: Final = ("vllm_version", "names_since", "cache_dtype", "block_size")


def _signal(name: str) -> MetricRow:
    """Return the row of a signal, in the words of its table; a name in ``_total`` is a counter."""
    kind: Literal["counter", "gauge"] = "counter" if name.endswith("_total") else "gauge"
    return MetricRow(name.removesuffix("_total"), kind, _ENGINE, WORDS[name].help, name)


METRICS: Final[tuple[MetricRow, ...]] = (
    # The target.
    MetricRow("up", "gauge", (), "1 if the last poll of vLLM's metrics succeeded, otherwise 0."),
    MetricRow("last_success_timestamp_seconds", "gauge", (), "Unix time of the last successful poll. Absent before the first."),
    MetricRow("engines", "gauge", (), "Engines in the last successful poll. Absent before the first."),
    MetricRow("engines_missing", "gauge", (), "Engines seen within the last hour that the last successful poll lacked."),
    MetricRow("restarts", "counter", (), "New server processes seen: another process start time, or counters that fell."),
    MetricRow("engine", "info", (*_ENGINE, *_INFO), "Version and KV cache of the engine. `vllm_version` is what the server answered, `names_since` the oldest release that prints these names."),
    # Verdicts.
    MetricRow("verdict", "gauge", (*_ENGINE, "verdict"), "1 if this is the engine's current verdict, otherwise 0."),
    MetricRow("severity", "gauge", _ENGINE, "Severity of the engine's current verdict: 0 none, 1 info, 2 warning, 3 critical."),
    MetricRow("verdict_seconds", "counter", (*_ENGINE, "verdict"), "Seconds in each verdict since the exporter first saw the engine; its rate is a share of time."),
    MetricRow("finding", "gauge", (*_ENGINE, "finding"), "1 for each finding that currently applies to the engine."),
    MetricRow("fix_rank", "gauge", (*_ENGINE, "fix"), "Rank of each advised fix; 1 is the first: the best by a simulation that matches the server, else the cheapest."),
    MetricRow("gateway_limit_requests", "gauge", _ENGINE, "Requests to allow at once at a gateway: the seats that help by a trusted forecast, else the most that ran without preemption, where more are in flight now. +Inf where a forecast says that a limit costs throughput. Absent where unknown or of no use."),
    MetricRow("fix_value", "gauge", (*_ENGINE, "fix"), "Value for the flag of each advised fix. Absent where none is known."),
    MetricRow("fix_gain_ratio", "gauge", (*_ENGINE, "fix"), "Tokens per second after each advised fix / now, by a simulation that matches the server. Absent without one."),
    MetricRow("fix_pair_gain_ratio", "gauge", (*_ENGINE, "fix"), "Tokens per second after both of two fixes / now, for each of the two: together they suffice by a simulation that matches the server, where no fix does alone. Absent otherwise."),
    MetricRow("recomputed_tokens_per_second", "gauge", _ENGINE, "Tokens computed again after preemptions per second, by a simulation of at least 30 s of load that matches the server. Absent without one."),
    MetricRow("recomputed_gpu_time_ratio", "gauge", _ENGINE, "Share of GPU time that computes tokens again after preemptions, 0-1: a lower bound by a simulation that matches the server. Absent without one."),
    MetricRow("recomputed_cost_per_hour", "gauge", _ENGINE, "Share of GPU time that computes tokens again * gpu.hourly_price * GPUs of the engine: a lower bound of the cost of preemptions per hour. Absent without a price or a simulation."),
    MetricRow("saturation_ratio", "gauge", (*_ENGINE, "resource"), 'Demand divided by capacity, averaged over analysis.window (1 = full). resource="kv": tokens that all running and waiting requests would hold / KV capacity; resource="seats": running and waiting requests / seats; refused requests are added as if they ran and waited too. Absent when unknown.'),
    MetricRow("target_verdict", "gauge", ("verdict",), "1 if this is the target's current verdict, otherwise 0. A target is reachable where an engine can be read."),
    MetricRow("target_severity", "gauge", (), "The worst severity of the target, its engines and its models: 0 none, 1 info, 2 warning, 3 critical."),
    MetricRow("target_finding", "gauge", ("finding",), "1 for each finding that currently applies to the target."),
    MetricRow("model_finding", "gauge", ("model_name", "finding"), "1 for each finding that currently applies to the engines of a model together."),
    # Signals.
    *map(_signal, (
        "kv_usage_ratio", "kv_usage_max_ratio", "kv_usage_mean_ratio", "kv_capacity_tokens",
        "kv_max_concurrency", "kv_seconds_to_full",
    )),
    MetricRow("kv_usage_polled_ratio", "histogram", _ENGINE, "KV cache usage of every successful poll since the exporter first saw the engine, 0-1."),
    *map(_signal, (
        "preemptions_total", "preemptions_per_second", "preemptions_per_finished_request",
        "recomputed_ratio", "requests_running", "requests_waiting", "requests_deferred",
        "requests_finished_total", "requests_refused_per_second", "generation_tokens_per_second", "inter_token_latency_mean_seconds",
        "prefix_cache_hit_ratio",
    )),
)  # fmt: skip

# The exporter about itself.
EXPORTER_METRICS: Final[tuple[MetricRow, ...]] = (
    MetricRow("exporter_build", "info", ("version", "python"), "Release of the exporter and of the Python that runs it."),
    MetricRow("exporter_polls", "counter", (), "Polls of the target, including failed ones."),
    MetricRow("exporter_polls_skipped", "counter", (), "Polls skipped because the previous one took too long."),
    MetricRow("exporter_poll_errors", "counter", ("reason",), "Failed polls, by reason."),
    MetricRow("exporter_poll_duration_seconds", "histogram", (), "Duration of the polls that the server answered."),
    MetricRow("exporter_poll_interval_seconds", "gauge", (), "Current time between polls; longer than configured while responses are slow to arrive or to read."),
    MetricRow("exporter_body_bytes", "gauge", (), "Size of the last metrics page."),
    MetricRow("exporter_unreadable_lines", "counter", (), "Lines of known names that are invalid, too long or too many."),
    MetricRow("exporter_collect_errors", "counter", ("metric",), "Metrics that could not be built for a scrape, by name."),
    MetricRow("exporter_targets", "gauge", ("source",), "Targets that are watched, by source. Absent with a single configured target."),
    MetricRow("exporter_targets_left_out", "gauge", (), "Targets that are ignored: too many, or the same labels as another. Absent with a single configured target."),
    MetricRow("exporter_discovery_failures", "counter", ("source",), "Look-ups and files that returned no targets, by source; the known targets are kept."),
    MetricRow("exporter_config_last_reload_successful", "gauge", (), "1 if the last load of the configuration succeeded, otherwise 0."),
    MetricRow("exporter_config_last_reload_success_timestamp_seconds", "gauge", (), "Unix time of the last successful load of the configuration."),
    MetricRow("exporter_notifications", "counter", ("outcome",), "Alerts pushed, counted per Alertmanager and attempt, by outcome: sent, failed (retried), rejected (status 400 and similar), dropped (too late, or too many waiting)."),
)  # fmt: skip

TARGET_VERDICTS: Final = tuple(
    name for name, verdict in catalogue.load().verdicts.items() if verdict.of_target
)


def _known(value: float | None) -> list[tuple[str, float]]:
    return [] if value is None else [("", value)]


# Numbers of an engine, each with the value of the label that a metric has beside those of the engine.
_OF_ENGINE: Final[Mapping[str, Callable[[EngineReading], Iterable[tuple[str, float]]]]] = {
    "verdict": lambda engine: [(name, float(name == engine.judgement.verdict)) for name in ENGINE_VERDICTS],
    "severity": lambda engine: [("", float(engine.judgement.severity.rank))],
    "verdict_seconds": lambda engine: engine.verdict_seconds.items(),
    "finding": lambda engine: [(name, 1.0) for name in engine.findings[:MOST_FINDINGS]],
    "fix_rank": lambda engine: [
        (advice.fix, float(rank)) for rank, advice in enumerate(engine.advice.fixes[:MOST_FIXES], start=1)
    ],
    "gateway_limit_requests": lambda engine: _known(engine.gateway_limit),
    "fix_value": lambda engine: [
        (advice.fix, float(advice.value))
        for advice in engine.advice.fixes[:_MOST_VALUES]
        if isinstance(advice.value, int | float)
    ],
    "fix_gain_ratio": lambda engine: [
        (advice.fix, advice.gain) for advice in engine.advice.fixes[:_MOST_VALUES] if advice.gain is not None
    ],
    "fix_pair_gain_ratio": lambda engine: [
        (advice.fix, advice.together.tokens.mean) for advice in engine.advice.fixes if advice.together
    ],
    "recomputed_tokens_per_second": lambda engine: _known(engine.cost.tokens_per_second),
    "recomputed_gpu_time_ratio": lambda engine: _known(engine.cost.time_ratio),
    "recomputed_cost_per_hour": lambda engine: _known(engine.cost.per_hour),
    "saturation_ratio": lambda engine: engine.saturation.items(),
}
# The same of a target.
_OF_TARGET: Final[Mapping[str, Callable[[TargetReading], Iterable[tuple[str, float]]]]] = {
    "restarts": lambda target: [("", target.restarts)],
    "target_verdict": lambda target: [
        (name, float(name == target.judgement.verdict)) for name in TARGET_VERDICTS
    ],
    "target_severity": lambda target: [("", float(target.severity.rank))],
    "target_finding": lambda target: [(name, 1.0) for name in target.judgement.findings],
}


class ReadingCollector(RowCollector):
    """Exports the latest reading of a target.

    Example of the output for one engine (a part)::

        vllm_pressure_up 1.0
        vllm_pressure_kv_usage_ratio{engine="0",model_name="demo-7b"} 0.97
        vllm_pressure_preemptions_total{engine="0",model_name="demo-7b"} 12.0
    """

    rows = METRICS

    def __init__(
        self,
        latest: Callable[[], TargetReading | None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        on_failure: Callable[[str], None] = lambda _name: None,
        labels: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Take clocks and readings as parameters.

        Args:
            latest: the last reading, None before the first poll has ended.
            clock: the clock by which readings are timed.
            wall_clock: unix seconds.
            on_failure: called with the name of a metric that could not be built.
            labels: of every series, where there are several targets.
        """
        super().__init__(on_failure)
        self._latest = latest
        self._clock = clock
        self._wall_clock = wall_clock
        self._labels = Labels(labels)
        self._of: dict[object, Labels] = {}
        self._reading: TargetReading | None = None
        self._now = 0.0
        self._special: Mapping[str, Callable[[TargetReading], Samples | None]] = {
            "up": self._up,
            "last_success_timestamp_seconds": self._last_success,
            "engines": partial(self._count, missing=False),
            "engines_missing": partial(self._count, missing=True),
            "engine": self._info,
            "kv_usage_polled_ratio": self._polled,
            "model_finding": self._model_findings,
        }

    def begin(self) -> bool:
        """Keep the latest reading, so that all metrics of one scrape are of one moment."""
        self._reading = reading = self._latest()
        self._now = self._clock()
        if reading is not None and len(self._of) > 2 * len(reading.engines) + len(reading.models):
            self._of.clear()  # of engines that are gone
        return reading is not None

    def samples(self, row: MetricRow) -> Samples | None:
        """Return the samples of one metric."""
        reading = self._reading
        if reading is None:
            return None
        special = self._special.get(row.name)
        if special:
            return special(reading)
        suffix = "_total" if row.type == "counter" else ""
        if row.name in _OF_TARGET:
            label = "".join(row.labels)
            return [(suffix, self._labels, label, *pair) for pair in _OF_TARGET[row.name](reading)]
        if row.name in _OF_ENGINE:
            return self._numbers(row, suffix, reading)
        return self._signal(row, suffix, reading)

    def _whose(self, engine: EngineReading) -> Labels:
        key = engine.key
        labels = self._of.get(key)
        if labels is None:
            labels = self._of[key] = self._labels.also(model_name=key.model, engine=key.name)
        return labels

    def _signal(self, row: MetricRow, suffix: str, reading: TargetReading) -> Samples | None:
        """Return the samples of a signal: of counters always, of measured values until they are too old."""
        found: Samples = []
        for engine in reading.engines.values():
            value = getattr(engine.signals, row.signal)
            if value is not None and (suffix or self._is_fresh(engine, reading)):
                found.append((suffix, self._whose(engine), "", "", value))
        return found or None

    def _numbers(self, row: MetricRow, suffix: str, reading: TargetReading) -> Samples:
        label = "".join(row.labels[len(_ENGINE) :])
        return [
            (suffix, self._whose(engine), label, *pair)
            for engine in reading.engines.values()
            if row.name != "saturation_ratio" or self._is_fresh(engine, reading)
            for pair in _OF_ENGINE[row.name](engine)
        ]

    def _is_fresh(self, engine: EngineReading, reading: TargetReading) -> bool:
        """Whether measured values are recent; a poller that hangs makes no new reading."""
        return self._now - engine.seen_at <= reading.max_age

    def _up(self, reading: TargetReading) -> Samples:
        return self._single(float(reading.up and self._now - reading.t <= reading.max_age))

    def _last_success(self, reading: TargetReading) -> Samples | None:
        if reading.good_at is None:
            return None
        return self._single(self._wall_clock() - (self._clock() - reading.good_at))

    def _count(self, reading: TargetReading, *, missing: bool) -> Samples | None:
        if reading.good_at is None:
            return None
        return self._single(sum(engine.missing is missing for engine in reading.engines.values()))

    def _single(self, value: float) -> Samples:
        return [("", self._labels, "", "", value)]

    def _info(self, reading: TargetReading) -> Samples:
        found: Samples = []
        for engine in reading.engines.values():
            cache = engine.cache
            release = engine.server_facts.facts.get("vllm_version")
            since = ".".join(map(str, engine.version))
            key = (engine.key, release, since, cache and cache.cache_dtype, cache and cache.block_size)
            labels = self._of.get(key)
            if labels is None:
                words = (str(value or "") for value in key[1:])
                known = {name: word for name, word in zip(_INFO, words, strict=True) if word}
                labels = self._of[key] = self._whose(engine).also(**known)
            found.append(("_info", labels, "", "", 1))
        return found

    def _model_findings(self, reading: TargetReading) -> Samples:
        return [
            ("", self._labels.also(model_name=model), "finding", name, 1.0)
            for model, of_model in reading.models.items()
            for name in of_model.findings
        ]

    def _polled(self, reading: TargetReading) -> Samples:
        found: Samples = []
        for engine in reading.engines.values():
            found += histogram(self._whose(engine), _KV_BOUNDS, engine.kv_polls, engine.kv_sum)
        return found


_KV_BOUNDS: Final = (*map(str, KV_BOUNDS), "+Inf")
