"""The configuration: the one table of options, and how it is loaded from flags, environment and a YAML file.

To add an option add a line to one of the dataclasses; flag, environment variable, key in the file, checks,
`reference` and `describe` follow from it. How that works stands in ``options.py``.
"""

# ruff: noqa: RUF009 - option() and section() are dataclasses.field() with a typed default

import argparse
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias, TypeVar
from urllib.parse import SplitResult, urlsplit

import yaml

from exporter.options import (
    BOOLEAN,
    ENV_PREFIX,
    SECRET,
    TEXT,
    ConfigError,
    Kind,
    Option,
    Refused,
    Secret,
    Section,
    attempt,
    choice,
    duration,
    entries,
    number,
    option,
    options_of,
    plain,
    read_section,
    read_yaml,
    scalar,
    section,
    shape,
    size,
    unknown,
    whole,
)
from exporter.vllm import arguments

__all__ = [
    "FACTS",
    "OPTIONS",
    "AccessConfig",
    "AlertmanagerConfig",
    "AnalysisConfig",
    "BasicAuthConfig",
    "Config",
    "ConfigError",
    "DnsTargetsConfig",
    "EngineConfig",
    "Fact",
    "FileTargetsConfig",
    "LogConfig",
    "Option",
    "PollConfig",
    "Secret",
    "TargetConfig",
    "TlsConfig",
    "WebConfig",
    "WebFileConfig",
    "WhatIfConfig",
    "add_flags",
    "describe",
    "flags_given",
    "load",
    "parse_facts",
    "read_url",
    "reference",
]

Fact: TypeAlias = bool | int | float | str

_MANY = 1 << 30  # more requests, tokens or blocks than any engine has
_HOUR = 3600.0
_DAY = 24 * _HOUR


def _dtype(text: str) -> str:
    # Any text would do, but it may come from a mangled argument line: most kinds of key look unlike this.
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", text):
        raise ValueError
    return text


_DTYPE = scalar("word", "a word such as auto, bfloat16 or fp8_e4m3", _dtype)

# What an operator may tell about a server (a target's `config:`). It is an allow-list: an argument line of
# vLLM can hold keys, and nothing that is not named here is ever stored.
FACTS: Mapping[str, Option] = {
    fact.key: fact
    for fact in (
        Option("max_num_seqs", whole(1, _MANY), None, "seats: requests that run at once"),
        Option("max_num_batched_tokens", whole(1, _MANY), None, "tokens computed in one step"),
        Option("max_model_len", whole(1, _MANY), None, "longest prompt and answer together, in tokens"),
        Option("gpu_memory_utilization", number(0.01, 1), None, "share of the GPU's memory that vLLM takes"),
        Option("tensor_parallel_size", whole(1, 4096), None, "GPUs that share each layer, and the KV heads"),
        Option("pipeline_parallel_size", whole(1, 4096), None, "GPUs in a row that share the layers"),
        Option("data_parallel_size", whole(1, 4096), None, "engines behind this server"),
        Option("max_loras", whole(1, 4096), None, "LoRA slots: adapters that run in one batch"),
        Option("kv_cache_dtype", _DTYPE, None, "number format of the KV cache, such as auto or fp8"),
        Option("block_size", whole(1, 1 << 20), None, "tokens in one KV block"),
        Option("enable_prefix_caching", BOOLEAN, None, "whether KV blocks of equal prefixes are shared"),
        Option("scheduler_reserve_full_isl", BOOLEAN, None, "whether only whole prompts are admitted"),
        Option("scheduling_policy", choice("fcfs", "priority"), None, "who runs first, and who is preempted"),
        Option("watermark", number(0, 1), None, "share of the KV blocks kept free when admitting"),
        Option("num_gpu_blocks_override", whole(1, _MANY), None, "KV blocks, whatever the memory would give"),
        Option("kv_cache_memory_bytes", size(1, 1 << 50), None, "KV cache per GPU, whatever the utilization"),
        Option("enable_chunked_prefill", BOOLEAN, None, "whether long prompts are computed in parts"),
        Option("long_prefill_token_threshold", whole(0, _MANY), None, "prompt tokens per request and step"),
        Option("async_scheduling", BOOLEAN, None, "whether preemptions are counted one step late"),
        Option("num_speculative_tokens", whole(0, 4096), None, "tokens drafted per step"),
        Option("kv_offloading_size", number(0, 1 << 20), None, "GiB of CPU memory for KV blocks"),
        Option("max_num_active_seqs", whole(1, _MANY), None, "running requests, where it is set"),
        Option("max_num_queued_reqs", whole(1, _MANY), None, "waiting requests before the server refuses"),
        # From here on no flag of vLLM, but known to the operator or to vLLM's log at start.
        Option("role", choice("prefill", "decode", "both"), None, "its part in a disaggregated set-up"),
        Option("startup_grace_seconds", duration(0, _DAY), None, "as analysis.startup_grace, for it"),
        Option("kv_lease_seconds", duration(0, _DAY), None, "how long a prefill server holds sent KV"),
        Option("gpu_memory_gib", number(0.1, 1 << 14), None, "memory of one GPU"),
        Option("kv_cache_gib", number(0.001, 1 << 14), None, "KV cache per GPU, from vLLM's log at start"),
        Option("weights_gib", number(0.001, 1 << 14), None, "weights per GPU, from vLLM's log at start"),
        Option("num_kv_heads", whole(1, 4096), None, "KV heads: tensor parallelism beyond adds no KV"),
    )
}


