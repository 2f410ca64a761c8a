"""The sections of the configuration: each option stands here once, with its kind, default and help."""

# ruff: noqa: RUF009 - option() and section() are dataclasses.field() with a typed default

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from exporter.config import kinds
from exporter.config.facts import DAY, HOUR, MANY, Fact
from exporter.config.options import (
    BOOLEAN,
    SECRET,
    TEXT,
    Secret,
    Section,
    choice,
    duration,
    number,
    option,
    section,
    size,
    whole,
)


@dataclass(frozen=True, slots=True)
class TlsConfig(Section):
    """How an ``https`` target is verified, and how the exporter shows who it is."""

    ca_file: str | None = option(None, TEXT, "authorities to trust (PEM) instead of the system's")
    cert_file: str | None = option(None, TEXT, "client certificate (PEM; may hold its key too)")
    key_file: str | None = option(None, TEXT, "key of the client certificate (PEM), if not in cert_file")
    server_name: str | None = option(None, TEXT, "name that the certificate must bear instead of the host")
    insecure_skip_verify: bool = option(False, BOOLEAN, "accept any certificate; for trying things out only")

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
        if self.key_file and not self.cert_file:
            yield "key_file: a key without cert_file has no effect"


@dataclass(frozen=True, slots=True)
class TargetConfig(Section):
    """One vLLM server: where its metrics are, how to ask for them, what is known about it."""

    url: str = option(
        "http://127.0.0.1:8000/metrics", kinds.URL, "vLLM's metrics; /metrics is the default path"
    )
    facts: Mapping[str, Fact] = option(
        {}, kinds.SERVER_FACTS, "what it runs with, for advice in numbers", key="config"
    )
    headers: Mapping[str, Secret] = option(
        {}, kinds.HEADERS, "headers sent with every request; values are secret"
    )
    bearer_token: Secret | None = option(None, SECRET, "token sent as `Authorization: Bearer`")
    bearer_token_file: str | None = option(None, TEXT, "file with the token; read again when it changes")
    tls: TlsConfig = section(TlsConfig)
    unix_socket: str | None = option(None, TEXT, "unix socket to connect to instead of the url's host")
    labels: Mapping[str, str] = option(
        {},
        kinds.TARGET_LABELS,
        "labels of all its series, such as namespace and pod; with them comes `target`",
    )

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
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
    """Declare a field as `TargetConfig` has it."""
    of_target = next(one for one in fields(TargetConfig) if one.name == name)
    default: dict[str, Any] = {"default": of_target.default, "default_factory": of_target.default_factory}
    return field(**default, metadata=of_target.metadata)


@dataclass(frozen=True, slots=True)
class AccessConfig(Section):
    """How discovered targets are asked, and what is known about them: the same for all of one entry."""

    facts: Mapping[str, Fact] = _same("facts")
    headers: Mapping[str, Secret] = _same("headers")
    bearer_token: Secret | None = _same("bearer_token")
    bearer_token_file: str | None = _same("bearer_token_file")
    tls: TlsConfig = _same("tls")

    def target(self, url: str) -> TargetConfig:
        """The configuration of one discovered target."""
        tls = self.tls if url.startswith("https://") else TlsConfig()
        return TargetConfig(
            url=url,
            facts=self.facts,
            headers=self.headers,
            bearer_token=self.bearer_token,
            bearer_token_file=self.bearer_token_file,
            tls=tls,
        )

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
        return _ways_to_ask(self)


@dataclass(frozen=True, slots=True)
class DnsTargetsConfig(AccessConfig):
    """Targets that a name in DNS stands for, one for each address: a headless service, for instance."""

    name: str = option("", kinds.HOST_NAME, "name to look up; every address it has is a target")
    port: int = option(8000, whole(1, 65535), "port of every target")
    path: str = option("/metrics", kinds.PATH, "path of the metrics")
    scheme: str = option("http", choice("http", "https"), "how to ask; a certificate must bear the name")
    refresh: float = option(30.0, duration(1, HOUR), "time between look-ups")
    type: str = option("a", kinds.FAMILY, "which addresses are looked up")
    labels: Mapping[str, str] = _same("labels")

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
        yield from _ways_to_ask(self)
        if not self.name:
            yield "name: expected a name to look up, got nothing"
        if self.tls != TlsConfig() and self.scheme != "https":
            yield "tls: has no effect without scheme https"


