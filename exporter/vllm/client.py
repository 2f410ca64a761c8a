"""The HTTP client of one vLLM server: bounded GETs, one after another, on one kept-alive connection.

Whatever the server does, `MetricsClient.fetch` returns within the poll's time-out: the body, or one of a few
named errors. An `Answer` never contains a secret of the operator (token, header value, credentials in a URL).
"""

import asyncio
import json
import zlib
from base64 import b64encode
from dataclasses import dataclass
from http import HTTPStatus
from http.client import responses
from typing import Any, NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from exporter import __version__
from exporter.config import PollConfig, TargetConfig
from exporter.net import tls
from exporter.net.errors import RefusedError, explain
from exporter.net.secret_files import SecretFile

__all__ = ["Answer", "JsonAnswer", "MetricsClient"]

_ACCEPT_METRICS = "text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1"
_MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_DETAIL = 200
_CLOSED = "the client is closed"
# A whole body of the usual size, so that reading it does not pause and resume the transport.
_READ_BUFFER = 262_144
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib detects which by the first bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one GET: exactly one of ``body`` and ``error`` is not None."""

    body: bytes | None  # the decoded body, at most ``max_body_bytes`` long
    error: str | None  # a key of `exporter.net.errors.REASONS`, or ``http_<status>``
    detail: str = ""  # one short line for a person
    seconds: float = 0.0  # duration, including redirects and decoding
    content_type: str = ""  # the Content-Type of the answer, as sent


class JsonAnswer(NamedTuple):
    """Parsed JSON; or None and an error as in `Answer`, which is ``protocol`` if the body is not JSON."""

    value: Any
    error: str | None


class MetricsClient:
    """Fetches from one target, with one session and one kept-alive connection.

    Opens nothing before the first fetch. A connection that the server closed while it was idle is replaced
    without an error: aiohttp itself repeats an idempotent request on a new one.

    Args:
        target: address and credentials.
        poll: the time-out of a whole fetch and the largest body accepted.
    """

    def __init__(self, target: TargetConfig, poll: PollConfig) -> None:
        self._target = target
        self._timeout = poll.timeout
        self._limit = poll.max_body_bytes
        path = target.bearer_token_file
        self._token_file = SecretFile(path, "the bearer token file") if path else None
        self._opened: tuple[aiohttp.ClientSession, URL] | None = None
        self._closed = False

    async def fetch(self) -> Answer:
        """GET the target's metrics. Raises nothing but CancelledError."""
        return await self._ask(None)

    async def get_json(self, path: str) -> JsonAnswer:
        """GET and parse another endpoint of the same origin. Raises nothing but CancelledError.

        Args:
            path: a reference such as ``/version``, relative to the target's URL: under a path prefix
                ``version`` stays next to the metrics.
        """
        answer = await self._ask(path)
        if answer.body is None:
            return JsonAnswer(None, answer.error)
        try:
            return JsonAnswer(json.loads(answer.body), None)
        except (ValueError, RecursionError):
            return JsonAnswer(None, "protocol")

    async def close(self) -> None:
        """Close the connection; later fetches return an error."""
        self._closed = True
        await self._drop_session()

    async def _ask(self, path: str | None) -> Answer:
        """Send one GET and turn every error into a value."""
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            # One limit over everything: name resolution, connecting, all redirects and the body.
            async with asyncio.timeout(self._timeout):
                body, content_type = await self._get(path)
        except Exception as problem:  # noqa: BLE001 - every error becomes an answer
            # If the client was closed during the fetch, aiohttp may raise anything.
            error, detail = ("unreachable", _CLOSED) if self._closed else explain(problem)
            detail += self._hint(error)
        else:
            return Answer(body, None, "", clock() - start, content_type)
        if error == "tls":
            # Certificates are renewed on disk: the next fetch must read them again.
            await self._drop_session()
        return Answer(None, error, detail[:_MAX_DETAIL], clock() - start)

    def _hint(self, error: str) -> str:
        """Explain an error from this target's settings, as an addition to its detail."""
        if error == "timeout":
            return f" (within {self._timeout:g} s)"
        without_certificate = self._target.url.startswith("https:") and not self._target.tls.cert_file
        if error == "connection_reset" and without_certificate:
            # Servers that use asyncio, such as vLLM's, close without a TLS alert.
            return " (perhaps it wants a client certificate)"
        return ""

    async def _get(self, path: str | None) -> tuple[bytes, str]:
        """GET the metrics, or another ``path``, following redirects within the origin."""
        session, url = self._opened or self._open()
        token = self._token_file
        headers = {} if token is None else {"Authorization": _bearer(token.read())}
        if path is not None:
            url, headers = _resolve(url, path), {**headers, "Accept": "application/json"}
        server_name = self._target.tls.server_name
        for _ in range(_MAX_REDIRECTS + 1):
            request = session.get(url, headers=headers, allow_redirects=False, server_hostname=server_name)
            async with request as response:
                status = response.status
                if status == HTTPStatus.OK:
                    return await self._read(response), response.headers.get("Content-Type", "")
                location = response.headers.get("Location") if status in _REDIRECTS else None
            if location is None:
                # The standard's words: the server's own might repeat a secret.
                raise RefusedError(f"http_{status}", f"HTTP {status} {responses.get(status, '')}".rstrip())
            url = _resolve(url, location)
        raise RefusedError("redirect", f"more than {_MAX_REDIRECTS} redirects")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Read and decode the body, without holding much more than the limit."""
        left = self._limit
        if (response.content_length or 0) > left:
            raise _too_large(self._limit)
        pieces = []
        read = response.content.readany
        try:
            while piece := await read():
                left -= len(piece)
                if left < 0:
                    raise _too_large(self._limit)
                pieces.append(piece)
        except asyncio.CancelledError as exc:
            # After a malformed chunk aiohttp closes the connection without an error for the body's reader,
            # which then times out: name the true cause.
            protocol = response.connection and response.connection.protocol
            if protocol is not None and not protocol.is_connected():
                raise exc from aiohttp.ClientPayloadError("malformed chunk")
            raise
        body = b"".join(pieces)
        encoding = response.headers.get("Content-Encoding")
        return body if encoding is None else _decode(body, encoding, self._limit)

    def _open(self) -> tuple[aiohttp.ClientSession, URL]:
        """Create the session and its URL, with everything that stays the same from fetch to fetch."""
        if self._closed:
            raise RefusedError("unreachable", _CLOSED)
        url, headers = _bare(self._target.url), _fixed_headers(self._target)
        session = aiohttp.ClientSession(
            connector=_connector(url, self._target),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),  # ours covers the redirects too
            auto_decompress=False,  # decoded here, within the limit
            read_bufsize=_READ_BUFFER,
            trust_env=False,  # a proxy meant for the internet is wrong between a sidecar and its server
        )
        self._opened = session, url
        return self._opened

    async def _drop_session(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened[0].close()


def _bearer(token: str) -> str:
    """Return the header's value."""
    token = token.strip()
    if not token:
        raise RefusedError("protocol", "the bearer token is empty")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise RefusedError("protocol", "the bearer token has a space or a character that no header can carry")
    return f"Bearer {token}"


