"""``--web.config.file``: TLS and basic authentication of the own server, in the format of exporter-toolkit.

The file is that of every Prometheus exporter and passes ``promtool check web-config``; keys whose promise
could not be kept here are refused, not ignored. It is read again when it or a file that it names changes.
"""

# ruff: noqa: RUF009 - option() and section() are dataclasses.field() with a typed default

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import secrets
import ssl
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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

__all__ = ["CHECK_SECONDS", "Guard", "WebFile", "read"]

log = logging.getLogger(__name__)

# How often the files are looked at.
CHECK_SECONDS: Final = 5.0
# Passwords that wait for their turn to be hashed; who asks beyond that is told to come again.
MOST_WAITING: Final = 32
# Of one address: others have their turn.
MOST_WAITING_EACH: Final = 8
# Outcomes remembered, of good and of bad passwords each.
MOST_REMEMBERED: Final = 128
# bcrypt looks at no more of a password; its library refuses what is longer.
_MOST_BYTES: Final = 72
_MOST_FILE: Final = 1 << 20
_SHOWN: Final = 80  # characters of a refused value that an error repeats
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_HASH: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
# One step more doubles the time: 16 takes seconds, the largest possible takes days.
_DEAREST: Final = 16
_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
# Go's RequireAnyClientCert is missing: a certificate that nobody verifies proves nothing.
_CLIENTS: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # it would be asked for and not looked at
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
# The headers that may be set, and the values of those that have no others.
_HEADERS: Final[Mapping[str, tuple[str, ...]]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
_USERS_KEY: Final = "basic_auth_users"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Stamp = tuple[tuple[int, int, int] | None, ...]


def _read_users(given: Mapping[str, object]) -> tuple[dict[str, str], list[str]]:
    users, problems = {}, []
    for number, (name, raw) in enumerate(given.items(), 1):
        # What is no plain word may be a line in which a colon is missing, with the password in it.
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
    try:
        return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}[
            text.lower()
        ]
    except KeyError:
        raise ValueError from None


_USERS: Final = entries("users", "a mapping of names to bcrypt hashes", _read_users, dict)
# As exporter-toolkit reads it, which takes YAML's older words too.
_SWITCH: Final = scalar("true|false", "true or false", _read_switch)
_EXTRA_HEADERS: Final = entries("headers", "a mapping of header names to texts", _read_headers, dict)


@dataclass(frozen=True, slots=True)
class TlsServerConfig(Section):
    """How the server shows who it is, and whom it lets in."""

    cert_file: str | None = option(None, TEXT, "certificate, with those between it and the authority (PEM)")
    key_file: str | None = option(None, TEXT, "its key (PEM)")
    client_auth_type: str = option("NoClientCert", choice(*_CLIENTS), "what is asked of clients")
    client_ca_file: str | None = option(None, TEXT, "authorities whose clients are let in (PEM)")
    min_version: str = option("TLS12", choice(*_VERSIONS), "oldest version of TLS")
    max_version: str = option("TLS13", choice(*_VERSIONS), "newest version of TLS")

    def conflicts(self) -> Iterable[str]:
        """Say which good values do not go together."""
        if self != TlsServerConfig() and not (self.cert_file and self.key_file):
            yield "cert_file: expected both cert_file and key_file"
        # The authorities of the system vouch for everybody.
        if _CLIENTS[self.client_auth_type] != ssl.CERT_NONE and not self.client_ca_file:
            yield "client_ca_file: expected it together with a client_auth_type that verifies"
        if self.client_auth_type == "NoClientCert" and self.client_ca_file:
            yield "client_auth_type: expected one that asks for certificates together with client_ca_file"
        if self.min_version > self.max_version:
            yield "min_version: expected at most max_version"


@dataclass(frozen=True, slots=True)
class HttpServerConfig(Section):
    """Of HTTP itself."""

    http2: bool = option(True, _SWITCH, "without effect: this server speaks HTTP/1.1")
    headers: Mapping[str, str] = option({}, _EXTRA_HEADERS, "headers of every answer")


@dataclass(frozen=True, slots=True)
class WebFile(Section):
    """What the file says."""

    tls_server_config: TlsServerConfig = section(TlsServerConfig)
    http_server_config: HttpServerConfig = section(HttpServerConfig)
    basic_auth_users: Mapping[str, str] = option({}, _USERS, "who is let in: names, and hashes of passwords")


