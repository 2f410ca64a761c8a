"""The sections of the configuration: each option once, with its kind, default and help; and the table of all."""

# ruff: noqa: D102, E501, RUF009 - conflicts() is described in Section; one row per option; option() and section()
# are dataclasses.field() with a typed default

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from exporter.config import kinds
from exporter.config.facts import DAY, HOUR, MANY, Fact
from exporter.config.options import (
    BOOLEAN,
    SECRET,
    TEXT,
    Option,
    Secret,
    Section,
    choice,
    duration,
    number,
    option,
    options_of,
    section,
    size,
    whole,
)

# fmt: off

@dataclass(frozen=True, slots=True)
class TlsConfig(Section):
    """TLS of a connection: how the server is verified, and the exporter's own certificate."""

    ca_file: str | None = option(None, TEXT, "file of trusted authorities (PEM) instead of the system's")
    cert_file: str | None = option(None, TEXT, "client certificate (PEM; may hold its key too)")
    key_file: str | None = option(None, TEXT, "key of the client certificate (PEM), if not in cert_file")
    server_name: str | None = option(None, TEXT, "name that the certificate must contain instead of the host's")
    insecure_skip_verify: bool = option(False, BOOLEAN, "accept any certificate; for tests only")

    def conflicts(self) -> Iterable[str]:
        if self.key_file and not self.cert_file:
            yield "key_file: a key without cert_file has no effect"


@dataclass(frozen=True, slots=True)
class TargetConfig(Section):
    """One vLLM server: the address of its metrics, the credentials, the settings that the operator knows."""

    url: str = option("http://127.0.0.1:8000/metrics", kinds.URL, "address of vLLM's metrics; /metrics is the default path")
    facts: Mapping[str, Fact] = option({}, kinds.SERVER_FACTS, "settings that the server runs with, for advice with numbers", key="config")
    headers: Mapping[str, Secret] = option({}, kinds.HEADERS, "headers sent with every request; values are secret")
    bearer_token: Secret | None = option(None, SECRET, "token sent as `Authorization: Bearer`")
    bearer_token_file: str | None = option(None, TEXT, "file with the token; read again when it changes")
    tls: TlsConfig = section(TlsConfig)
    unix_socket: str | None = option(None, TEXT, "unix socket to connect to instead of the url's host")
    labels: Mapping[str, str] = option({}, kinds.TARGET_LABELS, "labels of all its series, such as namespace and pod; adds `target` too")

    def conflicts(self) -> Iterable[str]:
        yield from _ways_to_ask(self)
        if self.tls != TlsConfig() and not self.url.startswith("https://"):
            yield "tls: has no effect on a url that does not begin with https://"


def _ways_to_ask(target: "TargetConfig | AccessConfig") -> Iterable[str]:
    token = "bearer_token" if target.bearer_token else "bearer_token_file" if target.bearer_token_file else ""
    if target.bearer_token and target.bearer_token_file:
        yield "bearer_token: expected either bearer_token or bearer_token_file, got both"
    if token and "authorization" in {name.lower() for name in target.headers}:
        yield f"{token}: expected one authorization, got an Authorization header too"


def _same(name: str) -> Any:
    """Declare a field in the same way as `TargetConfig`."""
    of_target = next(one for one in fields(TargetConfig) if one.name == name)
    default: dict[str, Any] = {"default": of_target.default, "default_factory": of_target.default_factory}
    return field(**default, metadata=of_target.metadata)


@dataclass(frozen=True, slots=True)
class AccessConfig(Section):
    """Credentials and known settings of discovered targets: the same for all targets of one entry."""

    facts: Mapping[str, Fact] = _same("facts")
    headers: Mapping[str, Secret] = _same("headers")
    bearer_token: Secret | None = _same("bearer_token")
    bearer_token_file: str | None = _same("bearer_token_file")
    tls: TlsConfig = _same("tls")

    def target(self, url: str) -> TargetConfig:
        """The configuration of one discovered target."""
        shared = {each.name: getattr(self, each.name) for each in fields(AccessConfig)}
        return TargetConfig(url=url, **shared if url.startswith("https://") else {**shared, "tls": TlsConfig()})

    def conflicts(self) -> Iterable[str]:
        return _ways_to_ask(self)


@dataclass(frozen=True, slots=True)
class DnsTargetsConfig(AccessConfig):
    """Targets from a name in DNS, one per address: a headless service, for instance."""

    name: str = option("", kinds.HOST_NAME, "name to look up; each of its addresses is a target")
    port: int = option(8000, whole(1, 65535), "port of every target")
    path: str = option("/metrics", kinds.PATH, "path of the metrics")
    scheme: str = option("http", choice("http", "https"), "protocol; with https the certificate must contain the name")
    refresh: float = option(30.0, duration(1, HOUR), "time between look-ups")
    type: str = option("a", kinds.FAMILY, "kind of addresses: a for IPv4, aaaa for IPv6")
    labels: Mapping[str, str] = _same("labels")

    def conflicts(self) -> Iterable[str]:
        yield from _ways_to_ask(self)
        if not self.name:
            yield "name: expected a name to look up, got nothing"
        if self.tls != TlsConfig() and self.scheme != "https":
            yield "tls: has no effect without scheme https"


