"""The sources of targets: the configuration, names in DNS, and files of Prometheus' ``file_sd``.

An error leaves the targets of a source as they are: a name server that does not answer has ended no target.
"""

import asyncio
import glob
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

import yaml

from exporter.config import Config, DnsTargetsConfig, FileTargetsConfig, TargetConfig, read_url
from exporter.config.labels import is_label_name
from exporter.net.secret_files import Stamp, file_stamp

__all__ = ["SOURCES", "DnsSource", "FileSource", "Source", "StaticSource", "Target", "name_of", "sources"]

log = logging.getLogger(__name__)

SourceName: TypeAlias = Literal["static", "dns", "file_sd"]
SOURCES: Final[tuple[SourceName, ...]] = ("static", "dns", "file_sd")

# Time limit of a look-up; targets stay when it ends.
LOOK_UP_SECONDS: Final = 10.0
# The most seconds until the second look at a changed YAML file, which has to find the same.
SETTLE_SECONDS: Final = 5.0
# A thousand targets with labels are some 200 KiB.
MOST_FILE_BYTES: Final = 16 << 20
MOST_LABELS: Final = 24
MOST_LABEL_NAME: Final = 128
MOST_LABEL_VALUE: Final = 512
# Different problems logged per source; there may be one per target.
_MOST_LOGGED: Final = 20
_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]+)?\]")
_PORTS: Final = {"http": 80, "https": 443}

Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A server to watch. Two equal targets are the same one, with the same history."""

    config: TargetConfig  # its address and credentials
    name: str  # ``host:port``, without credentials; the value of the label ``target``
    labels: Labels = ()  # those of its group, sorted by name
    source: SourceName = field(default="static", compare=False)  # the kind of its source

    @property
    def key(self) -> tuple[str, Labels]:
        """The labels that distinguish its series from those of all others."""
        return self.name, self.labels


def name_of(config: TargetConfig) -> str:
    """``host:port`` of a target, or the path of its unix socket."""
    if config.unix_socket is not None:
        return f"unix:{config.unix_socket}"
    parts = urlsplit(config.url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS.get(parts.scheme, 80)}"


class Source:
    """A source of targets."""

    name: SourceName = "static"  # its kind
    config: object  # two sources with equal ones are the same
    every: float | None = None  # seconds between looks for changes, None if nothing ever changes
    targets: Sequence[Target] = ()  # those known
    failures = 0  # looks that failed

    async def look(self) -> None:
        """Look for changes; raises nothing but CancelledError."""


class StaticSource(Source):
    """The targets that the configuration names."""

    def __init__(self, targets: Sequence[TargetConfig], reserved: frozenset[str]) -> None:
        self.config = targets
        warn = _OnceLogger("configuration")
        self.targets = tuple(
            Target(replace(config, labels={}), name_of(config), _clean(config.labels, reserved, warn))
            for config in targets
        )


class _OnceLogger:
    """Logs each problem of a source once, up to a limit."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._logged: set[str] = set()

    def __call__(self, problem: str) -> None:
        if problem not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(problem)
            log.warning("ignoring part of a target source=%s problem=%r", self._source, problem)


def _clean(labels: Mapping[str, str], reserved: frozenset[str], warn: Callable[[str], None]) -> Labels:
    """Keep the labels that series may have: valid, not the exporter's own, and not too many."""
    kept: list[tuple[str, str]] = []
    for name, value in sorted(labels.items()):
        if name.startswith("__"):
            continue  # these configure the discovery
        if not is_label_name(name) or len(name) > MOST_LABEL_NAME:
            warn(f"label {name[:40]!r}: expected letters, digits and _, at most {MOST_LABEL_NAME}")
        elif name in reserved:
            warn(f"label {name}: the exporter itself has a label of this name")
        elif len(value) > MOST_LABEL_VALUE:
            warn(f"label {name}: expected a value of at most {MOST_LABEL_VALUE} letters, got {len(value)}")
        elif not value.isprintable():
            warn(f"label {name}: expected a printable value")
        elif len(kept) >= MOST_LABELS:
            warn(f"label {name}: expected at most {MOST_LABELS} labels, got more")
        elif value:  # an empty label is none
            kept.append((name, value))
    return tuple(kept)


# DNS

Resolve: TypeAlias = Callable[[str, socket.AddressFamily], Awaitable[Sequence[str]]]