def parse_facts(given: Mapping[str, object], *, strict: bool) -> tuple[dict[str, Fact], list[str]]:
    """Read what was told about a server.

    Args:
        given: facts by name; None stands for not told.
        strict: whether an unknown name is a problem (an operator's slip) or left out (a recording's header).

    Returns:
        The good facts, and a problem (``max_num_seqs: expected ..., got ...``) for each other.
    """
    facts: dict[str, Fact] = {}
    problems: list[str] = []
    for name, raw in given.items():
        if name not in FACTS:
            problems += [unknown(name, FACTS)] if strict else []
        elif raw is not None:
            value = attempt(FACTS[name].kind, raw, name, problems)
            if isinstance(value, bool | int | float | str):
                facts[name] = value
    return facts, problems


def _read_arguments(raw: object) -> Mapping[str, Fact]:
    """Keep of vLLM's argument line what FACTS knows. No refusal repeats any of it: it can hold keys."""
    if isinstance(raw, str):
        try:
            given = arguments.read(raw)
        except ValueError:
            raise Refused(f": expected {_ARGUMENTS.wanted}, got a quotation without its end") from None
    elif isinstance(raw, list) and all(isinstance(item, str) for item in raw):
        given = arguments.read_list(raw)
    else:
        got = "a list of something else" if isinstance(raw, list) else shape(raw)
        raise Refused(f": expected {_ARGUMENTS.wanted}, got {got}")
    return parse_facts(given, strict=False)[0]


def _read_headers(given: Mapping[str, object]) -> tuple[dict[str, Secret], list[str]]:
    headers: dict[str, Secret] = {}
    problems: list[str] = []
    for name, raw in given.items():
        if name.lower() in {other.lower() for other in headers}:
            problems.append(f"{name}: duplicated header (upper and lower case are the same)")
        value = attempt(_HEADER, raw, name, problems)
        if value is not None:
            headers[name] = value
    return headers, problems


def _header(text: str) -> Secret:
    if not text or not (text.isprintable() and text.isascii()):
        raise ValueError
    return Secret(text)


def _url(text: str) -> str:
    """Check the url of a server's metrics."""
    parts = _web_address(text, "http://127.0.0.1:8000/metrics")
    return parts._replace(path="/metrics").geturl() if parts.path in {"", "/"} else text


def read_url(text: str) -> str | None:
    """The url of a server's metrics as an option takes it, None where it makes no sense."""
    try:
        return _url(text)
    except Refused:
        return None


def _base_url(text: str) -> str:
    """Check a url that a path is put behind."""
    parts = _web_address(text, "http://alertmanager:9093")
    if parts.query:
        raise Refused(": expected a url without a query")
    return text.rstrip("/")