def _fixed_headers(target: TargetConfig) -> CIMultiDict[str]:
    """Return the headers of every request; the operator's own override the defaults."""
    headers = CIMultiDict(
        {
            "Accept": _ACCEPT_METRICS,
            # Compressing costs the server more than the few bytes cost the network.
            "Accept-Encoding": "identity",
            "User-Agent": f"vllm-preemption-exporter/{__version__}",
        }
    )
    url = URL(target.url)
    if url.user is not None or url.password is not None:
        pair = f"{url.user or ''}:{url.password or ''}"
        headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    for name, value in target.headers.items():
        headers[name] = value.reveal()
    if target.bearer_token is not None:
        headers["Authorization"] = _bearer(target.bearer_token.reveal())
    return headers


def _bare(url: str) -> URL:
    """Parse the target's URL without its credentials, which go into a header."""
    try:
        bare = URL(url).with_user(None)
    except ValueError:
        bare = URL()
    if bare.scheme not in {"http", "https"} or not bare.host:
        raise RefusedError("protocol", "the target's url is not an http or https address")
    return bare


def _connector(url: URL, target: TargetConfig) -> aiohttp.BaseConnector:
    """Return a connector that holds at most one connection."""
    secure = url.scheme == "https"
    if target.unix_socket is not None:
        if secure:
            # aiohttp would silently speak plain text there.
            raise RefusedError("tls", "https is not possible over a unix socket: use an http url")
        return aiohttp.UnixConnector(path=target.unix_socket, limit=1)
    return aiohttp.TCPConnector(limit=1, ssl=tls.context(target.tls) if secure else True)


def _resolve(base: URL, reference: str) -> URL:
    """Resolve a redirect's target or a path, which must lie within the origin of ``base``."""
    try:
        url = base.join(URL(reference)).with_user(None)
        origin = url.origin()
    except ValueError as exc:
        raise RefusedError("redirect", "redirected to an invalid address") from exc
    if origin != base.origin():
        # Not named: the address may repeat what the server was sent.
        raise RefusedError("redirect", "redirected to another origin")
    return url


def _too_large(limit: int) -> RefusedError:
    return RefusedError("body_too_large", f"the body is larger than {limit} bytes")


def _decode(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress gzip or zlib, up to the limit."""
    name = encoding.strip().lower()
    if name in {"", "identity"}:
        return body
    if name not in {"gzip", "x-gzip", "deflate"}:
        raise RefusedError("bad_encoding", "the content encoding is neither gzip nor deflate")
    decoder = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        plain = decoder.decompress(body, limit + 1)
    except zlib.error as exc:
        raise RefusedError("bad_encoding", "the compressed body is damaged") from exc
    if len(plain) > limit:
        raise _too_large(limit)
    # A second member is rejected too: no metrics server sends one, and very many make a slow bomb.
    if not decoder.eof or decoder.unused_data:
        raise RefusedError("bad_encoding", "the compressed body is cut off or has bytes after its end")
    return plain