async def _resolve(name: str, family: socket.AddressFamily) -> Sequence[str]:
    """Look up all addresses of a name, with the system's resolver in a thread."""
    answers = await asyncio.get_running_loop().getaddrinfo(name, None, family=family, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in answers})


# A name without an address is a headless service without pods.
_NO_ADDRESS: Final = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}


class DnsSource(Source):
    """The addresses of a name in DNS."""

    name = "dns"
    config: DnsTargetsConfig

    def __init__(
        self, config: DnsTargetsConfig, reserved: frozenset[str], resolve: Resolve = _resolve
    ) -> None:
        """Prepare, without a look-up; `resolve` may raise OSError."""
        self.every = config.refresh
        self.config = config
        self._labels = _clean(config.labels, reserved, _OnceLogger(config.name))
        self._resolve = resolve
        self._look_up: asyncio.Future[Sequence[str]] | None = None
        self._trouble = ""

    async def look(self) -> None:
        """Look the name up; a look-up that fails changes nothing."""
        try:
            addresses = await self._addresses()
        except TimeoutError:
            self._fail(f"no answer within {LOOK_UP_SECONDS:g} s")
        except UnicodeError:
            self._fail("not a valid name in DNS")
        except OSError as problem:
            if isinstance(problem, socket.gaierror) and problem.errno in _NO_ADDRESS:
                self._fail("the name has no address")
                self.targets = ()
            else:
                self._fail(problem.strerror or "unknown error")
        else:
            if self._trouble:
                log.info("looking a name up again name=%s", self.config.name)
            self._trouble = ""
            self.targets = tuple(map(self._target, addresses))

    async def _addresses(self) -> Sequence[str]:
        # A look-up in a thread cannot be stopped: the next call waits for it instead of starting another.
        if self._look_up is None or self._look_up.done():
            family = socket.AF_INET6 if self.config.type == "aaaa" else socket.AF_INET
            self._look_up = asyncio.ensure_future(self._resolve(self.config.name, family))
        done, _ = await asyncio.wait({self._look_up}, timeout=LOOK_UP_SECONDS)
        if not done:
            raise TimeoutError
        return self._look_up.result()

    def _target(self, address: str) -> Target:
        config = self.config
        host = f"[{address}]" if ":" in address else address
        target = config.target(f"{config.scheme}://{host}:{config.port}{config.path}")
        if config.scheme == "https" and target.tls.server_name is None:
            target = replace(target, tls=replace(target.tls, server_name=config.name))
        return Target(target, f"{host}:{config.port}", self._labels, self.name)

    def _fail(self, trouble: str) -> None:
        self.failures += 1
        if trouble != self._trouble:
            log.warning("cannot look a name up name=%s problem=%r", self.config.name, trouble)
        self._trouble = trouble


# Files


@dataclass(frozen=True, slots=True)
class _File:
    """A file when it was last read: its stamp and its targets."""

    stamp: Stamp | None = None
    targets: Sequence[Target] = ()
    trouble: str = ""
    unsure: Stamp | None = None  # stamp of a text that may be half of what its writer means


