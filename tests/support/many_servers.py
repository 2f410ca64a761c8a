"""Many small servers in the test's own loop, for tests of many targets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp

from support import bodies

PATIENCE = 15.0
BODY = bodies.body(bodies.engine(running=3, waiting=1, kv=0.4, preemptions=2, finished=5))


class Served(asyncio.Protocol):
    """A connection to a `Server`."""

    def __init__(self, server: "Server") -> None:
        self.server = server

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Take note of the connection."""
        self.transport = transport
        self.server.connections.add(transport)

    def connection_lost(self, _problem: Exception | None) -> None:
        """Forget it."""
        self.server.connections.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        """Answer a request, which comes whole."""
        if data.startswith(b"GET /metrics"):
            self.server.polls.append(asyncio.get_running_loop().time())
            if self.server.silent:
                return
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
            self.transport.write(head % len(self.server.body) + self.server.body)
        else:
            self.transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


class Server:
    """A server of one body.

    Attributes:
        body: what it answers to `/metrics`.
        silent: whether it never answers.
        polls: when it was asked, by the loop's clock.
        connections: those that are open.
    """

    def __init__(self, body: bytes = BODY, *, silent: bool = False) -> None:
        self.body = body
        self.silent = silent
        self.polls: list[float] = []
        self.connections: set[asyncio.Transport] = set()

    async def open(self) -> Self:
        """Listen on a free port."""
        self._server = await asyncio.get_running_loop().create_server(lambda: Served(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def name(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where its metrics are."""
        return f"http://{self.name}/metrics"

    def close(self) -> None:
        """Listen no more."""
        self._server.close()
        for transport in list(self.connections):
            transport.abort()


@asynccontextmanager
async def servers(*made: Server) -> AsyncIterator[tuple[Server, ...]]:
    """Servers that listen."""
    try:
        yield tuple([await one.open() for one in made])
    finally:
        for one in made:
            one.close()
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition and return its value."""
    async with asyncio.timeout(PATIENCE):
        try:
            while not (value := condition()):  # noqa: ASYNC110 (whatever it is, there is no event for it)
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            raise AssertionError(f"waited {PATIENCE:g} s in vain: {what}") from None
    return value


async def got(base: str, path: str = "/metrics", **more: Any) -> str:
    """What an exporter answers."""
    async with aiohttp.ClientSession() as client, client.get(base + path, **more) as answer:
        assert answer.status == 200, (path, answer.status, await answer.text())
        return await answer.text()
