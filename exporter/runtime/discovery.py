"""Which targets there are: named in the configuration, found in DNS, or in files of Prometheus' ``file_sd``.

A source knows its targets and looks for changes when it is told to. Whatever goes wrong with that leaves
them as they are: a name server that does not answer has not ended any target.
"""

import asyncio
import glob
import json
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

import yaml

from exporter.config import Config, DnsTargetsConfig, FileTargetsConfig, TargetConfig, read_url
from exporter.config.labels import is_label_name

__all__ = ["SOURCES", "DnsSource", "FileSource", "Source", "StaticSource", "Target", "name_of", "sources"]

log = logging.getLogger(__name__)

SourceName: TypeAlias = Literal["static", "dns", "file_sd"]
SOURCES: Final[tuple[SourceName, ...]] = ("static", "dns", "file_sd")

# A name server that does not answer is given up on after this; its targets stay.
LOOK_UP_SECONDS: Final = 10.0
# A thousand targets with labels are some 200 KiB.
MOST_FILE_BYTES: Final = 16 << 20
MOST_LABELS: Final = 24
MOST_LABEL_NAME: Final = 128
MOST_LABEL_VALUE: Final = 512
# So many different slips are logged of one source; there may be one per target.
_MOST_TOLD: Final = 20
_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]+)?\]")
_PORTS: Final = {"http": 80, "https": 443}

Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A server to watch. Two that are equal are the same one, with the same past.

    Attributes:
        config: where it is and how to ask it.
        name: ``host:port``, never with credentials; the value of the label ``target``.
        labels: what its group says of it, by name.
        source: who named it.
    """

    config: TargetConfig
    name: str
    labels: Labels = ()
    source: SourceName = field(default="static", compare=False)

    @property
    def key(self) -> tuple[str, Labels]:
        """What tells its series from those of all others."""
        return self.name, self.labels


def name_of(config: TargetConfig) -> str:
    """``host:port`` of a target; a unix socket's path where it has one."""
    if config.unix_socket is not None:
        return f"unix:{config.unix_socket}"
    parts = urlsplit(config.url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS.get(parts.scheme, 80)}"


class Source(Protocol):
    """Where targets come from.

    Attributes:
        name: its kind.
        config: its configuration; two sources with equal ones are the same.
        every: seconds between looks for changes, None if nothing ever changes.
        targets: those known.
        failures: looks that failed.
    """

    name: SourceName
    every: float | None
    targets: Sequence[Target]
    failures: int

    @property
    def config(self) -> object:
        """As above."""

    async def look(self) -> None:
        """Look for changes; raises nothing but CancelledError."""
        ...


class StaticSource:
    """The targets that the configuration names."""

    name: SourceName = "static"
    every: float | None = None
    failures = 0

    def __init__(self, targets: Sequence[TargetConfig], reserved: frozenset[str]) -> None:
        self.config = targets
        tell = _Teller("configuration")
        self.targets: Sequence[Target] = tuple(
            Target(replace(config, labels={}), name_of(config), _clean(config.labels, reserved, tell))
            for config in targets
        )

    async def look(self) -> None:
        """Nothing ever changes."""


class _Teller:
    """Logs each slip of a source once, and never more than some."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._told: set[str] = set()

    def __call__(self, what: str) -> None:
        if what not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(what)
            log.warning("part of a target is left out source=%s problem=%r", self._source, what)


def _clean(labels: Mapping[str, str], reserved: frozenset[str], tell: Callable[[str], None]) -> Labels:
    """The labels that may stand on series: legal ones that are not the exporter's own, and not too many."""
    kept: list[tuple[str, str]] = []
    for name, value in sorted(labels.items()):
        if name.startswith("__"):
            continue  # they are for the discovery itself
        if not is_label_name(name) or len(name) > MOST_LABEL_NAME:
            tell(f"label {name[:40]!r}: expected letters, digits and _, at most {MOST_LABEL_NAME}")
        elif name in reserved:
            tell(f"label {name}: the exporter has a label of this name itself")
        elif len(value) > MOST_LABEL_VALUE:
            tell(f"label {name}: expected a value of at most {MOST_LABEL_VALUE} letters, got {len(value)}")
        elif not value.isprintable():
            tell(f"label {name}: expected a printable value")
        elif len(kept) >= MOST_LABELS:
            tell(f"label {name}: expected at most {MOST_LABELS} labels, got more")
        elif value:  # an empty label is none
            kept.append((name, value))
    return tuple(kept)


# DNS

Resolve: TypeAlias = Callable[[str, socket.AddressFamily], Awaitable[Sequence[str]]]