@dataclass(frozen=True, slots=True)
class FileTargetsConfig(AccessConfig):
    """Targets that stand in files of Prometheus' ``file_sd`` form, which others write."""

    files: tuple[str, ...] = option((), kinds.GLOBS, "files in JSON or YAML; relative to this file's folder")
    refresh: float = option(5.0, duration(1, HOUR), "how often the files are looked at for changes")

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
        yield from _ways_to_ask(self)
        if not self.files:
            yield "files: expected a list of file names, got nothing"


@dataclass(frozen=True, slots=True)
class EngineConfig(Section):
    """What the engine was started with."""

    args: Mapping[str, Fact] | None = option(
        None, kinds.ARGUMENTS, "vLLM's argument line; only what advice in numbers needs is kept, no keys"
    )


@dataclass(frozen=True, slots=True)
class WebFileConfig(Section):
    """Who may see the exporter's own pages, and over which connections."""

    file: str | None = option(None, TEXT, "TLS and basic authentication, in exporter-toolkit's format")


@dataclass(frozen=True, slots=True)
class WebConfig(Section):
    """The exporter's own pages."""

    listen_address: str = option(
        "[::]:21900", kinds.ADDRESS, "where to serve; [::] is IPv4 too, port 0 any free"
    )
    enable_lifecycle: bool = option(False, BOOLEAN, "answer POST /-/reload; SIGHUP always reloads")
    config: WebFileConfig = section(WebFileConfig)

    @property
    def host(self) -> str:
        """The host to listen on, without brackets; ``::`` where the address names none."""
        return kinds.split_address(self.listen_address)[0].strip("[]") or "::"

    @property
    def port(self) -> int:
        """The port to listen on; 0 is any free one."""
        return int(kinds.split_address(self.listen_address)[1])


@dataclass(frozen=True, slots=True)
class PollConfig(Section):
    """How the target is asked."""

    interval: float = option(1.0, duration(0.1, 60), "time between polls; a storm builds up in seconds")
    timeout: float = option(3.0, duration(0.1, 60), "one poll's limit; a busy vLLM took 2s at the worst")
    max_body_bytes: int = option(8 << 20, size(1 << 10, 1 << 30), "largest body read; vLLM's are some 64KiB")
    concurrency: int = option(256, whole(1, 10_000), "polls under way at once, of all targets")
    max_targets: int = option(
        1000, whole(1, 100_000), "more targets than this are not watched, and it is said"
    )


@dataclass(frozen=True, slots=True)
class LogConfig(Section):
    """The log on standard error."""

    level: str = option("info", choice("debug", "info", "warning", "error"), "least level that is logged")
    format: str = option("logfmt", choice("logfmt", "json"), "form of a line; json is for collectors")