def _web_address(text: str, example: str) -> SplitResult:
    """Take a url apart; nothing of it is repeated until it can hold no credentials."""
    if "@" in text:
        raise Refused(": expected a url without credentials (put them into headers or bearer_token_file)")
    if text.startswith(("http+unix:", "unix:")):
        raise Refused(": unix sockets go into unix_socket; the url stays http://localhost/metrics")
    shown = text.partition("?")[0][:80]
    if not text.isprintable() or " " in text:
        raise Refused(": expected a url without spaces and control characters")
    if not text.startswith(("http://", "https://")):
        raise Refused(f": expected a url that begins with http:// or https://, got {shown!r}")
    try:
        parts = urlsplit(text)
        good = bool(parts.hostname) and parts.port != 0 and not parts.fragment
    except ValueError:
        good = False
    if not good:
        raise Refused(f": expected a url such as {example}, got {shown!r}")
    return parts


def _read_urls(raw: object) -> tuple[str, ...]:
    """Read base urls: a list in the file, a text with commas as flag or variable."""
    given = [part.strip() for part in raw.split(",")] if isinstance(raw, str) else raw
    if not isinstance(given, list):
        raise Refused(f": expected {_URLS.wanted}, got {shape(raw)}")
    problems: list[str] = []
    read = [attempt(_BASE_URL, one, f"[{index}]", problems) for index, one in enumerate(given)]
    urls = [url for url in read if url is not None]
    if not problems and len(set(urls)) < len(urls):
        problems.append(": expected every url once")
    if problems:
        raise Refused(*problems)
    return tuple(urls)


def _read_labels(raw: object) -> Mapping[str, str]:
    """Read labels: a mapping in the file, ``cluster=eu,pod=vllm-0`` as flag or variable."""
    if isinstance(raw, str):
        pairs = [part.partition("=") for part in raw.split(",") if part.strip()]
        if not all(equals for _, equals, _ in pairs):
            raise Refused(f": expected {_LABELS.wanted}, got {raw[:80]!r}")
        raw = {name.strip(): value.strip() for name, _, value in pairs}
    if not isinstance(raw, Mapping):
        raise Refused(f": expected {_LABELS.wanted}, got {shape(raw)}")
    problems: list[str] = []
    for name, value in raw.items():
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name in _OWN_LABELS:
            problems.append(f".{name}: expected the name of a label that is none of {', '.join(_OWN_LABELS)}")
        elif not isinstance(value, str) or not value.isprintable():
            problems.append(f".{name}: expected a printable text")
    if problems:
        raise Refused(*problems)
    return raw


def _read_target_labels(raw: object) -> Mapping[str, str]:
    if not isinstance(raw, Mapping):
        raise Refused(f": expected {_TARGET_LABELS.wanted}, got {shape(raw)}")
    problems = []
    for name, value in raw.items():
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
            problems.append(f".{name}: expected the name of a label, which does not begin with __")
        elif not isinstance(value, str) or not value.isprintable():
            problems.append(f".{name}: expected a printable text")
    if problems:
        raise Refused(*problems)
    return raw


def _read_globs(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not raw:
        raise Refused(f": expected {_GLOBS.wanted}, got {shape(raw) if raw != [] else 'an empty list'}")
    problems: list[str] = []
    read = [attempt(TEXT, one, f"[{index}]", problems) for index, one in enumerate(raw)]
    for index, pattern in enumerate(read):
        if pattern is not None and not pattern.endswith((".json", ".yml", ".yaml")):
            problems.append(f"[{index}]: expected a name that ends in .json, .yml or .yaml")
    if problems:
        raise Refused(*problems)
    return tuple(pattern for pattern in read if pattern is not None)


def _host_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})", text):
        raise ValueError
    return text


def _path(text: str) -> str:
    if not re.fullmatch(r"/[!-~]*", text) or "#" in text:
        raise ValueError
    return text


def _address_family(text: str) -> str:
    if text.lower() not in {"a", "aaaa"}:
        raise ValueError
    return text.lower()


# What the exporter itself says of an alert.
_OWN_LABELS = ("alertname", "severity", "source", "model_name", "engine")


def _prefix(text: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._~%!$&'()*+,;=:@-]+)*/?", text):
        raise ValueError
    return text.rstrip("/")


def _address(text: str) -> str:
    host, port = _split_address(text)
    if ":" not in text:
        raise ValueError
    if host.startswith("[") and host.endswith("]"):
        ipaddress.IPv6Address(host[1:-1])
    elif not re.fullmatch(r"[A-Za-z0-9.-]*", host):
        raise ValueError
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):  # noqa: PLR2004
        raise ValueError
    return text


