"""The kinds of values that only this configuration has: addresses, headers, labels, vLLM's argument line.

Each describes the expected value in words, and reads a text or a value from YAML.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from exporter.config import arguments
from exporter.config.facts import FACTS, Fact, parse_facts
from exporter.config.labels import is_label_name
from exporter.config.options import (
    MASK,
    TEXT,
    Kind,
    Refused,
    Secret,
    attempt,
    entries,
    matched,
    pattern,
    scalar,
    shape,
)

__all__ = [
    "ADDRESS", "ARGUMENTS", "BASE_URL", "FAMILY", "GLOBS", "HEADERS", "HOST_NAME", "LABELS", "PATH", "PREFIX",
    "SERVER_FACTS", "TARGET_LABELS", "TENANT", "URL", "URLS", "read_url", "split_address",
]  # fmt: skip


_LONGEST_LABEL = 1024
_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}(?:/[^\s]*)?", re.ASCII)


def _read_arguments(raw: object) -> Mapping[str, Fact]:
    """Keep the facts of vLLM's argument line. No error repeats any of it: it can hold keys."""
    if isinstance(raw, str):
        try:
            given = arguments.read(raw)
        except ValueError:
            raise Refused(f": expected {ARGUMENTS.wanted}, got an unclosed quotation") from None
    elif isinstance(raw, list) and all(isinstance(item, str) for item in raw):
        given = arguments.read_list(raw)
    else:
        got = "a list of something else" if isinstance(raw, list) else shape(raw)
        raise Refused(f": expected {ARGUMENTS.wanted}, got {got}")
    if misspelt := arguments.misspelt(raw):
        wrong, right = misspelt
        raise Refused(f": vLLM has no {wrong}; did you mean {right}?")
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


def _url(text: str) -> str:
    """Check the url of a server's metrics; of ``host:port`` the rest is added."""
    if _HOST_AND_PORT.fullmatch(text):
        text = f"http://{text}"
    parts = _web_address(text, "http://127.0.0.1:8000/metrics")
    return parts._replace(path="/metrics").geturl() if parts.path in {"", "/"} else text


def _masked(url: str) -> str:
    """Mask the values in a url's query: they may be tokens."""
    base, mark, query = url.partition("?")
    pairs = [part.partition("=") for part in query.split("&")]
    return base + mark + "&".join(name + equals + (equals and MASK) for name, equals, _ in pairs)


def read_url(text: str) -> str | None:
    """The url of a server's metrics, None if it is invalid."""
    try:
        return _url(text)
    except Refused:
        return None


def _base_url(text: str) -> str:
    """Check a url to which a path will be added."""
    parts = _web_address(text, "http://alertmanager:9093")
    if parts.query:
        raise Refused(": expected a url without a query")
    return text.rstrip("/")


def _web_address(text: str, example: str) -> SplitResult:
    """Split a url; no error repeats it before it is known to hold no credentials."""
    if "@" in text:
        raise Refused(": expected a url without credentials (put them into headers or bearer_token_file)")
    if text.startswith(("http+unix:", "unix:")):
        raise Refused(
            ": put the path of a unix socket into unix_socket; the url stays http://localhost/metrics"
        )
    shown = text.partition("?")[0][:80]
    if not text.isprintable() or " " in text:
        raise Refused(": expected a url without spaces and control characters")
    if not text.startswith(("http://", "https://")):
        raise Refused(f": expected a url that begins with http:// or https://, got {shown!r}")
    try:
        parts = urlsplit(text)
        valid = bool(parts.hostname) and parts.port != 0 and not parts.fragment
    except ValueError:
        valid = False
    if not valid:
        raise Refused(f": expected a url such as {example}, got {shown!r}")
    return parts


def _read_urls(raw: object) -> tuple[str, ...]:
    """Read base urls: a list in the file, a text with commas as flag or variable."""
    given = [part.strip() for part in raw.split(",")] if isinstance(raw, str) else raw
    if not isinstance(given, list):
        raise Refused(f": expected {URLS.wanted}, got {shape(raw)}")
    urls = _read_each(BASE_URL, given)
    if len(set(urls)) < len(urls):
        raise Refused(": expected each url once")
    return urls


def _read_labels(raw: object) -> Mapping[str, str]:
    """Read labels: a mapping in the file, ``cluster=eu,pod=vllm-0`` as flag or variable."""
    if isinstance(raw, str):
        pairs = [part.partition("=") for part in raw.split(",") if part.strip()]
        if not all(equals for _, equals, _ in pairs):
            raise Refused(f": expected {LABELS.wanted}, got {raw[:80]!r}")
        raw = {name.strip(): value.strip() for name, _, value in pairs}
    if not isinstance(raw, Mapping):
        raise Refused(f": expected {LABELS.wanted}, got {shape(raw)}")
    return _labels(raw, lambda name: name not in _OWN_LABELS, f" that is none of {', '.join(_OWN_LABELS)}")