@dataclass(frozen=True, slots=True)
class AnalysisConfig(Section):
    """Windows and thresholds of the analysis."""

    window: float = option(60.0, duration(5, HOUR), "span of rates: a storm shows, one odd poll does not")
    long_window: float = option(300.0, duration(5, HOUR), "span of ratios per request: answers take minutes")
    max_age: float = option(5.0, duration(1, 600), "a reading older than this (and 3 polls) is unknown")
    startup_grace: float = option(900.0, duration(0, DAY), "loading a large model may take a quarter hour")
    hold: float = option(30.0, duration(0, HOUR), "a verdict falls or changes sideways once in this time")
    # Progress.
    stall_after: float = option(60.0, duration(5, HOUR), "so long without progress is a stall")
    deadlock_after: float = option(45.0, duration(5, HOUR), "longer than a mass preemption's pause of 15s")
    # Preemption.
    burst_window: float = option(10.0, duration(2, 60), "span in which a storm is to be seen at once")
    burst_count: int = option(5, whole(1, 10_000), "fewer preemptions in that span are no storm yet")
    thrash_ratio: float = option(0.8, number(0.05, 100), "per finished request: healthy runs had 0.08")
    thrash_leave_ratio: float = option(0.4, number(0.0, 100), "below this a storm is over; storms had 2.4")
    tokens_fallen: float = option(0.5, number(0.05, 1), "share of the engine's own tokens/s that is harm")
    light_for: float = option(90.0, duration(5, HOUR), "one preemption is spoken of for this long")
    light_ratio: float = option(0.03, number(0.0, 1), "per finished request; fewer are hardly any")
    kv_full: float = option(0.9, number(0.5, 1), "full, where request lengths are unknown")
    kv_roomy: float = option(0.75, number(0.1, 1), "preemption below this had another cause; storms reach 1")
    # Queue.
    queue_window: float = option(30.0, duration(5, HOUR), "a queue that lasts; bursts drain in seconds")
    queue_share: float = option(0.8, number(0.1, 1), "share of polls with a queue; odd readings happen")
    queue_leave_share: float = option(0.3, number(0.0, 1), "below this the queue is gone")
    seats_share: float = option(0.6, number(0.1, 1), "share of polls at the limit or one less")
    deferred_share: float = option(0.5, number(0.1, 1), "share of the waiting that waits for something else")
    drain_critical: float = option(600.0, duration(10, DAY), "a deferred queue this long is critical")
    budget_share: float = option(0.75, number(0.1, 1), "steps this full of max_num_batched_tokens are full")
    # Pressure.
    pressure_horizon: float = option(300.0, duration(10, HOUR), "time to full worth a warning: minutes")
    pressure_kv: float = option(0.6, number(0.1, 1), "below this a fast rise is a load that starts")
    held_after: float = option(60.0, duration(5, HOUR), "KV held with nothing to do for this long")
    held_kv: float = option(0.1, number(0.0, 1), "less than this held is not worth a word")
    runaway_after: float = option(600.0, duration(60, HOUR), "so long with nothing finished")
    runaway_tokens: int = option(10_000, whole(1, MANY), "tokens per running request in that time")
    slow_factor: float = option(1.6, number(1.05, 100), "times the engine's own latency at this load")
    # Life cycle, models.
    restart_shown: float = option(300.0, duration(10, DAY), "how long a restart is spoken of")
    oom_utilization: float = option(0.94, number(0.1, 1), "memory outside the KV cache is short from here on")
    imbalance_factor: float = option(1.6, number(1.05, 100), "times the mean load; half of two is 2")
    imbalance_requests: int = option(8, whole(2, MANY), "fewer requests cannot be shared evenly")

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
        if self.long_window < self.window:
            yield "long_window: expected at least analysis.window, got less"


@dataclass(frozen=True, slots=True)
class BasicAuthConfig(Section):
    """A name and a password."""

    username: str | None = option(None, TEXT, "name for HTTP basic authentication")
    password: Secret | None = option(None, SECRET, "its password")
    password_file: str | None = option(None, TEXT, "file with the password; read again at every push")

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
        given = [name for name in ("password", "password_file") if getattr(self, name)]
        if len(given) > 1:
            yield "password: expected either password or password_file, got both"
        if self.username and ":" in self.username:
            yield "username: expected a name without a colon, which separates it from the password"
        if bool(self.username) != bool(given):
            yield "username: expected a username with password or password_file, got only one of the two"