class FileSource(Source):
    """Files in Prometheus' ``file_sd`` format.

    The targets of a deleted file end. A file that is unreadable, empty or invalid keeps its targets: its
    writer may not have finished. Half of a YAML file can be valid: one that has changed, or ends within a
    line, counts only if the next look finds the same.
    """

    name = "file_sd"
    config: FileTargetsConfig

    def __init__(self, config: FileTargetsConfig, reserved: frozenset[str]) -> None:
        self.every = config.refresh
        self.config = config
        self._reserved = reserved
        self._files: dict[str, _File] = {}
        self._warn = _OnceLogger("file_sd")

    async def look(self) -> None:
        """Read changed files in a thread: a disk may be slow, and YAML is."""
        files = await asyncio.get_running_loop().run_in_executor(None, self._read_all)
        for path, file in files.items():
            before = self._files.get(path, _File())
            if file.trouble:
                self.failures += 1
                if file.trouble != before.trouble:
                    log.warning("cannot read targets file=%s problem=%r", path, file.trouble)
            elif before.trouble:
                log.info("reading targets again file=%s", path)
        self._files = files
        unsure = any(file.unsure for file in files.values())
        self.every = min(self.config.refresh, SETTLE_SECONDS) if unsure else self.config.refresh
        self.targets = tuple(target for file in files.values() for target in file.targets)

    def _read_all(self) -> dict[str, _File]:
        paths = sorted({path for pattern in self.config.files for path in glob.glob(pattern)})  # noqa: PTH207
        return {path: self._read(path, self._files.get(path, _File())) for path in paths}

    def _read(self, path: str, known: _File) -> _File:
        try:
            stamp = file_stamp(path)
            if stamp is not None and stamp == known.stamp:
                return known
            with Path(path).open("rb") as file:
                text = file.read(MOST_FILE_BYTES + 1)
            targets = tuple(self._targets(text, path))
            ends_in_a_line = not text.rstrip(b" ").endswith((b"\n", b"]"))
            half = not path.endswith(".json") and (ends_in_a_line or known != _File())
            if half and stamp != known.unsure:
                return replace(known, stamp=None, trouble="", unsure=stamp)
            return _File(stamp, targets)
        except OSError as problem:
            return replace(known, stamp=None, trouble=(problem.strerror or "unreadable").lower())
        except ValueError as problem:
            return replace(known, stamp=None, trouble=str(problem))

    def _targets(self, text: bytes, path: str) -> Iterable[Target]:
        for addresses, given in _groups(text, yaml_form=not path.endswith(".json")):
            labels = _clean(given, self._reserved, self._warn)
            for address in addresses:
                if url := _url(address, given):
                    config = self.config.target(url)
                    yield Target(config, name_of(config), labels, self.name)
                else:
                    self._warn("target: expected host:port with a numeric port, got something else")


_Group: TypeAlias = tuple[Sequence[str], Mapping[str, str]]


def _groups(text: bytes, *, yaml_form: bool) -> Sequence[_Group]:
    """Read a file's groups; raises ValueError, which repeats nothing of the file, if it is invalid."""
    if len(text) > MOST_FILE_BYTES:
        raise ValueError(f"expected at most {MOST_FILE_BYTES >> 20} MiB, got more")
    if not text.strip():
        raise ValueError("expected a list of groups, got an empty file (an empty list is [])")
    document = _document(text, yaml_form=yaml_form)
    if not isinstance(document, list):
        raise ValueError("expected a list of groups such as [{targets: [host:port], labels: {}}]")  # noqa: TRY004 (of a text)
    return [_group(item, f"group {number}") for number, item in enumerate(document, start=1)]


def _document(text: bytes, *, yaml_form: bool) -> object:
    try:
        if not yaml_form:
            return json.loads(text)
        loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # every scalar stays a text
        return yaml.load(text, Loader=loader)  # noqa: S506 (builds only texts, lists and mappings)
    except yaml.MarkedYAMLError as problem:
        line = f" in line {problem.problem_mark.line + 1}" if problem.problem_mark else ""
        raise ValueError(f"bad yaml{line}") from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"bad json in line {problem.lineno}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError(f"bad {'yaml' if yaml_form else 'json'}") from None


def _group(item: object, where: str) -> _Group:
    if not isinstance(item, dict) or not isinstance(item.get("targets"), list):
        raise ValueError(f"{where}: expected a mapping with a list of targets")  # noqa: TRY004 (of a text)
    targets, labels = item["targets"], item.get("labels") or {}
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise ValueError(f"{where}: expected labels as a mapping of names to texts")
    if not all(isinstance(target, str) for target in targets):
        raise ValueError(f"{where}: expected targets as a list of texts")
    if item.keys() - {"targets", "labels"}:
        raise ValueError(f"{where}: expected no keys but targets and labels")
    return targets, {str(name): value for name, value in labels.items()}


def _url(address: str, labels: Mapping[str, str]) -> str | None:
    """The url of a target; None if its address, or a label about its url, is invalid."""
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, ""
    if not _HOST.fullmatch(host) or not (port or not colon or address.endswith("]")):
        return None
    scheme = labels.get("__scheme__") or "http"
    path = labels.get("__metrics_path__") or "/metrics"
    url = f"{scheme}://{host}:{port or _PORTS.get(scheme, 80)}{path if path.startswith('/') else '/' + path}"
    return read_url(url)


def sources(config: Config, reserved: frozenset[str]) -> Sequence[Source]:
    """The sources in a configuration."""
    return (
        *([StaticSource(config.targets, reserved)] if config.targets else []),
        *(DnsSource(one, reserved) for one in config.targets_dns),
        *(FileSource(one, reserved) for one in config.targets_file_sd),
    )
