"""A server on loopback instead of vLLM. A test decides how it answers: properly, badly or never.

    with Server() as server:  # in its own thread, next to a program under test
        server.mode = status("503 No")
    async with Server(body).run() as server:  # in the test's own loop

A mode answers one request: ``async def mode(server, writer)``. It keeps the connection unless it closes it.
Plain bytes are a mode too: they are sent as they are.
"""

import asyncio
import functools
import gzip
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from support import bodies, real_recordings
from support.process import refusing_port

PATIENCE = 60.0
MIB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
BODY = bodies.body(bodies.engine(running=3, waiting=1, kv=0.4, preemptions=2, finished=5))

Mode = bytes | Callable[["Server", asyncio.StreamWriter], Awaitable[None]]
Text = bytes | Callable[["Server"], bytes]


@dataclass(frozen=True)
class Request:
    """One request: its time by the monotonic clock, and its head."""

    at: float
    head: str

    @property
    def path(self) -> str:
        """Return the path with its query."""
        return self.head.split(" ", 2)[1]

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers by the names that the client wrote."""
        return dict(line.split(": ", 1) for line in self.head.split("\r\n")[1:] if line)


class Server:
    """The server.

    Attributes:
        body: the response to ``/metrics`` while `mode` is `good`.
        mode: of answering; may be changed at any time.
        tls: context of connections; takes effect when the server is opened.
        requests: all of them. `polls`: those for the metrics.
        connections: number ever opened. `open_connections`: those that are open now.
        port: 0 until it is opened for the first time, then always the same, also while it is closed.
    """

    def __init__(
        self,
        body: bytes = BODY,
        *,
        mode: Mode | None = None,
        replies: Sequence[Mode] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Make a server.

        Args:
            body: the first body.
            mode: the first mode; `good` without it.
            replies: the responses in order of the requests, for any path; the last one serves all later
                requests. Without any, `mode` answers ``/metrics``, and other paths do not exist.
            tls: the context of the server's side.
        """
        self.body = body
        self.mode: Mode = good if mode is None else mode
        self.tls = tls
        self.port = 0
        self.requests: list[Request] = []
        self.connections = 0
        self.open_connections: dict[asyncio.StreamWriter, asyncio.StreamReader] = {}
        self.replies = list(replies)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._held = ExitStack()  # the port, while the server is closed

    @property
    def name(self) -> str:
        """Return host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL of its metrics."""
        return self.url_of("127.0.0.1")

    def url_of(self, host: str) -> str:
        """Return the URL of the metrics by another name of this machine."""
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}/metrics"

    @property
    def polls(self) -> list[Request]:
        """Return the requests for its metrics."""
        return [request for request in self.requests if request.path.startswith("/metrics")]

    @property
    def heads(self) -> list[str]:
        """Return the heads of all requests."""
        return [request.head for request in self.requests]

    def text(self) -> bytes:
        """Return the body of the next good response."""
        return self.body

    # In the test's own loop.

    @asynccontextmanager
    async def run(
        self, host: str = "127.0.0.1", path: str | None = None, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[Self]:
        """Listen on a host's port, or on a unix socket, while the block runs."""
        self.tls = tls or self.tls
        await self._listen(host, path)
        try:
            yield self
        finally:
            await self._stop()

    async def _listen(self, host: str = "127.0.0.1", path: str | None = None) -> None:
        if path is not None:
            self._server = await asyncio.start_unix_server(self._serve, path)
        else:
            self._server = await asyncio.start_server(self._serve, host, self.port, ssl=self.tls)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        """Refuse new connections and end those that are open."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.connections += 1
        self.open_connections[writer] = reader
        try:
            # Cancelled only when the server closes and nobody waits for the response.
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while not writer.is_closing():
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    self.requests.append(Request(time.monotonic(), head))
                    await self._answer(self._next(self.requests[-1]), writer)
        finally:
            writer.transport.abort()
            del self.open_connections[writer]
            self._tasks.discard(task)

    def _next(self, request: Request) -> Mode:
        if self.replies:
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return self.mode if request.path.startswith("/metrics") else NOT_FOUND

    async def _answer(self, mode: Mode, writer: asyncio.StreamWriter) -> None:
        if callable(mode):
            await mode(self, writer)
        else:
            await send(writer, mode)

    # In its own thread.

    def open(self) -> None:
        """Listen, always on the same port, which nobody else is given meanwhile."""
        self.port = self.port or self._held.enter_context(refusing_port())
        asyncio.run_coroutine_threadsafe(self._listen(), self._running()).result(PATIENCE)

    def close(self) -> None:
        """Refuse new connections and end those that are open; `open` may follow."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(PATIENCE)

    def _running(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the server's own thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()
        return self._loop

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._held.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()
        self._loop = self._thread = None


class CountingServer(Server):
    """A server that adds one preemption to each good response, unless it is still.

    Attributes:
        first: the count in the first good response. `shown`: the count in the last.
        still: whether to keep the count. It is still at first: a client that misses the first response
            because the machine is busy misses no preemption. A test that has seen a good poll lets it go.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls=tls)
        self.first = self.shown = 41
        self.still = True
        self.start_time = 1000.0

    @property
    def preempted(self) -> int:
        """Return the count of a client that saw all good responses."""
        return self.shown - self.first

    def text(self) -> bytes:
        """Return the next good body."""
        self.shown += not self.still
        engine = bodies.engine(
            running=3,
            waiting=0,
            kv=0.4,
            preemptions=self.shown,
            finished=1000 + 9 * self.shown,
            steps=self.shown,
        )
        return bodies.body(engine, start_time=self.start_time)


@asynccontextmanager
async def servers(*given: Server) -> AsyncIterator[tuple[Server, ...]]:
    """Run several servers in the test's own loop."""
    try:
        for server in given:
            await server._listen()
        yield given
    finally:
        for server in given:
            await server._stop()


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition and return its value."""
    async with asyncio.timeout(PATIENCE):
        try:
            while not (value := condition()):  # noqa: ASYNC110 (the condition sets no event)
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            raise AssertionError(f"waited {PATIENCE:g} s in vain: {what}") from None
    return value


async def got(base: str, path: str = "/metrics", **more: Any) -> str:
    """Return an exporter's response."""
    async with aiohttp.ClientSession() as client, client.get(base + path, **more) as response:
        assert response.status == 200, (path, response.status, await response.text())
        return await response.text()


# Modes


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write some bytes and wait until the client has read most of them."""
    writer.write(data)
    await writer.drain()


def whole(body: bytes, *headers: str) -> bytes:
    """Write a body as a complete good response."""
    more = "".join(f"{line}\r\n" for line in headers).encode()
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


@functools.cache
def recorded() -> bytes:
    """Return a body of a real calm server."""
    return real_recordings.polls(real_recordings.CALM)[-1].body


async def good(server: Server, writer: asyncio.StreamWriter) -> None:
    """Answer as vLLM does."""
    await send(writer, whole(server.text()))


def sending(data: Text, *, keep: bool = False) -> Mode:
    """Send the same bytes to every request."""

    async def mode(server: Server, writer: asyncio.StreamWriter) -> None:
        await send(writer, data(server) if callable(data) else data)
        if not keep:
            writer.close()

    return mode


def status(line: str, *headers: str) -> Mode:
    """Answer with a status and no body."""
    text = "".join(f"{part}\r\n" for part in (f"HTTP/1.1 {line}", *headers, "Content-Length: 0"))
    return text.encode() + b"\r\n"


def with_body(body: Text, *headers: str) -> Mode:
    """Answer with a complete body and its correct length."""
    return sending(lambda server: whole(body(server) if callable(body) else body, *headers), keep=True)


HTML = with_body(b"<!DOCTYPE html><html><body>Welcome to nginx!</body></html>")


def endless(start: bytes, piece: bytes, pause: float = 0.0) -> Mode:
    """Answer without end."""

    async def mode(_server: Server, writer: asyncio.StreamWriter) -> None:
        await send(writer, start)
        while True:
            await send(writer, piece)
            await asyncio.sleep(pause)

    return mode


def drip(data: Callable[[Server], bytes], at_once: int, pause: float = 0.1) -> Mode:
    """Send the end of a response one byte at a time."""

    async def mode(server: Server, writer: asyncio.StreamWriter) -> None:
        text = data(server)
        await send(writer, text[:at_once])
        for byte in text[at_once:]:
            await asyncio.sleep(pause)
            await send(writer, bytes([byte]))
        writer.close()

    return mode


async def silent(server: Server, writer: asyncio.StreamWriter) -> None:
    """Read the request and never answer, until the client gives up."""
    await server.open_connections[writer].read()
    writer.close()


async def reset(_server: Server, writer: asyncio.StreamWriter) -> None:
    """End the connection by a reset."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def reset_within(server: Server, writer: asyncio.StreamWriter) -> None:
    """End it by a reset in the middle of the body, once its first half has arrived."""
    text = server.text()
    await send(writer, HEAD + b"Content-Length: %d\r\n\r\n" % len(text) + text[: len(text) // 2])
    await asyncio.sleep(0.05)
    await reset(server, writer)


@functools.cache
def bomb(size: int) -> bytes:
    """Return zeros, compressed to a thousandth."""
    return gzip.compress(bytes(size), 9)