@dataclass(frozen=True, slots=True)
class FileTargetsConfig(AccessConfig):
    """Targets from files in Prometheus' ``file_sd`` format, which other programs write."""

    files: tuple[str, ...] = option((), kinds.GLOBS, "files in JSON or YAML; relative to this file's folder")
    refresh: float = option(5.0, duration(1, HOUR), "time between checks of the files for changes")

    def conflicts(self) -> Iterable[str]:
        yield from _ways_to_ask(self)
        if not self.files:
            yield "files: expected a list of file names, got nothing"


@dataclass(frozen=True, slots=True)
class EngineConfig(Section):
    """The command line that started the engine."""

    args: Mapping[str, Fact] | None = option(None, kinds.ARGUMENTS, "vLLM's argument line; only settings for advice with numbers are kept, no keys")


@dataclass(frozen=True, slots=True)
class GpuConfig(Section):
    """The price of the GPUs, for what preemptions cost."""

    hourly_price: float | None = option(None, number(0, 1e6), "price of one GPU per hour, in any currency; a forecast then shows the cost of preemptions")
    per_replica: int | None = option(None, whole(1, 4096), "GPUs of one engine; by default tensor x pipeline parallel size where known, else 1")


@dataclass(frozen=True, slots=True)
class WebFileConfig(Section):
    """Access to the exporter's own pages."""

    file: str | None = option(None, TEXT, "file with TLS and basic authentication, in exporter-toolkit's format")


@dataclass(frozen=True, slots=True)
class WebConfig(Section):
    """The exporter's own pages."""

    listen_address: str = option("[::]:21900", kinds.ADDRESS, "address to serve on; [::] includes IPv4, port 0 is any free port")
    enable_lifecycle: bool = option(False, BOOLEAN, "allow POST /-/reload; SIGHUP always reloads")
    config: WebFileConfig = section(WebFileConfig)

    @property
    def host(self) -> str:
        """The host to listen on, without brackets; ``::`` if the address names none."""
        return kinds.split_address(self.listen_address)[0].strip("[]") or "::"

    @property
    def port(self) -> int:
        """The port to listen on; 0 for any free one."""
        return int(kinds.split_address(self.listen_address)[1])


@dataclass(frozen=True, slots=True)
class PollConfig(Section):
    """How targets are polled."""

    interval: float = option(1.0, duration(0.1, 60), "time between polls; a storm builds up in seconds")
    timeout: float = option(3.0, duration(0.1, 60), "time limit of one poll; a busy vLLM took up to 2s")
    max_body_bytes: int = option(8 << 20, size(1 << 10, 1 << 30), "largest body accepted; vLLM's are about 64KiB")
    concurrency: int = option(256, whole(1, 10_000), "polls under way at once, over all targets")
    max_targets: int = option(1000, whole(1, 100_000), "targets beyond this number are ignored, with a warning")


@dataclass(frozen=True, slots=True)
class LogConfig(Section):
    """The log on standard error."""

    level: str = option("info", choice("debug", "info", "warning", "error"), "lowest level that is logged")
    format: str = option("logfmt", choice("logfmt", "json"), "format of a line; json suits log collectors")