def read(text: str, name: str) -> WebFile:
    """Read the file's text.

    Raises:
        ConfigError: with everything that is wrong in it; no part of a hash or password is repeated.
    """
    tree, problems = read_yaml(text, name, named=_USERS_KEY)
    if not problems:
        found: list[str] = []
        file, _ = read_section(WebFile, tree, "", {}, found)
        problems = [f"{name}: {problem}" for problem in found]
    if problems:
        raise ConfigError(problems)
    return file


_Loaded = tuple[WebFile, ssl.SSLContext | None, Stamp]


class Guard:
    """Lets in whom the file names.

    Attributes:
        context: for TLS, None where the file asks for none.
        seconds: how often to `refresh`.
    """

    def __init__(self, path: str) -> None:
        """Read the file and all that it names.

        Raises:
            ConfigError: with what is wrong.
        """
        self.seconds = CHECK_SECONDS
        self._path = Path(path)
        self._stamp: Stamp = ()
        self._file = WebFile()
        self.context: ssl.SSLContext | None = None
        self._key = secrets.token_bytes(32)  # what is remembered of passwords is worth nothing elsewhere
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._bad: OrderedDict[bytes, None] = OrderedDict()
        self._turn = asyncio.Lock()
        self._waiting: Counter[str | None] = Counter()  # by address
        self._trouble = ""
        self._hashing: asyncio.Future[bool] | None = None
        self._waited: asyncio.Future[bool] | None = None
        self._closed = False
        self._use(self._load())

    @property
    def extra(self) -> Mapping[str, str]:
        """The file's headers, for every answer."""
        return self._file.http_server_config.headers

    async def refresh(self) -> bool:
        """Read the files again where one has changed; what cannot be used is logged, and the old stays.

        Returns:
            Whether TLS must be offered anew.
        """
        before = self.context
        try:
            # In a thread, for they may lie where reading hangs.
            loaded = await asyncio.get_running_loop().run_in_executor(None, self._changed)
            if loaded is None:
                return False
            self._use(loaded)
        except ConfigError as problem:
            if str(problem) != self._trouble:
                log.warning("web configuration cannot be used, the old one stays problem=%r", str(problem))
            self._trouble = str(problem)
            return False
        self._trouble = ""
        log.info("web configuration read again users=%d", len(self._file.basic_auth_users))
        return before is not None

    def close(self) -> None:
        """Check no more passwords: whoever waits is told to come again."""
        self._closed = True
        if self._waited is not None:
            self._waited.cancel()

    async def ended(self) -> None:
        """Wait for the hash that is under way.

        The interpreter breaks threads off when the process ends. Code in C bears that; in bcrypt's, which is
        Rust, it ends in SIGABRT.
        """
        if self._hashing is not None:
            await asyncio.wait([self._hashing])

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers 401 to whoever gives no name and password of the file, where it has any."""
        given = request.headers.get("Authorization", "")
        if self._file.basic_auth_users and not await self._known(given, request.remote):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": 'Basic realm="vllm-preemption-exporter"'})
        return await handler(request)

    async def headers(self, _request: web.Request, response: web.StreamResponse) -> None:
        """Puts the file's headers into an answer."""
        response.headers.update(self.extra)

    def _changed(self) -> _Loaded | None:
        return None if self._stamps(self._file) == self._stamp else self._load()

    def _load(self) -> _Loaded:
        stamp = self._stamps(self._file)
        try:
            with self._path.open("rb") as file:
                text = file.read(_MOST_FILE).decode()
        except OSError as error:
            raise _unreadable(str(self._path), error) from error
        except UnicodeDecodeError as error:
            raise ConfigError([f"{self._path}: expected utf-8 text, got something else"]) from error
        if not text.strip() and self._file != WebFile():
            # Who writes it in place empties it first; that must let nobody in.
            raise ConfigError([f"{self._path}: expected what it held before or more, got an empty file"])
        read_file = read(text, str(self._path))
        context = self._tls(read_file.tls_server_config)
        # The files that the new one names; a change between two looks is seen by the next.
        same = self._named(read_file) == self._named(self._file)
        return read_file, context, stamp if same else self._stamps(read_file)

    def _use(self, loaded: _Loaded) -> None:
        file, context, stamp = loaded
        if file.basic_auth_users:
            _bcrypt()
        if self._stamp and (context is None) != (self.context is None):
            raise ConfigError([f"{self._path}: tls_server_config: can be switched on and off at start only"])
        self._file, self.context, self._stamp = file, context, stamp

    def _tls(self, config: TlsServerConfig) -> ssl.SSLContext | None:
        if config.cert_file is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[config.min_version]
        context.maximum_version = _VERSIONS[config.max_version]
        with _Loading(self._path, "cert_file or key_file"):
            # Without an own callback OpenSSL would ask the terminal for an encrypted key's password.
            context.load_cert_chain(
                self._beside(config.cert_file), self._beside(config.key_file or ""), password=lambda: ""
            )
        if config.client_ca_file:
            with _Loading(self._path, "client_ca_file"):
                context.load_verify_locations(self._beside(config.client_ca_file))
        context.verify_mode = _CLIENTS[config.client_auth_type]
        return context

    def _beside(self, path: str) -> Path:
        """A path of the file, which is relative to the file's own folder."""
        return self._path.parent / path

    def _named(self, file: WebFile) -> list[Path]:
        tls = file.tls_server_config
        named = (tls.cert_file, tls.key_file, tls.client_ca_file)
        return [self._path, *(self._beside(path) for path in named if path)]

    def _stamps(self, file: WebFile) -> Stamp:
        return tuple(map(_stamp, self._named(file)))

    async def _known(self, given: str, remote: str | None = None) -> bool:
        name, password = _credentials(given)
        if password is None:
            return False
        users = self._file.basic_auth_users
        # Whoever is unknown costs as much as who is not: the time tells nothing.
        hashed = users.get(name) or next(iter(users.values()))
        mark = hmac.digest(self._key, b"\0".join((name.encode(), hashed.encode(), password)), hashlib.sha256)
        if mark in self._good:
            self._good.move_to_end(mark)
            return True
        if mark in self._bad:
            return False
        right = await self._hashes_to(password, hashed, remote) and name in users
        _remember(self._good if right else self._bad, mark)
        return right

    async def _hashes_to(self, password: bytes, hashed: str, remote: str | None) -> bool:
        """Whether a password has a hash; in a thread, one at a time: each takes a core for a while."""
        if self._waiting.total() >= MOST_WAITING or self._waiting[remote] >= MOST_WAITING_EACH:
            raise _later()
        self._waiting[remote] += 1
        try:
            async with self._turn:
                if self._closed:
                    raise _later()
                running = asyncio.get_running_loop()
                self._hashing = running.run_in_executor(None, _check, password, hashed.encode())
                self._waited = asyncio.shield(self._hashing)
                await asyncio.wait([self._waited])
                if self._closed:
                    raise _later()
                return self._waited.result()
        finally:
            self._waiting[remote] -= 1
            if not self._waiting[remote]:
                del self._waiting[remote]