def _split_address(text: str) -> tuple[str, str]:
    host, _, port = text.rpartition(":")
    return host, port


_HEADER = scalar("text", "a printable ASCII text that is not empty", _header, str, secret=True)
_HEADERS = entries(
    "headers",
    "a mapping of header names to texts",
    _read_headers,
    lambda headers: {name: str(value) for name, value in headers.items()},
)
_FACTS = entries(
    "facts",
    "a mapping of what is known about the server",
    lambda given: parse_facts(given, strict=True),
    lambda facts: {name: FACTS[name].kind.show(value) for name, value in facts.items()},
)
_ARGUMENTS = Kind(
    "arguments", "vLLM's arguments as one line, or as a list of texts", _read_arguments, arguments.join
)
_URL = scalar("url", "a url", _url)
_BASE_URL = scalar("url", "a url", _base_url)
_URLS = Kind("urls", "a list of urls, or a text with commas between them", _read_urls, list)
_LABELS = Kind("labels", "a mapping of labels, or a text such as cluster=eu,pod=vllm-0", _read_labels, dict)
_PREFIX = scalar("path", "a path such as /alertmanager", _prefix)
_TENANT = scalar("tenant", "a printable ASCII text that is not empty", lambda text: _header(text).reveal())
_TARGET_LABELS = Kind("labels", "a mapping of labels to texts", _read_target_labels, dict, structured=True)
_GLOBS = Kind("files", "a list of file names, which may hold *", _read_globs, list)
_HOST_NAME = scalar("name", "a name that DNS knows, such as vllm.prod.svc.cluster.local", _host_name)
_PATH = scalar("path", "a path such as /metrics", _path)
_FAMILY = scalar("a|aaaa", "a (IPv4) or aaaa (IPv6)", _address_family)
_ADDRESS = scalar("address", "host:port such as [::]:21900, 127.0.0.1:21900 or :21900", _address)


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

    url: str = option("http://127.0.0.1:8000/metrics", _URL, "vLLM's metrics; /metrics is the default path")
    facts: Mapping[str, Fact] = option({}, _FACTS, "what it runs with, for advice in numbers", key="config")
    headers: Mapping[str, Secret] = option({}, _HEADERS, "headers sent with every request; values are secret")
    bearer_token: Secret | None = option(None, SECRET, "token sent as `Authorization: Bearer`")
    bearer_token_file: str | None = option(None, TEXT, "file with the token; read again when it changes")
    tls: TlsConfig = section(TlsConfig)
    unix_socket: str | None = option(None, TEXT, "unix socket to connect to instead of the url's host")
    labels: Mapping[str, str] = option(
        {}, _TARGET_LABELS, "labels of all its series, such as namespace and pod; with them comes `target`"
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

    name: str = option("", _HOST_NAME, "name to look up; every address it has is a target")
    port: int = option(8000, whole(1, 65535), "port of every target")
    path: str = option("/metrics", _PATH, "path of the metrics")
    scheme: str = option("http", choice("http", "https"), "how to ask; a certificate must bear the name")
    refresh: float = option(30.0, duration(1, _HOUR), "time between look-ups")
    type: str = option("a", _FAMILY, "which addresses are looked up")
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

    files: tuple[str, ...] = option((), _GLOBS, "files in JSON or YAML; relative to this file's folder")
    refresh: float = option(5.0, duration(1, _HOUR), "how often the files are looked at for changes")

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
        yield from _ways_to_ask(self)
        if not self.files:
            yield "files: expected a list of file names, got nothing"


@dataclass(frozen=True, slots=True)
class EngineConfig(Section):
    """What the engine was started with."""

    args: Mapping[str, Fact] | None = option(
        None, _ARGUMENTS, "vLLM's argument line; only what advice in numbers needs is kept, no keys"
    )


@dataclass(frozen=True, slots=True)
class WebFileConfig(Section):
    """Who may see the exporter's own pages, and over which connections."""

    file: str | None = option(None, TEXT, "TLS and basic authentication, in exporter-toolkit's format")


@dataclass(frozen=True, slots=True)
class WebConfig(Section):
    """The exporter's own pages."""

    listen_address: str = option("[::]:21900", _ADDRESS, "where to serve; [::] is IPv4 too, port 0 any free")
    enable_lifecycle: bool = option(False, BOOLEAN, "answer POST /-/reload; SIGHUP always reloads")
    config: WebFileConfig = section(WebFileConfig)

    @property
    def host(self) -> str:
        """The host to listen on, without brackets; ``::`` where the address names none."""
        return _split_address(self.listen_address)[0].strip("[]") or "::"

    @property
    def port(self) -> int:
        """The port to listen on; 0 is any free one."""
        return int(_split_address(self.listen_address)[1])


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

    window: float = option(60.0, duration(5, _HOUR), "span of rates: a storm shows, one odd poll does not")
    long_window: float = option(300.0, duration(5, _HOUR), "span of ratios per request: answers take minutes")
    max_age: float = option(5.0, duration(1, 600), "a reading older than this (and 3 polls) is unknown")
    startup_grace: float = option(900.0, duration(0, _DAY), "loading a large model may take a quarter hour")
    hold: float = option(30.0, duration(0, _HOUR), "a verdict falls or changes sideways once in this time")
    # Progress.
    stall_after: float = option(60.0, duration(5, _HOUR), "so long without progress is a stall")
    deadlock_after: float = option(45.0, duration(5, _HOUR), "longer than a mass preemption's pause of 15s")
    # Preemption.
    burst_window: float = option(10.0, duration(2, 60), "span in which a storm is to be seen at once")
    burst_count: int = option(5, whole(1, 10_000), "fewer preemptions in that span are no storm yet")
    thrash_ratio: float = option(0.8, number(0.05, 100), "per finished request: healthy runs had 0.08")
    thrash_leave_ratio: float = option(0.4, number(0.0, 100), "below this a storm is over; storms had 2.4")
    tokens_fallen: float = option(0.5, number(0.05, 1), "share of the engine's own tokens/s that is harm")
    light_for: float = option(90.0, duration(5, _HOUR), "one preemption is spoken of for this long")
    light_ratio: float = option(0.03, number(0.0, 1), "per finished request; fewer are hardly any")
    kv_full: float = option(0.9, number(0.5, 1), "full, where request lengths are unknown")
    kv_roomy: float = option(0.75, number(0.1, 1), "preemption below this had another cause; storms reach 1")
    # Queue.
    queue_window: float = option(30.0, duration(5, _HOUR), "a queue that lasts; bursts drain in seconds")
    queue_share: float = option(0.8, number(0.1, 1), "share of polls with a queue; odd readings happen")
    queue_leave_share: float = option(0.3, number(0.0, 1), "below this the queue is gone")
    seats_share: float = option(0.6, number(0.1, 1), "share of polls at the limit or one less")
    deferred_share: float = option(0.5, number(0.1, 1), "share of the waiting that waits for something else")
    drain_critical: float = option(600.0, duration(10, _DAY), "a deferred queue this long is critical")
    budget_share: float = option(0.75, number(0.1, 1), "steps this full of max_num_batched_tokens are full")
    # Pressure.
    pressure_horizon: float = option(300.0, duration(10, _HOUR), "time to full worth a warning: minutes")
    pressure_kv: float = option(0.6, number(0.1, 1), "below this a fast rise is a load that starts")
    held_after: float = option(60.0, duration(5, _HOUR), "KV held with nothing to do for this long")
    held_kv: float = option(0.1, number(0.0, 1), "less than this held is not worth a word")
    runaway_after: float = option(600.0, duration(60, _HOUR), "so long with nothing finished")
    runaway_tokens: int = option(10_000, whole(1, _MANY), "tokens per running request in that time")
    slow_factor: float = option(1.6, number(1.05, 100), "times the engine's own latency at this load")
    # Life cycle, models.
    restart_shown: float = option(300.0, duration(10, _DAY), "how long a restart is spoken of")
    oom_utilization: float = option(0.94, number(0.1, 1), "memory outside the KV cache is short from here on")
    imbalance_factor: float = option(1.6, number(1.05, 100), "times the mean load; half of two is 2")
    imbalance_requests: int = option(8, whole(2, _MANY), "fewer requests cannot be shared evenly")

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
        (), _URLS, "Alertmanagers to push to: of an HA set every one, not a service"
    )
    path_prefix: str = option("", _PREFIX, "path before /api/v2/alerts, such as Mimir's /alertmanager")
    tenant: str | None = option(None, _TENANT, "sent as X-Scope-OrgID, which Mimir wants")
    headers: Mapping[str, Secret] = option({}, _HEADERS, "headers sent with every push; values are secret")
    basic_auth: BasicAuthConfig = section(BasicAuthConfig)
    bearer_token: Secret | None = option(None, SECRET, "token sent as `Authorization: Bearer`")
    bearer_token_file: str | None = option(None, TEXT, "file with the token; read again at every push")
    tls: TlsConfig = section(TlsConfig)
    timeout: float = option(5.0, duration(0.1, 60), "one push's limit; no poll ever waits for it")
    hold: float = option(
        30.0, duration(0, _HOUR), "how long it must be so before an alert: a blink pages nobody"
    )
    resend_interval: float = option(
        60.0,
        duration(1, _HOUR),
        "how often a lasting alert is told again; untold it ends after four of these",
    )
    page_by: str = option(
        "model", choice("model", "engine"), "whose alert is critical; the same as the rules have"
    )
    external_labels: Mapping[str, str] = option(
        {}, _LABELS, "labels of every alert, ${NAME} taken from the environment; cluster, namespace and pod"
    )
    runbook_base: str | None = option(
        None, _BASE_URL, "where the runbooks stand instead of the project's pages"
    )
    dashboard_base: str | None = option(None, _BASE_URL, "Grafana's address; alerts then link to a dashboard")

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
    time_limit: float = option(60.0, duration(1, _HOUR), "a forecast that `serve` was asked for ends here")
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


