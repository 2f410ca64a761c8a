"""``--web.config.file``: TLS and basic authentication of the exporter's server, in exporter-toolkit's format.

The file is that of every Prometheus exporter and passes ``promtool check web-config``; keys that have no
effect here are rejected, not ignored. The file is read again when it or a file that it names changes.
"""

# ruff: noqa: RUF009 - option() and section() are dataclasses.field() with a typed default

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from exporter.config.options import (
    TEXT,
    ConfigError,
    Section,
    choice,
    entries,
    option,
    read_section,
    read_yaml,
    scalar,
    section,
)
from exporter.net.secret_files import Stamp, file_stamp
from exporter.publish.web.passwords import Passwords, load_bcrypt

__all__ = ["CHECK_SECONDS", "Guard", "WebFile", "read"]

log = logging.getLogger(__name__)

# Time between checks of the files for changes.
CHECK_SECONDS: Final = 5.0
_MOST_FILE: Final = 1 << 20
_SHOWN: Final = 80  # characters of a rejected value that an error repeats
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_HASH: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
# One step more doubles the time: 16 takes seconds, the largest possible takes days.
_DEAREST: Final = 16
_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
# Go's RequireAnyClientCert is missing: an unverified certificate proves nothing.
_CLIENTS: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # the server would ask for it and ignore it
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
# The headers that may be set, and their values if these are limited.
_HEADERS: Final[Mapping[str, tuple[str, ...]]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
# exporter-toolkit accepts YAML's older words too.
_SWITCHES: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_USERS_KEY: Final = "basic_auth_users"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _read_users(given: Mapping[str, object]) -> tuple[dict[str, str], list[str]]:
    users, problems = {}, []
    for number, (name, raw) in enumerate(given.items(), 1):
        # Anything but a plain word may be a line without its colon, with the password in it.
        shown = name if _PLAIN.fullmatch(name) else f"(user {number})"
        found = _HASH.fullmatch(raw) if isinstance(raw, str) else None
        if found is None:
            # Not repeated: a plain password is the likeliest slip.
            problems.append(f"{shown}: expected a bcrypt hash such as $2y$10$..., got something else")
        elif int(found[1]) > _DEAREST:
            problems.append(f"{shown}: expected a bcrypt hash of a cost up to {_DEAREST}, got {found[1]}")
        else:
            users[name] = found[0]
    return users, problems


def _read_headers(given: Mapping[str, object]) -> tuple[dict[str, str], list[str]]:
    headers, problems = {}, []
    for name, raw in given.items():
        if name not in _HEADERS:
            problems.append(f"{name}: expected one of {', '.join(_HEADERS)}")
        elif not isinstance(raw, str) or not (raw.isascii() and raw.isprintable()):
            problems.append(f"{name}: expected a printable ASCII text")
        elif _HEADERS[name] and raw not in _HEADERS[name]:
            problems.append(f"{name}: expected {' or '.join(_HEADERS[name])}, got {raw[:_SHOWN]!r}")
        else:
            headers[name] = raw
    return headers, problems


def _read_switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ValueError
    return _SWITCHES[text.lower()]


_USERS: Final = entries("users", "a mapping of names to bcrypt hashes", _read_users, dict)
_SWITCH: Final = scalar("true|false", "true or false", _read_switch)
_EXTRA_HEADERS: Final = entries("headers", "a mapping of header names to texts", _read_headers, dict)


@dataclass(frozen=True, slots=True)
class TlsServerConfig(Section):
    """The server's certificate, and the certificates that it accepts."""

    cert_file: str | None = option(None, TEXT, "certificate with its chain (PEM)")
    key_file: str | None = option(None, TEXT, "key of the certificate (PEM)")
    client_auth_type: str = option("NoClientCert", choice(*_CLIENTS), "verification of clients")
    client_ca_file: str | None = option(None, TEXT, "authorities of accepted clients (PEM)")
    min_version: str = option("TLS12", choice(*_VERSIONS), "oldest version of TLS")
    max_version: str = option("TLS13", choice(*_VERSIONS), "newest version of TLS")

    def conflicts(self) -> Iterable[str]:
        """Report values that contradict each other."""
        if self != TlsServerConfig() and not (self.cert_file and self.key_file):
            yield "cert_file: expected both cert_file and key_file"
        # The system's authorities vouch for everybody.
        if _CLIENTS[self.client_auth_type] != ssl.CERT_NONE and not self.client_ca_file:
            yield "client_ca_file: expected it together with a client_auth_type that verifies"
        if self.client_auth_type == "NoClientCert" and self.client_ca_file:
            yield "client_auth_type: expected one that asks for certificates together with client_ca_file"
        if self.min_version > self.max_version:
            yield "min_version: expected at most max_version"


@dataclass(frozen=True, slots=True)
class HttpServerConfig(Section):
    """Options of HTTP."""

    http2: bool = option(True, _SWITCH, "no effect: this server speaks HTTP/1.1")
    headers: Mapping[str, str] = option({}, _EXTRA_HEADERS, "headers of every answer")


@dataclass(frozen=True, slots=True)
class WebFile(Section):
    """The file's contents."""

    tls_server_config: TlsServerConfig = section(TlsServerConfig)
    http_server_config: HttpServerConfig = section(HttpServerConfig)
    basic_auth_users: Mapping[str, str] = option({}, _USERS, "accepted users: names, and hashes of passwords")


def read(text: str, name: str) -> WebFile:
    """Read the file's text; raises ConfigError with all problems, but no part of a hash or password."""
    tree, problems = read_yaml(text, name, named=_USERS_KEY)
    if not problems:
        found: list[str] = []
        file, _ = read_section(WebFile, tree, "", {}, found)
        problems = [f"{name}: {problem}" for problem in found]
    if problems:
        raise ConfigError(problems)
    return file


_Stamps = tuple[Stamp | None, ...]
_Loaded = tuple[WebFile, ssl.SSLContext | None, _Stamps]


class Guard:
    """Admits the clients that the file allows."""

    def __init__(self, path: str) -> None:
        """Read the file and all files that it names; raises ConfigError with all problems."""
        self.seconds = CHECK_SECONDS  # time between two calls of `refresh`
        self.context: ssl.SSLContext | None = None  # for TLS, None for plain HTTP
        self.passwords = Passwords()  # checks the users
        self._path = Path(path)
        self._stamps: _Stamps = ()
        self._file = WebFile()
        self._problem = ""
        if loaded := self._load():
            self._use(loaded)

    @property
    def extra(self) -> Mapping[str, str]:
        """The file's headers, for every answer."""
        return self._file.http_server_config.headers

    async def refresh(self) -> bool:
        """Read the files again if one has changed, and return whether new connections need a new TLS context.

        An invalid file is logged, and changes nothing.
        """
        before = self.context
        try:
            # In a thread: reading may hang.
            loaded = await asyncio.get_running_loop().run_in_executor(None, self._load)
            if loaded is None:
                return False
            self._use(loaded)
        except ConfigError as problem:
            if str(problem) != self._problem:
                log.warning("invalid web configuration, keeping the previous one problem=%r", str(problem))
            self._problem = str(problem)
            return False
        self._problem = ""
        log.info("web configuration reloaded users=%d", len(self._file.basic_auth_users))
        return before is not None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer 401 to a request without the name and password of a user, if the file has users."""
        header = request.headers.get("Authorization", "")
        if self.passwords.users and not await self.passwords.accepts(header, request.remote):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": 'Basic realm="vllm-preemption-exporter"'})
        return await handler(request)

    async def headers(self, _request: web.Request, response: web.StreamResponse) -> None:
        """Add the file's headers to an answer."""
        response.headers.update(self.extra)

    def _load(self) -> _Loaded | None:
        """Read the files; None if none has changed."""
        stamps = self._stamps_of(self._file)
        if stamps == self._stamps:
            return None
        try:
            with _loading(str(self._path)), self._path.open("rb") as file:
                text = file.read(_MOST_FILE).decode()
        except UnicodeDecodeError as error:
            raise ConfigError([f"{self._path}: expected utf-8 text, got something else"]) from error
        if not text.strip() and self._file != WebFile():
            # A writer that writes in place empties the file first; nobody may be admitted then.
            raise ConfigError([f"{self._path}: expected what it held before or more, got an empty file"])
        read_file = read(text, str(self._path))
        context = self._tls(read_file.tls_server_config)
        # If it names other files their stamps count from now on; a later change is seen by the next check.
        same = self._named(read_file) == self._named(self._file)
        return read_file, context, stamps if same else self._stamps_of(read_file)

    def _use(self, loaded: _Loaded) -> None:
        file, context, stamps = loaded
        if file.basic_auth_users:
            load_bcrypt()
        if self._stamps and (context is None) != (self.context is None):
            raise ConfigError([f"{self._path}: tls_server_config: can be switched on and off at start only"])
        self._file, self.context, self._stamps = file, context, stamps
        self.passwords.users = file.basic_auth_users

    def _tls(self, config: TlsServerConfig) -> ssl.SSLContext | None:
        if config.cert_file is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[config.min_version]
        context.maximum_version = _VERSIONS[config.max_version]
        with _loading(f"{self._path}: tls_server_config.cert_file or key_file"):
            # Without a callback OpenSSL would ask the terminal for an encrypted key's password.
            context.load_cert_chain(
                self._beside(config.cert_file), self._beside(config.key_file or ""), password=lambda: ""
            )
        if config.client_ca_file:
            with _loading(f"{self._path}: tls_server_config.client_ca_file"):
                context.load_verify_locations(self._beside(config.client_ca_file))
        context.verify_mode = _CLIENTS[config.client_auth_type]
        return context

    def _beside(self, path: str) -> Path:
        """A path in the file, which is relative to the file's own folder."""
        return self._path.parent / path

    def _named(self, file: WebFile) -> list[Path]:
        tls = file.tls_server_config
        named = (tls.cert_file, tls.key_file, tls.client_ca_file)
        return [self._path, *(self._beside(path) for path in named if path)]

    def _stamps_of(self, file: WebFile) -> _Stamps:
        return tuple(map(file_stamp, map(str, self._named(file))))


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn an error about a file into a problem that names the file or its option."""
    try:
        yield
    except ssl.SSLError as error:
        why = (error.reason or "not pem").replace("_", " ").lower()
        raise ConfigError([f"{name}: expected a certificate and its key, got {why}"]) from error
    except OSError as error:
        why = (error.strerror or "an error").lower()
        raise ConfigError([f"{name}: expected a readable file, got {why}"]) from error
