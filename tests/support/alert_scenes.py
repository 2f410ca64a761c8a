"""One tale per alert that promtool can test: the condition applies, and it nearly applies.

A tale has three versions of its series: quiet, in trouble, and just below trouble. It plays quiet, trouble,
quiet; then again with just below instead of trouble, and nothing may fire.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exporter.analysis.catalogue import Verdict, load
from exporter.analysis.forecast import FORECAST_VERDICTS
from exporter.publish.alerts.table import alerts
from support.promtool_series import TARGET, VLLM_TARGET

# Scrapes of each part.
BEFORE, TROUBLE, AFTER = 16, 50, 75
ENGINE = {"model_name": "demo-7b", "engine": "0"}


@dataclass(frozen=True)
class Tale:
    """One alert's tale.

    Attributes:
        alert: its name.
        severity: its severity; one name may have two.
        steady: series that never change.
        quiet, trouble, below: values of the other series by part. A gauge's value, a counter's slope
            per scrape as ``+5``, or ``gone`` for none.
        sentence: its subject, if it is not the first tale of its alert.
        exact: whether the condition applies from the first scrape of the trouble.
    """

    alert: str
    severity: str
    quiet: Mapping[str, str]
    trouble: Mapping[str, str]
    below: Mapping[str, str]
    steady: Mapping[str, str] = field(default_factory=dict)
    sentence: str = ""
    exact: bool = False

    @property
    def name(self) -> str:
        """Return the name for the test and the golden file."""
        return f"{self.alert}{'-' + self.sentence.replace(' ', '-') if self.sentence else ''}"

    def series(self, *parts: tuple[Mapping[str, str], int]) -> list[dict[str, str]]:
        """Return the input of promtool: the parts one after the other, each for some scrapes."""
        total = sum(count for _, count in parts)
        rows = [{"series": name, "values": _steady(value, total)} for name, value in self.steady.items()]
        names = dict.fromkeys(itertools.chain(self.quiet, self.trouble, self.below))
        return rows + [
            {"series": name, "values": _joined([(part.get(name, "gone"), count) for part, count in parts])}
            for name in names
        ]

    def whole(self) -> list[dict[str, str]]:
        """Return the series of quiet, trouble, quiet."""
        return self.series((self.quiet, BEFORE), (self.trouble, TROUBLE), (self.quiet, AFTER))

    def nearly(self) -> list[dict[str, str]]:
        """Return the series of quiet, just below, quiet."""
        return self.series((self.quiet, BEFORE), (self.below, TROUBLE), (self.quiet, AFTER))

    def short(self, scrapes: int) -> list[dict[str, str]]:
        """Return the series with trouble for some scrapes only."""
        return self.series((self.quiet, BEFORE), (self.trouble, scrapes), (self.quiet, AFTER))


def _steady(value: str, count: int) -> str:
    if value == "Inf":  # promtool repeats only finite numbers
        return " ".join([value] * count)
    return f"0{value}x{count - 1}" if value.startswith("+") else f"{value}x{count - 1}"


def _joined(parts: Iterable[tuple[str, int]]) -> str:
    """Join the values of a series, part by part; a counter continues, or begins anew after it was gone."""
    words, counter = [], 100.0
    for value, count in parts:
        if value == "gone":
            words += ["stale", f"_x{count - 1}"]
            counter = 0.0
        elif value.startswith("+"):
            slope = float(value[1:])
            words.append(f"{counter + slope:g}+{slope:g}x{count - 1}")
            counter += slope * count
        else:
            words.append(f"{value}x{count - 1}")
    return " ".join(words)


def of(name: str, target: Mapping[str, str] = TARGET, **labels: str) -> str:
    """Return a series by its text."""
    both = {**labels, **target}
    return f"{name}{{{','.join(f'{label}={_quoted(value)}' for label, value in both.items())}}}"


def _quoted(value: str) -> str:
    return f'"{value}"'


def pod(number: int, target: Mapping[str, str] = TARGET) -> dict[str, str]:
    """Return the labels of another pod's target."""
    port = target["instance"].rpartition(":")[2]
    return {**target, "pod": f"vllm-{number}", "instance": f"10.0.0.{number + 1}:{port}"}


# --- the sidecar's series -----------------------------------------------------------------------------

NUMBERS = {
    of("vllm_pressure_kv_usage_max_ratio", **ENGINE): "0.974",
    of("vllm_pressure_requests_running", **ENGINE): "8",
    of("vllm_pressure_requests_waiting", **ENGINE): "23",
    of("vllm_pressure_preemptions_per_second", **ENGINE): "5.126",
    of("vllm_pressure_preemptions_per_finished_request", **ENGINE): "2.58",
    of("vllm_pressure_recomputed_ratio", **ENGINE): "0.312",
    of("vllm_pressure_generation_tokens_per_second", **ENGINE): "1501",
}