OPTIONS: tuple[Option, ...] = (*options_of(TargetConfig, "target."), *options_of(Config, ""))

# What discovery takes; only a file can hold it.
_FOUND: tuple[Option, ...] = (
    *options_of(DnsTargetsConfig, "targets_dns[0]."),
    *options_of(FileTargetsConfig, "targets_file_sd[0]."),
)

# What the sections are, for the help.
_SECTIONS: Mapping[str, str | None] = {
    "target": TargetConfig.__doc__,
    "engine": EngineConfig.__doc__,
    "web": WebConfig.__doc__,
    "poll": PollConfig.__doc__,
    "log": LogConfig.__doc__,
    "analysis": AnalysisConfig.__doc__,
    "whatif": WhatIfConfig.__doc__,
    "alertmanager": AlertmanagerConfig.__doc__,
}

_FILE = Option("config.file", TEXT, None, "YAML file with options; flags and environment go before it")

# Kubernetes sets these in every pod of a namespace that has a service called vllm-pressure-something.
_SERVICE_LINK = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)=|_PORT=(tcp|udp|sctp)://"
)


def load(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    read_file: Callable[[str], str],
    only: str | None = None,
) -> Config:
    """Load the configuration: flags go before environment, environment before file, file before defaults.

    Args:
        flags: values by key (``web.listen_address``, and ``config.file``); None is a flag that was not given.
        environ: the environment; a variable that is set to nothing counts as not set.
        read_file: returns the text of a file; may raise OSError or ValueError.
        only: the url of the one server that is meant, instead of all that the file names. Where the file
            has it, what the file says of it counts.

    Returns:
        The configuration.

    Raises:
        ConfigError: with everything that is wrong, in whatever source.
    """
    problems: list[str] = []
    over, spelled = _overlay(flags, environ, problems)
    path = over.pop(_FILE.key, None)
    tree = _read_tree(path, read_file, problems)
    target_over = {
        key.removeprefix("target."): over.pop(key) for key in list(over) if key.startswith("target.")
    }
    if tree.get("targets") is not None and target_over:
        names = ", ".join(spelled[f"target.{key}"] for key in target_over)
        problems.append(f"targets: the target is also given by {names}; expected one place only")
    dns = _read_list(DnsTargetsConfig, tree.pop("targets_dns", None), "targets_dns", problems)
    files = _read_list(FileTargetsConfig, tree.pop("targets_file_sd", None), "targets_file_sd", problems)
    targets = _read_targets(tree.pop("targets", None), target_over, problems, found=bool(dns or files))
    if only is not None:
        targets, dns, files = (_chosen(only, targets, target_over, problems),), (), ()
    config, _ = read_section(Config, tree, "", over, problems)
    labels = _expand(config.alertmanager.external_labels, environ, problems)
    if problems:
        raise ConfigError(problems)
    return replace(
        config,
        targets=targets,
        targets_dns=dns,
        targets_file_sd=tuple(_beside(path, one) for one in files),
        alertmanager=replace(config.alertmanager, external_labels=labels),
    )


