"""A server that answers with bytes that a test chooses, and a client of it."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trustme

from exporter.config import PollConfig, TargetConfig
from exporter.vllm.client import Answer, MetricsClient

BODY = b'vllm:num_requests_running{engine="0",model_name="demo-7b"} 3.0\n' * 20
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1024 * 1024
SECRET = "hunter2-is-not-shown"

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A raw server: it stores each request's head and answers with the bytes that the test chooses."""

    def __init__(self, *replies: bytes | Reply) -> None:
        """Store the responses in order of the requests; the last one serves all later requests."""
        self.replies = list(replies)
        self.heads: list[str] = []
        self.connections = 0
        self.open = 0
        self.port = 0
        self._tasks: set[asyncio.Task] = set()

    async def serve(self, reader, writer):
        """Serve one connection until either side closes it."""
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        self.open += 1
        # Cancelled only at the end of the test, when nobody waits for it.
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
                reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                if callable(reply):
                    await reply(writer)
                else:
                    writer.write(reply)
                    await writer.drain()
        self.open -= 1
        writer.transport.abort()

    @asynccontextmanager
    async def run(self, host="127.0.0.1", path=None, tls=None):
        """Listen on a free port of ``host``, or on a unix socket, while the block runs."""
        if path is not None:
            server = await asyncio.start_unix_server(self.serve, path)
        else:
            server = await asyncio.start_server(self.serve, host, 0, ssl=tls)
            self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks)
            await server.wait_closed()

    def url(self, host="127.0.0.1", scheme="http"):
        """Return the URL of the metrics."""
        return f"{scheme}://{host}:{self.port}/metrics"


def answer(body=BODY, status="200 OK", **headers):
    """Build a well-formed response; ``_`` in a header's name means ``-``."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(location, status="301 Moved Permanently"):
    """Build a redirect."""
    return answer(b"", status, Location=location)


def then_close(data):
    """Reply with some bytes and close the connection properly."""

    async def reply(writer):
        writer.write(data)
        await writer.drain()
        writer.close()

    return reply


def then_reset(data):
    """Reply with some bytes, let them arrive, and reset the connection."""

    async def reply(writer):
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.02)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    return reply


def in_pieces(*pieces, pause=0.02):
    """Reply with one piece after another, each in its own packet."""

    async def reply(writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return reply


def endless(head, piece, pause=0.0):
    """Reply without end."""

    async def reply(writer):
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return reply


async def silence(writer):
    """Never reply."""
    await asyncio.Event().wait()


async def until(condition):
    """Wait for a condition, for a minute at most."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the condition sets no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def client_for(url, *, limit=8 * MIB, **options) -> AsyncIterator[MetricsClient]:
    """Create a client of some target and close it after the block; ``timeout`` is the poll's."""
    poll = PollConfig(timeout=options.pop("timeout", 2.0), max_body_bytes=limit)
    client = MetricsClient(TargetConfig(url=url, **options), poll)
    try:
        yield client
    finally:
        await client.close()


def fetch(server, *, times=1, host="127.0.0.1", scheme="http", tls=None, **options) -> Answer:
    """Run a server and a client, fetch several times, and return the last response."""

    async def main():
        async with server.run(host.strip("[]"), tls=tls):
            async with client_for(server.url(host, scheme), **options) as client:
                for _ in range(times):
                    last = await client.fetch()
            return last

    return asyncio.run(main())


def assert_error(got: Answer, error: str) -> None:
    """Assert that a response has the one error, in the form of every error."""
    assert got.error == error, got
    assert got.body is None
    assert got.detail
    assert "\n" not in got.detail
    assert len(got.detail) <= 200
    assert got.seconds >= 0


class Pki:
    """A certificate authority and the files a client of it needs."""

    def __init__(self, folder: Path) -> None:
        """Create the authority and a client's certificate."""
        self.ca = trustme.CA()
        self.ca_file = str(folder / "ca.pem")
        self.ca.cert_pem.write_to_path(self.ca_file)
        client = self.ca.issue_cert("exporter@example.org")
        self.cert_file, self.key_file = str(folder / "client.pem"), str(folder / "client.key")
        client.cert_chain_pems[0].write_to_path(self.cert_file)
        client.private_key_pem.write_to_path(self.key_file)

    def server_context(self, *names, client_required=False):
        """Build a server's context, with a certificate for these names."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.ca.issue_cert(*names).configure_cert(context)
        if client_required:
            self.ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def https(context, tls, *, times=2, reply=None):
    """Fetch twice over TLS from a server on 127.0.0.1."""

    async def main():
        server = Server(reply or answer())
        async with server.run(tls=context), client_for(server.url(scheme="https"), tls=tls) as client:
            for _ in range(times):
                last = await client.fetch()
        return last, server

    return asyncio.run(main())