# A forecast rejects a limit there, and is not known elsewhere.
UNLIMITED = {"kv_pressure_rising"}


def verdict(name: str, number: int = 0) -> str:
    """Return the series of an engine's verdict."""
    return of("vllm_pressure_verdict", pod(number), **ENGINE, verdict=name)


def ranks(entry: Verdict, number: int = 0) -> dict[str, str]:
    """Return ranked fixes, not in alphabetical order, including one that the verdict does not have.

    Those whose flag takes a value have one, and the best one has a gain where a forecast can give it.
    """
    fixes = ["lower_max_model_len", *entry.fixes[:3]]
    ranked = {
        of("vllm_pressure_fix_value", pod(number), **ENGINE, fix=fix): "0.05"
        for fix in fixes
        if "{value}" in (load().fixes[fix].flag or "")
    }
    if entry.name in FORECAST_VERDICTS:
        ranked[of("vllm_pressure_fix_gain_ratio", pod(number), **ENGINE, fix=fixes[-1])] = "1.304"
    if entry.name == "kv_bound":
        for fix in fixes[-2:]:
            ranked[of("vllm_pressure_fix_pair_gain_ratio", pod(number), **ENGINE, fix=fix)] = "1.905"
    ranked |= {
        of("vllm_pressure_fix_rank", pod(number), **ENGINE, fix=fix): str(rank)
        for rank, fix in enumerate(reversed(fixes), start=1)
    }
    return dict(sorted(ranked.items()))


def engine_tale(alert: str, severity: str, entry: Verdict) -> Tale:
    """Build the tale of one engine in a verdict; just below is another verdict."""
    return Tale(
        alert,
        severity,
        quiet={verdict(entry.name): "0"},
        trouble={verdict(entry.name): "1"},
        below={verdict(entry.name): "0"},
        steady={
            **NUMBERS,
            **ranks(entry),
            verdict("healthy", 1): "1",
            **(
                {of("vllm_pressure_gateway_limit_requests", **ENGINE): "Inf"}
                if entry.name in UNLIMITED
                else {}
            ),
        },
        exact=True,
    )


def model_tale(alert: str, entry: Verdict) -> Tale:
    """Build the tale of a model: one of ten engines pages; one of eleven does not."""
    ten = {verdict(entry.name, number): "0" for number in range(10)}
    hit = {verdict(entry.name): "1"}
    return Tale(
        alert,
        "critical",
        quiet=ten,
        trouble={**ten, **hit},
        below={**ten, **hit, verdict(entry.name, 10): "0"},
        steady={**NUMBERS, **ranks(entry)},
        exact=True,
    )


def raised_tale(alert: str, entry: Verdict) -> Tale:
    """Build the tale of a model: one of ten engines in a warning that becomes critical pages.

    The warning alone does not, nor does one critical engine of eleven, nor one that is critical in another
    verdict.
    """

    def engines(severity: int, count: int = 10) -> dict[str, str]:
        in_it = {verdict(entry.name, number): "0" for number in range(1, count)}
        return {**in_it, verdict(entry.name): "1", of("vllm_pressure_severity", **ENGINE): str(severity)}

    other = {verdict("unreachable", 1): "1", of("vllm_pressure_severity", pod(1), **ENGINE): "3"}
    return Tale(
        alert,
        "critical",
        quiet=engines(2),
        trouble=engines(3),
        below=engines(3, 11),
        steady={
            **NUMBERS,
            **ranks(entry),
            **other,
            of("vllm_pressure_gateway_limit_requests", **ENGINE): "20",
        },
        exact=True,
    )


def target_tale(alert: str, severity: str, entry: Verdict) -> Tale:
    """Build the tale of a server whose engines cannot be read."""
    series = of("vllm_pressure_target_verdict", verdict=entry.name)
    engine = of("vllm_pressure_verdict", **ENGINE, verdict=entry.name)
    known = {series: "1", engine: "1" if entry.name == "metrics_missing" else "0"}
    below = known if severity == "critical" else {series: "0"}
    sentence = "of a server never read"
    return Tale(alert, severity, {series: "0"}, {series: "1"}, below, sentence=sentence, exact=True)


def sidecar_tales() -> list[Tale]:
    """Build a tale for every rule over the sidecar's series."""
    tales = []
    for alert in alerts():
        entry, severity = alert.entry, alert.severity.value
        if isinstance(entry, Verdict) and alert.scope == "engine":
            tales.append(engine_tale(alert.name, severity, entry))
        elif isinstance(entry, Verdict) and alert.scope == "model":
            make = raised_tale if entry.critical_when else model_tale
            tales.append(make(alert.name, entry))
        elif isinstance(entry, Verdict):
            tales.append(target_tale(alert.name, severity, entry))
    return [*tales, *FINDINGS, *WATCHING]