def _beside(path: object, files: FileTargetsConfig) -> FileTargetsConfig:
    """File names count from the folder of the configuration's own file, as in Prometheus."""
    folder = os.path.dirname(path) if isinstance(path, str) else ""  # noqa: PTH120 (may hold a pattern)
    return replace(files, files=tuple(os.path.join(folder, name) for name in files.files))  # noqa: PTH118


def _chosen(
    url: str, targets: tuple[TargetConfig, ...], over: Mapping[str, object], problems: list[str]
) -> TargetConfig:
    """The one server that is meant, with what the file says of it."""
    read = attempt(_URL, url, _BY_KEY["target.url"].flag, problems)
    for target in targets:
        if target.url == read:
            return replace(target, labels={})
    return read_section(TargetConfig, None, "target.", {**over, "url": read}, problems)[0]


def _expand(labels: Mapping[str, str], environ: Mapping[str, str], problems: list[str]) -> Mapping[str, str]:
    """Put the environment's values where labels say ``${NAME}``; a label without a value is left out."""
    missing = {
        f"alertmanager.external_labels.{label}: expected {name} in the environment, got nothing"
        for label, value in labels.items()
        for name in _VARIABLE.findall(value)
        if name not in environ
    }
    problems += sorted(missing)
    expanded = {
        label: _VARIABLE.sub(lambda found: environ.get(found[1], ""), value)
        for label, value in labels.items()
    }
    return {label: value for label, value in expanded.items() if value}


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _overlay(
    flags: Mapping[str, str | None], environ: Mapping[str, str], problems: list[str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Read environment and flags: values by key (`Refused` for a bad one), and how each was spelled."""
    over: dict[str, object] = {}
    spelled: dict[str, str] = {}
    for key, name, raw in (*_from_environ(environ, problems), *_from_flags(flags, problems)):
        value = attempt(_BY_KEY[key].kind, raw, name, problems)
        over[key] = Refused() if value is None else value
        spelled[key] = name
    return over, spelled


_BY_KEY = {row.key: row for row in (_FILE, *OPTIONS)}
_BY_ENV = {row.env: row for row in (_FILE, *OPTIONS)}


def _from_environ(environ: Mapping[str, str], problems: list[str]) -> Iterator[tuple[str, str, str]]:
    for name, raw in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or not raw:
            continue
        row = _BY_ENV.get(name)
        if row is not None and row.has_env:
            yield row.key, name, raw
        elif row is not None:
            problems.append(f"{name}: {_only_in_file(row)}")
        elif not _SERVICE_LINK.search(f"{name}={raw}"):
            problems.append(unknown(name, _BY_ENV))


def _from_flags(flags: Mapping[str, str | None], problems: list[str]) -> Iterator[tuple[str, str, str]]:
    for key, raw in flags.items():
        row = _BY_KEY.get(key)
        if raw is None:
            continue
        if row is None:
            problems.append(unknown(key, _BY_KEY))
        elif row.has_flag:
            yield key, row.flag, raw
        elif row.has_env:
            problems.append(f"{row.flag}: a secret among arguments is seen by all; expected it in {row.env}")
        else:
            problems.append(f"{row.flag}: {_only_in_file(row)}")


def _only_in_file(row: Option) -> str:
    return f"expected {_in_file(row.key)} in the file, which alone can hold a mapping"


def _read_tree(path: object, read_file: Callable[[str], str], problems: list[str]) -> dict[str, object]:
    if not isinstance(path, str):
        return {}
    try:
        text = read_file(path)
    except OSError as error:
        problems.append(f"{path}: expected a readable file, got {(error.strerror or 'an error').lower()}")
        return {}
    except ValueError:
        problems.append(f"{path}: expected a readable file of utf-8 text, got something else")
        return {}
    tree, found = read_yaml(text, path)
    problems += found
    return tree


def _read_targets(
    given: object, over: Mapping[str, object], problems: list[str], *, found: bool
) -> tuple[TargetConfig, ...]:
    """Read the targets that are named; where others are `found` there need be none."""
    if given is None:
        alone = read_section(TargetConfig, None, "target.", over, problems)[0]
        return () if found and not over else (alone,)
    if given == [] and not found:
        problems.append("targets: expected a target, got none (without the key the default is watched)")
    targets = _read_list(TargetConfig, given, "targets", problems)
    seen: dict[object, int] = {}
    for index, target in enumerate(targets):
        where = (target.url, target.unix_socket, tuple(sorted(target.labels.items())))
        if where in seen:
            problems.append(f"targets[{index}]: the same as targets[{seen[where]}]; expected each once")
        seen.setdefault(where, index)
    return targets


_Listed = TypeVar("_Listed", bound=Section)
_EXAMPLES = {"targets": "url", "targets_dns": "name", "targets_file_sd": "files"}


def _read_list(kind: type[_Listed], given: object, key: str, problems: list[str]) -> tuple[_Listed, ...]:
    """Read a list of sections."""
    if given is None:
        return ()
    if not isinstance(given, list):
        problems.append(f"{key}: expected a list such as [{{{_EXAMPLES[key]}: ...}}], got {shape(given)}")
        return ()
    for index, item in enumerate(given):
        if item is None:
            problems.append(f"{key}[{index}]: expected a mapping of options, got nothing")
    return tuple(
        read_section(kind, item, f"{key}[{index}].", {}, problems)[0]
        for index, item in enumerate(given)
        if item is not None
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--config.file`` and the flag of every option.

    Each section is a group of its own in the help. Defaults stay None, so that `load` can tell what was
    given; it also checks the values. Abbreviations are switched off: ``--target.bearer-token X`` would set
    ``--target.bearer-token-file``.
    """
    parser.allow_abbrev = False
    groups: dict[str, argparse._ArgumentGroup] = {}
    for row in (_FILE, *OPTIONS):
        section_name = row.key.partition(".")[0]
        if section_name not in groups:
            groups[section_name] = parser.add_argument_group(section_name, _SECTIONS.get(section_name))
        text = f"{row.help} (default: {_default(row)}; environment: {row.env})"
        # A flag that load() refuses is still taken: argparse would repeat the unknown one with its secret.
        usage = text.replace("%", "%%") if row.has_flag else argparse.SUPPRESS
        metavar = row.kind.name if "|" in row.kind.name else row.kind.name.upper()
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if row.kind is BOOLEAN else {}
        groups[section_name].add_argument(
            row.flag, dest=row.key, metavar=metavar, default=None, help=usage, **switch
        )


def flags_given(arguments: argparse.Namespace) -> dict[str, str]:
    """Return what was given for the flags of `add_flags`, in the form that `load` takes."""
    return {key: value for key in _BY_KEY if (value := getattr(arguments, key, None)) is not None}


def _in_file(key: str) -> str:
    return key.replace("target.", "targets[0].", 1) if key.startswith("target.") else key


def _default(row: Option) -> str:
    if row.default is None or row.default in ({}, (), ""):
        return "none"
    value = row.kind.show(row.default)
    return str(value).lower() if isinstance(value, bool) else str(value)


def reference() -> str:
    """Return a Markdown table of all options, and of the facts that a target's `config` may hold."""
    lines = [_row("key in the file", "flag", "environment", "default", "help", "value"), "|---" * 6 + "|"]
    for row in OPTIONS:
        flag = f"`{row.flag}`" if row.has_flag else "-"
        env = f"`{row.env}`" if row.has_env else "-"
        lines.append(_row(f"`{_in_file(row.key)}`", flag, env, _default(row), row.help, row.kind.wanted))
    lines += [_row(f"`{row.key}`", "-", "-", _default(row), row.help, row.kind.wanted) for row in _FOUND]
    for fact in FACTS.values():
        key = f"`targets[0].config.{fact.key}`"
        lines.append(_row(key, "-", "-", _default(fact), fact.help, fact.kind.wanted))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def describe(config: Config) -> str:
    """Return the configuration as the YAML file that would give it, with secrets masked."""
    listed = {
        "targets": [plain(target) for target in config.targets],
        "targets_dns": [plain(one) for one in config.targets_dns],
        "targets_file_sd": [plain(one) for one in config.targets_file_sd],
    }
    shown = {**{key: value for key, value in listed.items() if value}, **plain(config)}
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=1000)
