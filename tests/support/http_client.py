"""A client of a server that answers with bytes that a test chooses."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trustme

from exporter.config import PollConfig, TargetConfig
from exporter.vllm.client import Answer, MetricsClient
from support.servers import Mode, Server, reset, send

BODY = b'vllm:num_requests_running{engine="0",model_name="demo-7b"} 3.0\n' * 20
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1024 * 1024
SECRET = "hunter2-is-not-shown"


def replying(*replies: Mode) -> Server:
    """Make a server that answers in this order; the last answer serves all later requests."""
    return Server(replies=replies)


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

    async def reply(_server, writer):
        await send(writer, data)
        writer.close()

    return reply


def then_reset(data):
    """Reply with some bytes, let them arrive, and reset the connection."""

    async def reply(server, writer):
        await send(writer, data)
        await asyncio.sleep(0.02)
        await reset(server, writer)

    return reply


def in_pieces(*pieces, pause=0.02):
    """Reply with one piece after another, each in its own packet."""

    async def reply(_server, writer):
        for piece in pieces:
            await send(writer, piece)
            await asyncio.sleep(pause)

    return reply


async def until(condition):
    """Wait for a condition, for a minute at most."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the condition sets no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def client_for(url, *, limit=8 * MIB, **options) -> AsyncIterator[MetricsClient]:
    """Create a client of some target and close it after the block; ``timeout`` is the poll's."""
    poll = PollConfig(timeout=options.pop("timeout", 30.0), max_body_bytes=limit)
    client = MetricsClient(TargetConfig(url=url, **options), poll)
    try:
        yield client
    finally:
        await client.close()


def fetch(server, *, times=1, host="127.0.0.1", tls=None, **options) -> Answer:
    """Run a server and a client, fetch several times, and return the last response."""

    async def main():
        async with server.run(host.strip("[]"), tls=tls):
            async with client_for(server.url_of(host), **options) as client:
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
        server = replying(reply or answer())
        async with (
            server.run(tls=context),
            client_for(server.url.replace("http:", "https:"), tls=tls) as client,
        ):
            for _ in range(times):
                last = await client.fetch()
        return last, server

    return asyncio.run(main())