_MISSING = of("vllm_pressure_engines_missing")
_IMBALANCE = of("vllm_pressure_model_finding", model_name="demo-7b", finding="dp_imbalance")
_REFUSED = of("vllm_pressure_finding", **ENGINE, finding="requests_refused")
_BUILD = of("vllm_pressure_exporter_build_info", version="1.0.0")
_UP = of("up")
FINDINGS = [
    Tale("VllmEngineMissing", "warning", {_MISSING: "0"}, {_MISSING: "2"}, {_MISSING: "0"}, exact=True),
    Tale("VllmRequestsRefused", "warning", {}, {_REFUSED: "1"}, {}, exact=True),
    Tale("VllmDpImbalance", "warning", {}, {_IMBALANCE: "1"}, {}, exact=True),
]
OTHER = {**TARGET, "job": "prod/vllm-pods"}
WATCHING = [
    Tale(
        "VllmExporterDown",
        "warning",
        {_UP: "1", _BUILD: "1"},
        {_UP: "0"},
        {_UP: "1", _BUILD: "1"},
        exact=True,
    ),
    Tale(
        "VllmExporterDown",
        "warning",
        quiet={of("up", OTHER): "1", of("vllm_pressure_exporter_build_info", OTHER): "1"},
        trouble={of("up", OTHER): "0"},
        # Another target that is down and never was an exporter.
        below={
            of("up", OTHER): "1",
            of("vllm_pressure_exporter_build_info", OTHER): "1",
            of("up", {**TARGET, "job": "node", "instance": "10.0.0.9:9100"}): "0",
        },
        sentence="of a job with another name",
        exact=True,
    ),
    Tale(
        "VllmExporterAbsent",
        "warning",
        quiet={_UP: "1", _BUILD: "1"},
        trouble={},
        below={of("up", OTHER): "1", of("vllm_pressure_exporter_build_info", OTHER): "1"},
    ),
]


# --- vLLM's own series --------------------------------------------------------------------------------


def vllm(name: str, number: int = 0, **labels: str) -> str:
    """Return one of vLLM's own series."""
    return of(f"vllm:{name}", pod(number, VLLM_TARGET), **ENGINE, **labels)


def busy(number: int = 0, **changed: str) -> dict[str, str]:
    """Return a busy, healthy engine, with changes."""
    values = {
        "running": "20",
        "waiting": "0",
        "deferred": "0",
        "kv": "0.6",
        "preempted": "+0",
        "finished": "+15",
        "tokens": "+3000",
        "prompts": "+6000",
        "steps": "+300",
        "between": "+150",
        "between_count": "+3000",
        "hits": "+0",
        "up": "1",
        **changed,
    }
    names = {
        "running": vllm("num_requests_running", number),
        "waiting": vllm("num_requests_waiting", number),
        "deferred": vllm("num_requests_waiting_by_reason", number, reason="deferred"),
        "kv": vllm("kv_cache_usage_perc", number),
        "preempted": vllm("num_preemptions_total", number),
        "finished": vllm("request_success_total", number, finished_reason="stop"),
        "tokens": vllm("generation_tokens_total", number),
        "prompts": vllm("prompt_tokens_total", number),
        "steps": vllm("iteration_tokens_total_count", number),
        "between": vllm("inter_token_latency_seconds_sum", number),
        "between_count": vllm("inter_token_latency_seconds_count", number),
        "hits": vllm("prefix_cache_hits_total", number),
        "up": of("up", pod(number, VLLM_TARGET)),
    }
    return {names[part]: value for part, value in values.items()}