async def _resolve(name: str, family: socket.AddressFamily) -> Sequence[str]:
    """All addresses of a name, by the system's resolver in a thread."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, family=family, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


# The name is known to have no address (any more): a headless service without pods.
_NO_ADDRESS: Final = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}


class DnsSource:
    """The addresses of a name, looked up again and again."""

    name: SourceName = "dns"

    def __init__(
        self, config: DnsTargetsConfig, reserved: frozenset[str], resolve: Resolve = _resolve
    ) -> None:
        """Prepare, without asking anybody.

        Args:
            config: which name, and how its servers are asked.
            reserved: names of labels that are the exporter's own.
            resolve: looks a name up; may raise OSError.
        """
        self.every: float | None = config.refresh
        self.targets: Sequence[Target] = ()
        self.failures = 0
        self.config = config
        self._labels = _clean(config.labels, reserved, _Teller(config.name))
        self._resolve = resolve
        self._asking: asyncio.Future[Sequence[str]] | None = None
        self._trouble = ""

    async def look(self) -> None:
        """Look the name up; a look-up that fails changes nothing."""
        try:
            addresses = await self._addresses()
        except TimeoutError:
            self._fail(f"no answer within {LOOK_UP_SECONDS:g} s")
        except UnicodeError:
            self._fail("no name that DNS can have")
        except OSError as problem:
            if isinstance(problem, socket.gaierror) and problem.errno in _NO_ADDRESS:
                self._fail("the name has no address")
                self.targets = ()
            else:
                self._fail(problem.strerror or "cannot be looked up")
        else:
            if self._trouble:
                log.info("name is looked up again name=%s", self.config.name)
            self._trouble = ""
            self.targets = tuple(map(self._target, addresses))

    async def _addresses(self) -> Sequence[str]:
        # A look-up in a thread cannot be stopped: the next one waits for it instead of starting another.
        if self._asking is None or self._asking.done():
            family = socket.AF_INET6 if self.config.type == "aaaa" else socket.AF_INET
            self._asking = asyncio.ensure_future(self._resolve(self.config.name, family))
        done, _ = await asyncio.wait({self._asking}, timeout=LOOK_UP_SECONDS)
        if not done:
            raise TimeoutError
        return self._asking.result()

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
            log.warning("name cannot be looked up name=%s problem=%r", self.config.name, trouble)
        self._trouble = trouble


# Files


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it was when it could last be read: its stamp, its targets."""

    stamp: object = None
    targets: Sequence[Target] = ()
    trouble: str = ""


class FileSource:
    """Files of Prometheus' ``file_sd`` form.

    A file that is gone takes its targets with it. One that cannot be read, is empty or is not of the form
    keeps those it had: whoever writes it may not have finished.
    """

    name: SourceName = "file_sd"

    def __init__(self, config: FileTargetsConfig, reserved: frozenset[str]) -> None:
        """Prepare, without reading anything.

        Args:
            config: which files, and how their targets are asked.
            reserved: names of labels that are the exporter's own.
        """
        self.every: float | None = config.refresh
        self.targets: Sequence[Target] = ()
        self.failures = 0
        self.config = config
        self._reserved = reserved
        self._files: dict[str, _File] = {}
        self._tell = _Teller("file_sd")

    async def look(self) -> None:
        """Read what has changed, in a thread: a disk may be slow, and YAML is."""
        files = await asyncio.get_running_loop().run_in_executor(None, self._read_all, dict(self._files))
        for path, file in files.items():
            before = self._files.get(path, _File())
            if file.trouble:
                self.failures += 1
                if file.trouble != before.trouble:
                    log.warning("targets cannot be read file=%s problem=%r", path, file.trouble)
            elif before.trouble:
                log.info("targets are read again file=%s", path)
        self._files = files
        self.targets = tuple(target for file in files.values() for target in file.targets)

    def _read_all(self, known: Mapping[str, _File]) -> dict[str, _File]:
        paths = sorted({path for pattern in self.config.files for path in glob.glob(pattern)})  # noqa: PTH207
        return {path: self._read(path, known.get(path, _File())) for path in paths}

    def _read(self, path: str, known: _File) -> _File:
        try:
            stat = os.stat(path)  # noqa: PTH116 (one call less for each of many files)
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp == known.stamp:
                return known
            with open(path, "rb") as file:  # noqa: PTH123 (as above)
                text = file.read(MOST_FILE_BYTES + 1)
            return _File(stamp, tuple(self._targets(text, path)))
        except OSError as problem:
            return replace(known, stamp=None, trouble=(problem.strerror or "unreadable").lower())
        except ValueError as problem:
            return replace(known, stamp=None, trouble=str(problem))

    def _targets(self, text: bytes, path: str) -> Iterable[Target]:
        for group in _groups(text, yaml_form=not path.endswith(".json")):
            labels = _clean(group.labels, self._reserved, self._tell)
            for address in group.targets:
                url = _url(address, group.labels)
                if url is None:
                    self._tell("target: expected host:port, or a port that is a number, got something else")
                    continue
                config = self.config.target(url)
                yield Target(config, name_of(config), labels, self.name)


@dataclass(frozen=True, slots=True)
class _Group:
    targets: Sequence[str]
    labels: Mapping[str, str]


def _groups(text: bytes, *, yaml_form: bool) -> Sequence[_Group]:
    """Read a file's groups.

    Raises:
        ValueError: it is not of the form; the message repeats nothing of it but its shape.
    """
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
        loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # every scalar stays the text that it is
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
    return _Group(targets, {str(name): value for name, value in labels.items()})


def _url(address: str, labels: Mapping[str, str]) -> str | None:
    """The url of a target; None where its address, or what its labels say of the url, makes no sense."""
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
    """Where a configuration's targets come from."""
    return (
        *([StaticSource(config.targets, reserved)] if config.targets else []),
        *(DnsSource(one, reserved) for one in config.targets_dns),
        *(FileSource(one, reserved) for one in config.targets_file_sd),
    )