def _later() -> web.HTTPException:
    return web.HTTPServiceUnavailable(headers={"Retry-After": "5"})


def _check(password: bytes, hashed: bytes) -> bool:
    try:
        return bool(_bcrypt().checkpw(password[:_MOST_BYTES], hashed))
    except ValueError:  # a NUL within the password
        return False


def _bcrypt() -> Any:
    try:
        import bcrypt  # noqa: PLC0415 (an extra: most sidecars have no users)
    except ImportError:
        raise ConfigError(
            ["basic_auth_users: expected the package bcrypt: install vllm-preemption-exporter[auth]"]
        ) from None
    return bcrypt


def _credentials(header: str) -> tuple[str, bytes | None]:
    """Name and password of an Authorization header; no password where it is none of basic authentication."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return "", None
    try:
        pair = base64.b64decode(encoded.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return "", None
    name, colon, password = pair.partition(":")
    return name, password.encode() if colon else None


def _remember(marks: OrderedDict[bytes, None], mark: bytes) -> None:
    marks[mark] = None
    if len(marks) > MOST_REMEMBERED:
        marks.popitem(last=False)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    # Kubernetes swaps a symbolic link: then the inode tells, even where the times are equal.
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _unreadable(name: str, error: OSError) -> ConfigError:
    return ConfigError([f"{name}: expected a readable file, got {(error.strerror or 'an error').lower()}"])


class _Loading:
    """Turns what OpenSSL says of a file into a problem that names the option."""

    def __init__(self, path: Path, what: str) -> None:
        self._name = f"{path}: tls_server_config.{what}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ssl.SSLError):
            why = (error.reason or "not pem").replace("_", " ").lower()
            raise ConfigError([f"{self._name}: expected a certificate and its key, got {why}"]) from error
        if isinstance(error, OSError):
            raise _unreadable(self._name, error) from error