# The scrape fails: only `up` remains.
DOWN = {of("up", VLLM_TARGET): "0"}
STILL = {"tokens": "+0", "prompts": "+0", "steps": "+0", "finished": "+0"}
NONE_RUNS = {"running": "0", "kv": "0"}
STORM = {
    "running": "8",
    "waiting": "23",
    "kv": "0.97",
    "preempted": "+25",
    "finished": "+30",
    "tokens": "+1000",
}
TROUBLES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    # Trouble, and just below it.
    "EngineStalled": ({**STILL, "kv": "0.6"}, {**STILL, "steps": "+1"}),
    "SchedulerDeadlock": ({**STILL, **NONE_RUNS, "waiting": "5"}, {**STILL, **NONE_RUNS}),
    "PreemptionThrash": (STORM, {**STORM, "preempted": "+23"}),
    "KvBound": ({"waiting": "9", "kv": "0.95"}, {"waiting": "9", "kv": "0.89"}),
    "SeatBound": ({"waiting": "9"}, {"waiting": "9", "kv": "0.8"}),
    "DeferredWait": ({"waiting": "9", "deferred": "6"}, {"waiting": "9", "deferred": "4", "kv": "0.85"}),
    "QueueNotKv": ({"waiting": "9", "running": "3"}, {"waiting": "9", "running": "3", "kv": "0.8"}),
}  # fmt: skip
# A storm with as many preemptions that costs next to nothing; the same with one harm each, and just below it.
# The calm before is so short that its rates are low: 151 tokens/s and 32 s, not 200 and 20.
_HARMLESS = {**STORM, "tokens": "+2900", "waiting": "12"}
HARM = [
    ({**STORM, "tokens": "+1100"}, {**STORM, "tokens": "+1160"}, "with fewer tokens"),
    ({**_HARMLESS, "between": "+310"}, {**_HARMLESS, "between": "+290"}, "with slower tokens"),
    ({**_HARMLESS, "running": "121"}, {**_HARMLESS, "running": "111"}, "with slower answers"),
    (
        # One large request: too few to tell by the time in the server.
        {**_HARMLESS, "running": "1", "waiting": "0", "finished": "+0", "tokens": "+100"},
        {**_HARMLESS, "running": "1", "waiting": "0", "finished": "+0.4", "tokens": "+100"},
        "and nothing finishes",
    ),
]
# Servers that were never seen calm: much is computed twice, or prompts are most of the work.
_NEW = [
    ({**STORM, "prompts": "+340"}, {**STORM, "prompts": "+390"}, {}, "on a new server"),
    (
        {**STORM, "prompts": "+9000", "hits": "+8660"},
        {**STORM, "prompts": "+9000", "hits": "+8610"},
        {},
        "with prompts from the cache",
    ),
    # Calm times with a third of the requests tell nothing about so many.
    ({**STORM, "prompts": "+340"}, {**STORM, "prompts": "+390"}, {"running": "7"}, "that was idle before"),
]
PAGING = ("EngineStalled", "SchedulerDeadlock", "PreemptionThrash")


def native_tales() -> list[Tale]:
    """Build a tale for every rule over vLLM's own series."""
    tales = []
    for name, (trouble, below) in TROUBLES.items():
        if name in PAGING:
            tales.append(_native_model(name, trouble))
        tales.append(Tale(f"VllmNative{name}", "warning", busy(), busy(**trouble), busy(**below)))
    storms = [*(_native_model("PreemptionThrash", *pair) for pair in HARM), *_never_seen_calm()]
    return [*tales, *storms, *NATIVE]


def _never_seen_calm() -> Iterable[Tale]:
    """Build the tales of pages for storms of engines without a level of their own."""
    for trouble, below, before, sentence in _NEW:
        quiet = busy(**before, tokens="+700") if before else {}
        parts = quiet, busy(**trouble), busy(**below)
        yield Tale("VllmNativeModelPreemptionThrash", "critical", *parts, sentence=sentence)


def _native_model(
    name: str, trouble: dict[str, str], below: dict[str, str] | None = None, sentence: str = ""
) -> Tale:
    """Build the tale of a page; just below it is one engine more, or that engine with other values."""
    ten = {series: value for number in range(10) for series, value in busy(number).items()}
    nearly = {**ten, **busy(**trouble), **busy(10)} if below is None else {**ten, **busy(**below)}
    whole = {**ten, **busy(**trouble)}
    return Tale(f"VllmNativeModel{name}", "critical", ten, whole, nearly, sentence=sentence)


_TEN = {series: value for number in range(1, 10) for series, value in busy(number).items()}
NATIVE = [
    # Just below: the pod disappears with its target, as in every roll-out.
    Tale("VllmNativeModelUnreachable", "critical", {**busy(), **_TEN}, {**DOWN, **_TEN}, _TEN, exact=True),
    Tale("VllmNativeUnreachable", "warning", busy(), DOWN, {}, exact=True),
    Tale(
        "VllmNativeMetricsMissing",
        "warning",
        busy(),
        {of("up", VLLM_TARGET): "1"},
        busy(**STILL, running="0"),
        sentence="no series at all",
    ),
    Tale(
        "VllmNativeMetricsMissing",
        "warning",
        busy(),
        {series: value for series, value in busy().items() if "kv_cache" not in series},
        # The gauge's name up to 0.10 also works.
        {series.replace("kv_cache", "gpu_cache"): value for series, value in busy().items()},
    ),
    Tale(
        "VllmNativeRestarted",
        "info",
        {vllm("generation_tokens_total"): "5000"},
        {vllm("generation_tokens_total"): "40"},
        {vllm("generation_tokens_total"): "5000"},
    ),
]