@dataclass(frozen=True, slots=True)
class AnalysisConfig(Section):
    """Windows and thresholds of the analysis."""

    window: float = option(60.0, duration(5, HOUR), "span of rates; long enough that one odd poll does not count")
    long_window: float = option(300.0, duration(5, HOUR), "span of ratios per request; answers take minutes")
    max_age: float = option(5.0, duration(1, 600), "readings older than this (and 3 polls) count as unknown")
    startup_grace: float = option(900.0, duration(0, DAY), "no alarm for a server that is still starting; large models load for minutes")
    hold: float = option(30.0, duration(0, HOUR), "minimum time between two changes of a verdict that do not raise its severity")
    # Progress.
    stall_after: float = option(60.0, duration(5, HOUR), "time without progress that counts as a stall")
    deadlock_after: float = option(45.0, duration(5, HOUR), "time with nothing running that counts as a deadlock; mass preemption pauses 15s")
    # Preemption.
    burst_window: float = option(10.0, duration(2, 60), "span in which a sudden storm is detected")
    burst_count: int = option(5, whole(1, 10_000), "preemptions in that span that make a storm")
    thrash_ratio: float = option(0.8, number(0.05, 100), "preemptions per finished request that make a storm; healthy runs had 0.08")
    thrash_leave_ratio: float = option(0.4, number(0.0, 100), "preemptions per finished request below which a storm ends; storms had 2.4")
    thrash_seconds: float = option(300.0, duration(1, DAY), "a storm preempts each running request more often than once in this time, where no usual level is known")
    tokens_fallen: float = option(0.5, number(0.05, 1), "tokens/s below this share of the engine's usual level count as harm")
    latency_grown: float = option(2.0, number(1.1, 100), "end-to-end or inter-token latency above this many times the engine's usual level counts as harm")
    light_for: float = option(90.0, duration(5, HOUR), "keep reporting preemption_light this long after the last preemption")
    light_ratio: float = option(0.03, number(0.0, 1), "fewer preemptions per finished request than this are ignored")
    kv_full: float = option(0.9, number(0.5, 1), "KV usage that counts as full if request lengths are unknown")
    kv_roomy: float = option(0.75, number(0.1, 1), "KV usage below which a preemption had another cause; storms reach 1")
    # Queue.
    queue_window: float = option(15.0, duration(5, HOUR), "time that a queue must last; bursts drain in seconds")
    queue_share: float = option(0.8, number(0.1, 1), "share of polls with a queue that makes it last")
    queue_leave_share: float = option(0.3, number(0.0, 1), "share of polls with a queue below which it has drained")
    seats_share: float = option(0.6, number(0.1, 1), "share of polls at the seat limit, or one below, that makes seats the cause")
    deferred_share: float = option(0.5, number(0.1, 1), "share of waiting requests that wait for something other than capacity")
    drain_critical: float = option(600.0, duration(10, DAY), "time to drain beyond which a deferred queue is critical")
    budget_share: float = option(0.75, number(0.1, 1), "share of max_num_batched_tokens above which a step counts as full")
    # Pressure.
    pressure_horizon: float = option(300.0, duration(10, HOUR), "warn if the KV cache will be full within this time")
    pressure_kv: float = option(0.6, number(0.1, 1), "KV usage below which a fast rise is ignored; a load that starts")
    held_after: float = option(60.0, duration(5, HOUR), "time that KV must be held by an idle engine to be reported")
    held_kv: float = option(0.1, number(0.0, 1), "KV usage of an idle engine below which nothing is reported")
    runaway_after: float = option(600.0, duration(60, HOUR), "time without a finished request that counts as runaway")
    runaway_tokens: int = option(10_000, whole(1, MANY), "tokens per running request in that time that count as runaway")
    slow_factor: float = option(1.6, number(1.05, 100), "latency, as a multiple of the engine's usual one at this load, that is slow")
    # Life cycle, models.
    restart_shown: float = option(300.0, duration(10, DAY), "how long the restarted finding is shown")
    oom_utilization: float = option(0.94, number(0.1, 1), "gpu_memory_utilization from which memory outside the KV cache is short")
    imbalance_factor: float = option(1.6, number(1.05, 100), "load, as a multiple of the mean, that is an imbalance")
    imbalance_requests: int = option(8, whole(2, MANY), "no imbalance is reported with fewer requests than this")

    def conflicts(self) -> Iterable[str]:
        if self.long_window < self.window:
            yield "long_window: expected at least analysis.window, got less"


@dataclass(frozen=True, slots=True)
class BasicAuthConfig(Section):
    """User name and password."""

    username: str | None = option(None, TEXT, "user name for HTTP basic authentication")
    password: Secret | None = option(None, SECRET, "password of that user")
    password_file: str | None = option(None, TEXT, "file with the password; read again when it changes")

    def conflicts(self) -> Iterable[str]:
        given = [name for name in ("password", "password_file") if getattr(self, name)]
        if len(given) > 1:
            yield "password: expected either password or password_file, got both"
        if self.username and ":" in self.username:
            yield "username: expected a name without a colon, which separates it from the password"
        if bool(self.username) != bool(given):
            yield "username: expected a username with password or password_file, got only one of the two"