def _read_target_labels(raw: object) -> Mapping[str, str]:
    if not isinstance(raw, Mapping):
        raise Refused(f": expected {TARGET_LABELS.wanted}, got {shape(raw)}")
    return _labels(raw, lambda name: not name.startswith("__"), ", which does not begin with __")


def _labels(given: Mapping[str, Any], allowed: Callable[[str], bool], which: str) -> Mapping[str, str]:
    """Check labels; `which` describes the allowed names."""
    problems = []
    for name, value in given.items():
        if not is_label_name(name) or not allowed(name):
            problems.append(f".{name}: expected the name of a label{which}")
        elif not isinstance(value, str) or not value.isprintable():
            problems.append(f".{name}: expected a printable text")
        elif len(value) > _LONGEST_LABEL:
            problems.append(f".{name}: expected at most {_LONGEST_LABEL} characters, got {len(value)}")
    if problems:
        raise Refused(*problems)
    return given


def _read_globs(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not raw:
        raise Refused(f": expected {GLOBS.wanted}, got {shape(raw) if raw != [] else 'an empty list'}")
    return _read_each(_GLOB, raw)


def _glob(text: str) -> str:
    name = TEXT.read(text)
    if not name.endswith((".json", ".yml", ".yaml")):
        raise Refused(": expected a name that ends in .json, .yml or .yaml")
    return name


def _read_each(kind: Kind[str], given: list[object]) -> tuple[str, ...]:
    problems: list[str] = []
    read = [attempt(kind, one, f"[{index}]", problems) for index, one in enumerate(given)]
    if problems:
        raise Refused(*problems)
    return tuple(one for one in read if one is not None)


# The labels that the exporter itself puts on an alert.
_OWN_LABELS = ("alertname", "severity", "source", "model_name", "engine")


def _address(text: str) -> str:
    host, port = split_address(text)
    if ":" not in text:
        raise ValueError
    if host.startswith("[") and host.endswith("]"):
        ipaddress.IPv6Address(host[1:-1])
    else:
        matched(r"[A-Za-z0-9.-]*", host)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):  # noqa: PLR2004
        raise ValueError
    return text


def split_address(text: str) -> tuple[str, str]:
    """Host and port of a valid address, as texts."""
    host, _, port = text.rpartition(":")
    return host, port


_HEADER = scalar(
    "text",
    "a printable ASCII text that is not empty",
    lambda text: Secret(matched("[ -~]+", text)[0]),
    str,
    secret=True,
)
HEADERS = entries(
    "headers",
    "a mapping of header names to texts",
    _read_headers,
    lambda headers: {name: str(value) for name, value in headers.items()},
)
SERVER_FACTS = entries(
    "facts",
    "a mapping of settings of the server",
    lambda given: parse_facts(given, strict=True),
    lambda facts: {name: FACTS[name].kind.show(value) for name, value in facts.items()},
)
ARGUMENTS = Kind(
    "arguments", "vLLM's arguments as one line, or as a list of texts", _read_arguments, arguments.join
)
URL = scalar("url", "a url", _url, _masked)
BASE_URL = scalar("url", "a url", _base_url)
URLS = Kind("urls", "a list of urls, or a text with commas between them", _read_urls, list)
LABELS = Kind("labels", "a mapping of labels, or a text such as cluster=eu,pod=vllm-0", _read_labels, dict)
PREFIX = scalar(
    "path",
    "a path such as /alertmanager",
    lambda text: matched(r"(/[A-Za-z0-9._~%!$&'()*+,;=:@-]+)*/?", text)[0].rstrip("/"),
)
TENANT = pattern("tenant", "a printable ASCII text that is not empty", "[ -~]+")
TARGET_LABELS = Kind("labels", "a mapping of labels to texts", _read_target_labels, dict, structured=True)
_GLOB = scalar(TEXT.name, TEXT.wanted, _glob)
GLOBS = Kind("files", "a list of file names, which may hold *", _read_globs, list)
HOST_NAME = pattern(
    "name", "a name that DNS knows, such as vllm.prod.svc.cluster.local", r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}"
)
PATH = pattern("path", "a path such as /metrics", r"/[!\"$-~]*")
FAMILY = scalar("a|aaaa", "a (IPv4) or aaaa (IPv6)", lambda text: matched("a|aaaa", text.lower())[0])
ADDRESS = scalar("address", "host:port such as [::]:21900, 127.0.0.1:21900 or :21900", _address)