@dataclass(frozen=True, slots=True)
class AlertmanagerConfig(Section):
    """Alerts straight to Alertmanager, without Prometheus' rules. Off until it has urls."""

    urls: tuple[str, ...] = option(
        (), kinds.URLS, "Alertmanagers to push to: of an HA set every one, not a service"
    )
    path_prefix: str = option("", kinds.PREFIX, "path before /api/v2/alerts, such as Mimir's /alertmanager")
    tenant: str | None = option(None, kinds.TENANT, "sent as X-Scope-OrgID, which Mimir wants")
    headers: Mapping[str, Secret] = option(
        {}, kinds.HEADERS, "headers sent with every push; values are secret"
    )
    basic_auth: BasicAuthConfig = section(BasicAuthConfig)
    bearer_token: Secret | None = option(None, SECRET, "token sent as `Authorization: Bearer`")
    bearer_token_file: str | None = option(None, TEXT, "file with the token; read again at every push")
    tls: TlsConfig = section(TlsConfig)
    timeout: float = option(5.0, duration(0.1, 60), "one push's limit; no poll ever waits for it")
    hold: float = option(
        30.0, duration(0, HOUR), "how long it must be so before an alert: a blink pages nobody"
    )
    resend_interval: float = option(
        60.0,
        duration(1, HOUR),
        "how often a lasting alert is told again; untold it ends after four of these",
    )
    page_by: str = option(
        "model", choice("model", "engine"), "whose alert is critical; the same as the rules have"
    )
    external_labels: Mapping[str, str] = option(
        {},
        kinds.LABELS,
        "labels of every alert, ${NAME} taken from the environment; cluster, namespace and pod",
    )
    runbook_base: str | None = option(
        None, kinds.BASE_URL, "where the runbooks stand instead of the project's pages"
    )
    dashboard_base: str | None = option(
        None, kinds.BASE_URL, "Grafana's address; alerts then link to a dashboard"
    )

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
        headers = {name.lower() for name in self.headers}
        ways = [name for name in ("bearer_token", "bearer_token_file") if getattr(self, name)]
        ways += ["basic_auth"] if self.basic_auth.username else []
        ways += ["headers.Authorization"] if "authorization" in headers else []
        if len(ways) > 1:
            yield f"{ways[0]}: expected one authorization, got {' and '.join(ways[1:])} too"
        if self.tenant and "x-scope-orgid" in headers:
            yield "tenant: expected one tenant, got an X-Scope-OrgID header too"
        if self.urls and self.tls != TlsConfig() and not any(map(_is_https, self.urls)):
            yield "tls: has no effect without a url that begins with https://"


def _is_https(url: str) -> bool:
    return url.startswith("https://")


@dataclass(frozen=True, slots=True)
class WhatIfConfig(Section):
    """Forecasts: how much is simulated, and where the words of their verdicts begin."""

    seeds: int = option(3, whole(1, 100), "runs of each change; their spread is shown")
    time_limit: float = option(60.0, duration(1, HOUR), "a forecast that `serve` was asked for ends here")
    noise: float = option(0.03, number(0, 1), "more or less throughput or latency by this share is as now")
    slower: float = option(0.1, number(0, 10), "this share more latency at no more throughput is worse")
    preempted: float = option(0.1, number(0, 10), "per request, no harm below: healthy runs had 0.07")
    queued: float = option(1.0, number(0, 1000), "requests waiting on average; fewer are no queue")
    match: float = option(0.25, number(0, 1), "so far off in preemptions a forecast is still trusted")
    match_per_request: float = option(0.05, number(0, 1), "or so far per request: few are known badly")


@dataclass(frozen=True, slots=True)
class Config(Section):
    """The whole configuration. `Config()` holds the defaults."""

    targets: tuple[TargetConfig, ...] = field(default=(TargetConfig(),))
    targets_dns: tuple[DnsTargetsConfig, ...] = field(default=())
    targets_file_sd: tuple[FileTargetsConfig, ...] = field(default=())
    engine: EngineConfig = section(EngineConfig)
    web: WebConfig = section(WebConfig)
    poll: PollConfig = section(PollConfig)
    log: LogConfig = section(LogConfig)
    analysis: AnalysisConfig = section(AnalysisConfig)
    whatif: WhatIfConfig = section(WhatIfConfig)
    alertmanager: AlertmanagerConfig = section(AlertmanagerConfig)

    @property
    def alone(self) -> bool:
        """Whether it names one server, and no way to find more."""
        return len(self.targets) == 1 and not (self.targets_dns or self.targets_file_sd)

    @property
    def is_single(self) -> bool:
        """Whether it is about one server, whose series need no label to tell them from another's."""
        return self.alone and not self.targets[0].labels