@dataclass(frozen=True, slots=True)
class AlertmanagerConfig(Section):
    """Alerts pushed directly to Alertmanager, without Prometheus' rules. Off without urls."""

    urls: tuple[str, ...] = option((), kinds.URLS, "Alertmanagers to push to; list every member of an HA set, not a service")
    path_prefix: str = option("", kinds.PREFIX, "path before /api/v2/alerts, such as Mimir's /alertmanager")
    tenant: str | None = option(None, kinds.TENANT, "tenant, sent as X-Scope-OrgID for Mimir")
    headers: Mapping[str, Secret] = option({}, kinds.HEADERS, "headers sent with every push; values are secret")
    basic_auth: BasicAuthConfig = section(BasicAuthConfig)
    bearer_token: Secret | None = option(None, SECRET, "token sent as `Authorization: Bearer`")
    bearer_token_file: str | None = option(None, TEXT, "file with the token; read again when it changes")
    tls: TlsConfig = section(TlsConfig)
    timeout: float = option(5.0, duration(0.1, 60), "time limit of one push; polls never wait for it")
    hold: float = option(30.0, duration(0, HOUR), "time that a condition must last before its alert; short blips are ignored")
    keep: float = option(900.0, duration(0, HOUR), "longest time that an alert stays after its condition; each stays as long as by the rules")
    resend_interval: float = option(60.0, duration(1, HOUR), "time between repetitions of an active alert; it expires after four of these")
    page_by: str = option("model", choice("model", "engine"), "level at which alerts are critical; use the same value as in the rules")
    external_labels: Mapping[str, str] = option({}, kinds.LABELS, "labels of every alert, such as cluster and pod; ${NAME} is read from the environment")
    runbook_base: str | None = option(None, kinds.BASE_URL, "address of the runbooks instead of the project's pages")
    dashboard_base: str | None = option(None, kinds.BASE_URL, "address of Grafana; alerts then link to a dashboard")

    def conflicts(self) -> Iterable[str]:
        headers = {name.lower() for name in self.headers}
        ways = [name for name in ("bearer_token", "bearer_token_file") if getattr(self, name)]
        ways += ["basic_auth"] if self.basic_auth.username else []
        ways += ["headers.Authorization"] if "authorization" in headers else []
        if len(ways) > 1:
            yield f"{ways[0]}: expected one authorization, got {' and '.join(ways[1:])} too"
        if self.tenant and "x-scope-orgid" in headers:
            yield "tenant: expected one tenant, got an X-Scope-OrgID header too"
        if self.urls and self.tls != TlsConfig() and not any(url.startswith("https://") for url in self.urls):
            yield "tls: has no effect without a url that begins with https://"


@dataclass(frozen=True, slots=True)
class WhatIfConfig(Section):
    """Forecasts: how much is simulated, and the thresholds of their verdicts."""

    seeds: int = option(3, whole(1, 100), "simulations per change; their spread is shown")
    time_limit: float = option(300.0, duration(1, HOUR), "time limit of a forecast of `serve`, which leaves most of the CPU to its polls")
    noise: float = option(0.03, number(0, 1), "changes smaller than this share count as no change")
    slower: float = option(0.1, number(0, 10), "a latency increase above this share, without more throughput, is worse")
    preempted: float = option(0.1, number(0, 10), "preemptions per request below which there is no harm; healthy runs had 0.07")
    queued: float = option(1.0, number(0, 1000), "mean number of waiting requests that counts as a queue")
    match: float = option(0.25, number(0, 1), "relative error in preemptions up to which a forecast is trusted")
    match_per_request: float = option(0.05, number(0, 1), "absolute tolerance per request, for low counts")


@dataclass(frozen=True, slots=True)
class Config(Section):
    """The whole configuration. `Config()` holds the defaults."""

    targets: tuple[TargetConfig, ...] = field(default=(TargetConfig(),))
    targets_dns: tuple[DnsTargetsConfig, ...] = field(default=())
    targets_file_sd: tuple[FileTargetsConfig, ...] = field(default=())
    engine: EngineConfig = section(EngineConfig)
    gpu: GpuConfig = section(GpuConfig)
    web: WebConfig = section(WebConfig)
    poll: PollConfig = section(PollConfig)
    log: LogConfig = section(LogConfig)
    analysis: AnalysisConfig = section(AnalysisConfig)
    whatif: WhatIfConfig = section(WhatIfConfig)
    alertmanager: AlertmanagerConfig = section(AlertmanagerConfig)

    def facts_of(self, target: TargetConfig) -> Mapping[str, Fact]:
        """Settings of a target's server: its own, then the GPUs that all targets share."""
        gpu = {"gpu_hourly_price": self.gpu.hourly_price, "gpus_per_replica": self.gpu.per_replica}
        return {**{name: value for name, value in gpu.items() if value is not None}, **target.facts}

    @property
    def alone(self) -> bool:
        """Whether there is one server and no discovery."""
        return len(self.targets) == 1 and not (self.targets_dns or self.targets_file_sd)

    @property
    def is_single(self) -> bool:
        """Whether there is one server without labels, so that series need none."""
        return self.alone and not self.targets[0].labels


OPTIONS: tuple[Option, ...] = (*options_of(TargetConfig, "target."), *options_of(Config, ""))
FILE = Option("config.file", TEXT, None, "YAML file with options; flags and environment override it")
BY_KEY = {row.key: row for row in (FILE, *OPTIONS)}
BY_ENV = {row.env: row for row in (FILE, *OPTIONS)}


def in_file(key: str) -> str:
    """Return the key as the file spells it: there a target is one of several."""
    return key.replace("target.", "targets[0].", 1) if key.startswith("target.") else key
