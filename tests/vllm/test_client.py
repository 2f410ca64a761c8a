"""The HTTP client against servers that behave, and against servers that do not."""

import asyncio
import gc
import gzip
import os
import random
import socket
import ssl
import struct
import tempfile
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trustme
from aiohttp import web
from cryptography.hazmat.primitives import serialization

from exporter.config import PollConfig, Secret, TargetConfig, TlsConfig
from exporter.net.errors import REASONS
from exporter.net.tls import _CONTEXTS, context
from exporter.vllm.client import Answer, MetricsClient

BODY = b'vllm:num_requests_running{engine="0",model_name="demo-7b"} 3.0\n' * 20
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1024 * 1024
SECRET = "hunter2-is-not-shown"

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A raw server: it notes each request's head and answers with whatever bytes the test chooses."""

    def __init__(self, *replies: bytes | Reply) -> None:
        """Takes the answers in order of the requests; the last one serves for all that follow."""
        self.replies = list(replies)
        self.heads: list[str] = []
        self.connections = 0
        self.open = 0
        self.port = 0
        self._tasks: set[asyncio.Task] = set()

    async def serve(self, reader, writer):
        """Serves one connection until either side is through with it."""
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        self.open += 1
        # Cancelled only at the test's end, and then there is nobody left to tell.
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
        """Listens on a free port of ``host``, or on a unix socket, while the block runs."""
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
        """Gives the address of the metrics."""
        return f"{scheme}://{host}:{self.port}/metrics"


def answer(body=BODY, status="200 OK", **headers):
    """Builds a well-formed answer; ``_`` in a header's name stands for ``-``."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(location, status="301 Moved Permanently"):
    """Builds a redirect."""
    return answer(b"", status, Location=location)


def then_close(data):
    """Replies with some bytes and closes the connection in good order."""

    async def reply(writer):
        writer.write(data)
        await writer.drain()
        writer.close()

    return reply


def then_reset(data):
    """Replies with some bytes, lets them arrive, and resets the connection."""

    async def reply(writer):
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.02)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    return reply


def in_pieces(*pieces, pause=0.02):
    """Replies with one piece after another, each in a packet of its own."""

    async def reply(writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return reply


def endless(head, piece, pause=0.0):
    """Replies without ever coming to an end."""

    async def reply(writer):
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return reply


async def silence(writer):
    """Never replies."""
    await asyncio.Event().wait()


async def until(condition):
    """Waits for a condition, for two seconds at most."""
    async with asyncio.timeout(2):
        while not condition():  # noqa: ASYNC110  # what is waited for sets no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def client_for(url, *, limit=8 * MIB, **options) -> AsyncIterator[MetricsClient]:
    """Makes a client of some target and closes it after the block; ``timeout`` is the poll's."""
    poll = PollConfig(timeout=options.pop("timeout", 2.0), max_body_bytes=limit)
    client = MetricsClient(TargetConfig(url=url, **options), poll)
    try:
        yield client
    finally:
        await client.close()


def fetch(server, *, times=1, host="127.0.0.1", scheme="http", tls=None, **options) -> Answer:
    """Runs a server and a client, fetches some times, and gives the last answer."""

    async def main():
        async with server.run(host.strip("[]"), tls=tls):
            async with client_for(server.url(host, scheme), **options) as client:
                for _ in range(times):
                    last = await client.fetch()
            return last

    return asyncio.run(main())


def assert_error(got: Answer, error: str) -> None:
    """Holds an answer to the one error and to the form of every error."""
    assert got.error == error, got
    assert got.body is None
    assert got.detail
    assert "\n" not in got.detail
    assert len(got.detail) <= 200
    assert got.seconds >= 0


# What good servers send


def test_plain_body_arrives_whole_with_its_type():
    """A plain 200 gives the body, its content type and the time it took."""
    got = fetch(Server(answer(Content_Type="text/plain; version=1.0.0; charset=utf-8")))
    assert (got.body, got.error, got.detail) == (BODY, None, "")
    assert got.content_type == "text/plain; version=1.0.0; charset=utf-8"
    assert 0 < got.seconds < 2


def test_chunked_body_arrives_whole():
    """A chunked body is put together again."""
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:]))
    assert fetch(Server(CHUNKED + parts + b"0\r\n\r\n")).body == BODY


def test_body_without_length_ends_with_the_connection():
    """A server of HTTP/1.0 marks the end by closing."""
    assert fetch(Server(then_close(b"HTTP/1.0 200 OK\r\n\r\n" + BODY))).body == BODY


def test_empty_body_is_an_answer():
    """A body of no bytes is a body: the reader of metrics judges it."""
    assert fetch(Server(answer(b""))).body == b""


def test_request_asks_for_classic_text_uncompressed():
    """The classic text is preferred, OpenMetrics accepted; no compression, no cookie."""
    server = Server(answer(Set_Cookie="a=b"))
    fetch(server, times=2)
    head = server.heads[1]
    assert head.startswith("GET /metrics HTTP/1.1\r\n")
    accept = head.split("\r\nAccept: ")[1].split("\r\n")[0]
    assert accept.startswith("text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=")
    assert "\r\nAccept-Encoding: identity\r\n" in head
    assert "\r\nUser-Agent: vllm-preemption-exporter/" in head
    assert "Cookie" not in head


def test_aiohttp_server_is_understood():
    """A server of another make, compressing on its own account, is read as well."""

    async def metrics(request):
        response = web.Response(body=BODY, content_type="text/plain")
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async def main():
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with client_for(f"http://127.0.0.1:{port}/metrics") as client:
            got = await client.fetch()
        await runner.cleanup()
        return got

    assert asyncio.run(main()).body == BODY


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", " GZIP "])
def test_gzip_body_is_decoded(encoding):
    """Gzip is decoded although it was not asked for."""
    assert fetch(Server(answer(gzip.compress(BODY), Content_Encoding=encoding))).body == BODY


def test_deflate_body_is_decoded():
    """Deflate, that is zlib's form, is decoded too."""
    assert fetch(Server(answer(zlib.compress(BODY), Content_Encoding="deflate"))).body == BODY


def test_identity_is_no_encoding():
    """A body that is said to be encoded as it is, is taken as it is."""
    assert fetch(Server(answer(Content_Encoding="identity"))).body == BODY


def test_gzip_body_of_exactly_the_limit_is_accepted():
    """The limit itself is still allowed."""
    server = Server(answer(gzip.compress(b"x" * 5000), Content_Encoding="gzip"))
    assert fetch(server, limit=5000).body == b"x" * 5000


# Bodies that are too large, too slow or damaged


def test_gzip_bomb_is_refused_within_bounded_memory():
    """A few kilobytes that unfold to 32 MiB are refused without unfolding them."""
    server = Server(answer(gzip.compress(bytes(32 * MIB)), Content_Encoding="gzip"))
    tracemalloc.start()
    try:
        got = fetch(server, limit=MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_error(got, "body_too_large")
    assert peak < 6 * MIB


def test_announced_large_body_is_refused_unread():
    """A Content-Length of 9 MiB is enough to know."""
    assert_error(fetch(Server(in_pieces(OK + b"Content-Length: 9437184\r\n\r\n"))), "body_too_large")


def test_large_body_is_refused():
    """A body of 9 MiB, sent whole, is refused."""
    assert_error(fetch(Server(answer(bytes(9 * MIB)))), "body_too_large")


def test_body_of_exactly_the_limit_is_accepted():
    """The limit itself is still allowed."""
    assert fetch(Server(answer(b"x" * 5000)), limit=5000).body == b"x" * 5000
    assert_error(fetch(Server(answer(b"x" * 5001)), limit=5000), "body_too_large")


@pytest.mark.parametrize(
    "reply",
    [endless(CHUNKED, b"10000\r\n" + bytes(65536) + b"\r\n"), endless(OK + b"\r\n", bytes(65536))],
    ids=["chunked", "until-close"],
)
def test_endless_body_is_refused(reply):
    """A body without end is refused at the limit."""
    assert_error(fetch(Server(reply), limit=MIB), "body_too_large")


def test_next_fetch_works_after_a_refused_body():
    """The connection of a refused body is given up, not read from again."""
    server = Server(answer(bytes(9 * MIB)), answer())
    assert fetch(server, times=2).body == BODY
    assert server.connections == 2


def test_slow_body_runs_into_the_timeout():
    """A byte now and then does not keep the poll alive: the limit is on the whole."""
    got = fetch(Server(endless(OK + b"Content-Length: 1000\r\n\r\n", b"x", pause=0.1)), timeout=0.3)
    assert_error(got, "timeout")
    assert "0.3 s" in got.detail
    assert 0.25 < got.seconds < 1


def test_silent_server_runs_into_the_timeout():
    """A server that accepts and never answers is given up."""
    assert_error(fetch(Server(silence), timeout=0.1), "timeout")


def test_server_that_never_accepts_runs_into_the_timeout():
    """Packets that vanish on the way are a time-out too."""

    async def main():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            full = [socket.socket() for _ in range(4)]
            for filler in full:
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            async with client_for(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=0.2) as client:
                got = await client.fetch()
            for filler in full:
                filler.close()
        return got

    assert_error(asyncio.run(main()), "timeout")


def test_redirects_share_one_timeout():
    """Slow redirects do not add up to more than the time-out."""

    async def slow(writer):
        await asyncio.sleep(0.15)
        writer.write(redirect("/metrics"))

    got = fetch(Server(slow), timeout=0.3)
    assert_error(got, "timeout")
    assert got.seconds < 0.6


@pytest.mark.parametrize(
    "reply",
    [
        then_close(OK + b"Content-Length: 100\r\n\r\nshort"),
        then_close(CHUNKED + b"5\r\nshort\r\n"),
        in_pieces(CHUNKED + b"zz\r\ngarbage"),
        in_pieces(CHUNKED, b"zz\r\ngarbage"),
        in_pieces(CHUNKED + b"5\r\nwhole\r\n", b"zz\r\ngarbage"),
        answer(b"this is not gzip", Content_Encoding="gzip"),
        answer(gzip.compress(BODY)[:-12], Content_Encoding="gzip"),
        answer(gzip.compress(BODY)[:-8] + b"wrongsum", Content_Encoding="gzip"),
        answer(gzip.compress(BODY) * 2, Content_Encoding="gzip"),
        answer(b"", Content_Encoding="gzip"),
        answer(BODY, Content_Encoding="br"),
        answer(BODY, Content_Encoding="gzip, gzip"),
    ],
    ids=[
        "short", "chunks cut off", "garbage chunk", "garbage in a second packet", "garbage after a chunk",
        "no gzip", "gzip cut off", "gzip checksum", "two members", "empty gzip", "brotli", "gzip twice",
    ],
)  # fmt: skip
def test_damaged_body_is_a_bad_encoding(reply):
    """A body that cannot be put together or decoded is named as such."""
    assert_error(fetch(Server(reply), timeout=0.3), "bad_encoding")


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"HTTP/9.9 what\r\n\r\n",
        OK + b"Content-Length: many\r\n\r\n",
        OK + b"X: " + b"x" * 100_000 + b"\r\n\r\n",
        OK + b"".join(b"X-%d: x\r\n" % n for n in range(5000)) + b"\r\n",
    ],
    ids=["ssh", "tls alert", "version", "length", "long header", "many headers"],
)
def test_what_is_not_http_is_a_protocol_error(reply):
    """An answer that is not HTTP is named as such."""
    assert_error(fetch(Server(in_pieces(reply)), timeout=0.5), "protocol")


def test_random_bytes_never_raise():
    """Whatever comes instead of an answer, there is one of the named errors, or a body."""
    rng = random.Random(1)
    replies = [then_close(start + rng.randbytes(300)) for start in (b"", OK, OK + b"\r\n", CHUNKED) * 15]

    async def main():
        async with Server(*replies).run() as server, client_for(server.url(), timeout=0.5) as client:
            return [await client.fetch() for _ in range(60)]

    for got in asyncio.run(main()):
        assert (got.body is None) != (got.error is None)
        assert got.error is None or got.error in REASONS or got.error.startswith("http_")


# Connections


def test_nothing_listening_is_connection_refused():
    """A port without a listener refuses."""

    async def main():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            async with client_for(f"http://127.0.0.1:{free.getsockname()[1]}/metrics") as client:
                return await client.fetch()

    assert_error(asyncio.run(main()), "connection_refused")


@pytest.mark.parametrize(
    "reply",
    [
        then_reset(b""),
        then_close(b""),
        then_close(b"HTTP/1.1 200 OK\r\nContent-Le"),
        then_reset(OK + b"Content-Length: 100\r\n\r\nshort"),
        then_reset(CHUNKED + b"5\r\nshort\r\n"),
    ],
    ids=[
        "reset at once",
        "closed at once",
        "closed in the head",
        "reset in the body",
        "reset between chunks",
    ],
)
def test_lost_connection_is_a_connection_reset(reply):
    """A connection lost before the answer was whole is named as such."""
    assert_error(fetch(Server(reply)), "connection_reset")


def test_two_fetches_use_one_connection():
    """The connection is kept alive."""
    server = Server(answer())
    assert fetch(server, times=5).body == BODY
    assert (server.connections, len(server.heads)) == (1, 5)


def test_concurrent_requests_share_the_one_connection():
    """Requests at the same time queue for the connection instead of opening another one."""

    async def main():
        async with Server(answer(b"{}")).run() as server, client_for(server.url()) as client:
            await asyncio.gather(client.fetch(), client.get_json("/version"), client.fetch())
            return server.connections

    assert asyncio.run(main()) == 1


def test_connection_closed_while_idle_is_no_error():
    """A server may close the kept connection between two polls."""

    async def main():
        async with Server(then_close(answer())).run() as server, client_for(server.url()) as client:
            first = await client.fetch()
            await until(lambda: server.open == 0)
            second = await client.fetch()
            return first.body, second.body, server.connections

    assert asyncio.run(main()) == (BODY, BODY, 2)


@pytest.mark.parametrize("end", [then_close(b""), then_reset(b"")], ids=["closed", "reset"])
def test_connection_that_dies_under_the_request_is_replaced(end):
    """A kept connection that is dead by the time the request arrives costs a second try, not an error."""
    server = Server(answer(), end, answer())
    got = fetch(server, times=2)
    assert (got.body, got.error) == (BODY, None)
    assert (server.connections, len(server.heads)) == (2, 3)


def test_second_death_is_an_error():
    """There is one more try, not many."""
    server = Server(answer(), then_close(b""))
    assert_error(fetch(server, times=2), "connection_reset")
    assert len(server.heads) == 3


def test_close_closes_the_connection():
    """After close() the server sees the end, and a fetch is an error, not an exception."""

    async def main():
        async with Server(answer()).run() as server:
            client = MetricsClient(TargetConfig(url=server.url()), PollConfig())
            await client.fetch()
            assert server.open == 1
            await client.close()
            await client.close()
            await until(lambda: server.open == 0)
            return await client.fetch()

    assert_error(asyncio.run(main()), "unreachable")


def test_close_ends_a_fetch_under_way():
    """Closing while a fetch waits gives that fetch an error, soon."""

    async def main():
        async with Server(silence).run() as server, client_for(server.url(), timeout=5) as client:
            task = asyncio.create_task(client.fetch())
            await until(lambda: server.heads)
            await client.close()
            return await asyncio.wait_for(task, 1)

    assert_error(asyncio.run(main()), "unreachable")


@pytest.mark.parametrize(
    "reply", [silence, in_pieces(CHUNKED, b"zz\r\n", pause=0.05)], ids=["silent", "garbage"]
)
def test_cancellation_is_passed_on(reply):
    """Only a cancellation comes out of fetch() as an exception."""

    async def main():
        async with Server(reply).run() as server, client_for(server.url(), timeout=5) as client:
            task = asyncio.create_task(client.fetch())
            await until(lambda: server.heads)
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_unix_socket_is_asked_instead_of_the_host():
    """The URL's host goes into the Host header only."""

    async def main():
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/vllm.sock"
            async with (
                Server(answer()).run(path=path) as server,
                client_for("http://vllm.example/metrics", unix_socket=path) as client,
            ):
                return await client.fetch(), server.heads[0]

    got, head = asyncio.run(main())
    assert got.body == BODY
    assert "\r\nHost: vllm.example\r\n" in head


def test_missing_unix_socket_is_unreachable(tmp_path):
    """A socket that is not there is an error of the system, told in its words."""

    async def main():
        async with client_for("http://vllm/metrics", unix_socket=str(tmp_path / "none")) as client:
            return await client.fetch()

    got = asyncio.run(main())
    assert_error(got, "unreachable")
    assert "no such file" in got.detail


def test_https_over_a_unix_socket_is_refused(tmp_path):
    """Encryption that was asked for is not dropped in silence."""

    async def main():
        async with client_for("https://vllm/metrics", unix_socket=str(tmp_path / "none")) as client:
            return await client.fetch()

    assert_error(asyncio.run(main()), "tls")


def has_ipv6():
    """Tells whether this machine has the IPv6 loopback."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback (::1)")
def test_ipv6_address_is_reached():
    """A bracketed IPv6 address works."""
    assert fetch(Server(answer()), host="[::1]").body == BODY


def test_unknown_name_is_a_dns_error(monkeypatch):
    """A name that cannot be resolved is named as such."""

    def no_such_name(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)

    async def main():
        async with client_for("http://vllm.invalid:8000/metrics") as client:
            return await client.fetch()

    assert_error(asyncio.run(main()), "dns")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "metrics", "http:///metrics", "http://127.0.0.1:99999/"])
def test_impossible_url_is_an_error(url):
    """Even a URL that no configuration should let through raises nothing."""

    async def main():
        async with client_for(url) as client:
            return await client.fetch()

    assert_error(asyncio.run(main()), "protocol")


def test_proxies_of_the_environment_are_ignored(monkeypatch):
    """A proxy that the environment names never hears of the poll."""

    async def main():
        async with Server(answer(b"from the proxy")).run() as proxy, Server(answer()).run() as server:
            for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            async with client_for(server.url()) as client:
                return (await client.fetch()).body, proxy.connections

    assert asyncio.run(main()) == (BODY, 0)


# Statuses and redirects


@pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 403, 404, 429, 500, 503, 599])
def test_status_is_the_error(status):
    """Any status but 200 is an error with its number, and the next fetch works."""
    server = Server(answer(b"" if status in {204, 304} else b"no", f"{status} Whatever"), answer())

    async def main():
        async with server.run(), client_for(server.url()) as client:
            return await client.fetch(), await client.fetch()

    got, after = asyncio.run(main())
    assert_error(got, f"http_{status}")
    assert str(status) in got.detail
    assert after.body == BODY


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["/metrics/", "metrics/", "absolute", "//authority"])
def test_redirect_within_the_origin_is_followed(status, location):
    """A relative or absolute redirect to the same scheme, host and port is followed, with the token."""

    async def main():
        server = Server(b"", answer())
        async with (
            server.run(),
            client_for(server.url(), bearer_token=Secret(SECRET)) as client,
        ):
            origin = f"127.0.0.1:{server.port}/metrics/"
            where = {"absolute": f"http://{origin}", "//authority": f"//{origin}"}.get(location, location)
            server.replies[0] = redirect(where, f"{status} Elsewhere")
            return await client.fetch(), server

    got, server = asyncio.run(main())
    assert got.body == BODY
    assert server.heads[1].startswith("GET /metrics/ HTTP/1.1\r\n")
    assert f"Authorization: Bearer {SECRET}\r\n" in server.heads[1]
    assert server.connections == 1


def test_redirect_loop_is_an_error():
    """Three redirects are followed, a fourth is not."""
    server = Server(redirect("/metrics"))
    assert_error(fetch(server), "redirect")
    assert len(server.heads) == 4


def test_three_redirects_are_followed():
    """Three redirects are still in order."""
    assert fetch(Server(redirect("/a"), redirect("/b"), redirect("/c"), answer())).body == BODY


def test_redirect_to_another_port_is_refused_and_learns_nothing(tmp_path):
    """No connection is made to another origin, so no credential can get there."""

    async def main():
        async with (
            Server(answer()).run() as other,
            Server(redirect(other.url())).run() as server,
            client_for(
                server.url(), bearer_token=Secret(SECRET), headers={"X-Api-Key": Secret(SECRET)}
            ) as client,
        ):
            return await client.fetch(), other

    got, other = asyncio.run(main())
    assert_error(got, "redirect")
    assert got.detail == "redirected to another origin, which is not followed"
    assert (other.connections, other.heads) == (0, [])


@pytest.mark.parametrize(
    "location",
    [
        "https://127.0.0.1/metrics", "http://localhost/metrics", f"http://me:{SECRET}@elsewhere/",
        "file:///etc/passwd", "mailto:me@example.org", "http://[", "http://127.0.0.1:99999/",
        "http://" + "x" * 3000 + "/",
    ],
)  # fmt: skip
def test_redirect_out_of_the_origin_is_refused(location):
    """Another scheme, host or port, or no web address at all, is not followed."""
    got = fetch(Server(redirect(location)))
    assert_error(got, "redirect")
    assert SECRET not in repr(got)


def test_redirect_cannot_smuggle_credentials():
    """A user and password that the server puts into a redirect are not used."""

    async def main():
        server = Server(b"", answer())
        async with server.run(), client_for(server.url()) as client:
            server.replies[0] = redirect(f"http://me:other@127.0.0.1:{server.port}/next")
            await client.fetch()
            return server.heads[1]

    head = asyncio.run(main())
    assert head.startswith("GET /next ")
    assert "Authorization" not in head


def test_redirect_without_location_is_its_status():
    """A redirect to nowhere is an answer of that status."""
    assert_error(fetch(Server(answer(b"", "301 Moved"))), "http_301")


# Credentials


def authorization(head):
    """Gives the Authorization headers of a request."""
    return [
        line.partition(": ")[2] for line in head.split("\r\n") if line.lower().startswith("authorization:")
    ]


def test_bearer_token_and_headers_are_sent():
    """The operator's token and headers go with each request."""
    server = Server(answer())
    fetch(server, bearer_token=Secret("tok"), headers={"X-Api-Key": Secret("key"), "accept": Secret("x/y")})
    head = server.heads[0]
    assert authorization(head) == ["Bearer tok"]
    assert "\r\nX-Api-Key: key\r\n" in head
    assert head.lower().count("\r\naccept: ") == 1
    assert "\r\naccept: x/y\r\n" in head


def test_bearer_token_wins_over_an_authorization_header():
    """Two Authorization headers are never sent."""
    server = Server(answer())
    fetch(server, bearer_token=Secret("tok"), headers={"authorization": Secret("other")})
    assert authorization(server.heads[0]) == ["Bearer tok"]


def test_credentials_in_the_url_become_basic_authorization():
    """A user and password in the URL are sent as such, and leave the URL."""

    async def main():
        async with Server(answer()).run() as server:
            async with client_for(f"http://me:p%40ss@127.0.0.1:{server.port}/metrics") as client:
                assert (await client.fetch()).body == BODY
            return server.heads[0]

    head = asyncio.run(main())
    assert authorization(head) == ["Basic bWU6cEBzcw=="]
    assert "p@ss" not in head
    assert "p%40ss" not in head


def test_token_file_is_read_again_after_a_change(tmp_path):
    """A rotated token is used from the next fetch on; a newline at its end is not part of it."""
    file = tmp_path / "token"
    file.write_text("first\n")

    async def main():
        async with (
            Server(answer()).run() as server,
            client_for(server.url(), bearer_token_file=str(file)) as client,
        ):
            await client.fetch()
            await client.fetch()
            fresh = tmp_path / "fresh"
            fresh.write_text("other\r\n")  # as long as the first one: sizes do not tell
            fresh.replace(file)
            await client.fetch()
            return [authorization(head) for head in server.heads], server.connections

    assert asyncio.run(main()) == ([["Bearer first"], ["Bearer first"], ["Bearer other"]], 1)


def test_token_file_is_read_once_while_unchanged(tmp_path, monkeypatch):
    """An unchanged file costs a stat, not a reading."""
    file = tmp_path / "token"
    file.write_text("tok")
    opened = []
    original = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *args: opened.append(self) or original(self, *args))
    fetch(Server(answer()), times=3, bearer_token_file=str(file))
    assert opened == [file]


def test_a_redirect_that_repeats_the_token_is_not_told():
    """A host's name may hold what the server was sent."""
    got = fetch(Server(redirect(f"http://{SECRET.lower()}.evil.example/")), bearer_token=Secret(SECRET))
    assert_error(got, "redirect")
    assert SECRET.lower() not in got.detail.lower()


def test_a_token_file_that_is_a_pipe_holds_nothing_up(tmp_path):
    """Nobody writes into it, as on a mount that hangs."""
    file = tmp_path / "token"
    os.mkfifo(file)
    got = fetch(Server(answer()), bearer_token_file=str(file))
    assert_error(got, "unreachable")
    assert got.detail == "the bearer token file is not a regular file"


def test_missing_token_file_is_an_error_until_it_is_there(tmp_path):
    """Without its token the request is not sent at all; once the file is there it is."""
    file = tmp_path / "token"

    async def main():
        async with (
            Server(answer()).run() as server,
            client_for(server.url(), bearer_token_file=str(file)) as client,
        ):
            before = await client.fetch()
            asked = len(server.heads)
            file.write_text("tok")
            return before, asked, await client.fetch()

    before, asked, after = asyncio.run(main())
    assert_error(before, "unreachable")
    assert "bearer token file" in before.detail
    assert asked == 0
    assert after.body == BODY


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"two words", b"tok\r\nX-Evil: 1", b"t\x00k", b"\xff\xfe", "tök".encode()],
    ids=["empty", "newline", "space", "injection", "nul", "not utf-8", "not ascii"],
)
def test_unusable_token_is_an_error(tmp_path, content):
    """What no header can carry is not sent."""
    file = tmp_path / "token"
    file.write_bytes(content)
    server = Server(answer())
    assert_error(fetch(server, bearer_token_file=str(file)), "protocol")
    assert server.heads == []


@pytest.mark.parametrize(
    "bad",
    [{"bearer_token": Secret(f"{SECRET}\r\nX: 1")}, {"headers": {"X-Key": Secret(f"{SECRET}\r\nX: 1")}}],
    ids=["token", "header"],
)
def test_secret_that_no_header_can_carry_is_an_error_that_does_not_quote_it(bad):
    """A line break within a secret neither raises nor shows the secret."""
    server = Server(answer())
    got = fetch(server, **bad)
    assert_error(got, "protocol")
    assert SECRET not in repr(got)
    assert server.heads == []


@pytest.mark.parametrize(
    "reply",
    [
        answer(b"", f"401 {SECRET}", WWW_Authenticate=SECRET),
        answer(b"", f"599 {SECRET}"),
        redirect(f"http://{SECRET}:{SECRET}@127.0.0.1:1/{SECRET}?{SECRET}"),
        redirect(f"mailto:{SECRET}"),
        answer(SECRET.encode(), Content_Encoding=SECRET),
        SECRET.encode() + b"\r\n\r\n",
        OK + b"Content-Length: " + SECRET.encode() + b"\r\n\r\n",
        then_close(OK + b"Content-Length: 1000\r\n\r\n" + SECRET.encode()),
        then_reset(b""),
        in_pieces(CHUNKED + SECRET.encode() + b"\r\n"),
        silence,
    ],
)
def test_no_secret_appears_in_an_error(reply, caplog):
    """Even a server that sends the secrets back cannot get them into the answer or the log."""

    async def main():
        async with (
            Server(reply).run() as server,
            client_for(
                f"http://me:{SECRET}@127.0.0.1:{server.port}/metrics",
                timeout=0.2,
                headers={"X-Api-Key": Secret(SECRET)},
                bearer_token=Secret(SECRET),
            ) as client,
        ):
            return await client.fetch()

    got = asyncio.run(main())
    assert got.error
    assert SECRET not in repr(got)
    assert SECRET not in caplog.text


# TLS


class Pki:
    """A certificate authority and the files a client of it needs."""

    def __init__(self, folder: Path) -> None:
        """Makes the authority and a client's certificate."""
        self.ca = trustme.CA()
        self.ca_file = str(folder / "ca.pem")
        self.ca.cert_pem.write_to_path(self.ca_file)
        client = self.ca.issue_cert("exporter@example.org")
        self.cert_file, self.key_file = str(folder / "client.pem"), str(folder / "client.key")
        client.cert_chain_pems[0].write_to_path(self.cert_file)
        client.private_key_pem.write_to_path(self.key_file)

    def server_context(self, *names, client_required=False):
        """Builds a server's side, with a certificate for these names."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.ca.issue_cert(*names).configure_cert(context)
        if client_required:
            self.ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """One authority for all tests of this file."""
    return Pki(tmp_path_factory.mktemp("pki"))


def https(context, tls, *, times=2, reply=None):
    """Fetches twice over TLS from a server on 127.0.0.1."""

    async def main():
        server = Server(reply or answer())
        async with server.run(tls=context), client_for(server.url(scheme="https"), tls=tls) as client:
            for _ in range(times):
                last = await client.fetch()
        return last, server

    return asyncio.run(main())


def test_server_of_the_given_authority_is_trusted(pki):
    """With the right ca_file the body arrives, over one connection."""
    got, server = https(pki.server_context("127.0.0.1"), TlsConfig(ca_file=pki.ca_file))
    assert got.body == BODY
    assert server.connections == 1


def test_unknown_authority_is_a_tls_error(pki):
    """A certificate nobody here vouches for is refused, before any request is sent."""
    got, server = https(pki.server_context("127.0.0.1"), TlsConfig())
    assert_error(got, "tls")
    assert "certificate" in got.detail
    assert server.heads == []


def test_certificate_of_another_name_is_a_tls_error(pki):
    """A good certificate for another host is refused."""
    got, server = https(pki.server_context("other.example"), TlsConfig(ca_file=pki.ca_file))
    assert_error(got, "tls")
    assert "127.0.0.1" in got.detail
    assert server.heads == []


def test_server_name_is_what_the_certificate_is_checked_against(pki):
    """With server_name the certificate of that name is right."""
    tls = TlsConfig(ca_file=pki.ca_file, server_name="other.example")
    assert https(pki.server_context("other.example"), tls)[0].body == BODY


def test_verification_can_be_switched_off(pki):
    """With insecure_skip_verify any certificate goes."""
    got, _ = https(pki.server_context("other.example"), TlsConfig(insecure_skip_verify=True))
    assert got.body == BODY


def test_required_client_certificate_is_sent(pki):
    """With cert_file and key_file a server that wants to know its clients answers."""
    tls = TlsConfig(ca_file=pki.ca_file, cert_file=pki.cert_file, key_file=pki.key_file)
    assert https(pki.server_context("127.0.0.1", client_required=True), tls)[0].body == BODY


def refuse_client(listener, context):
    """Serves one connection without asyncio, which would leave out the alert that says why it ends."""
    connection, _ = listener.accept()
    # The second handle keeps the connection until the client leaves: closing it while the request lies
    # unread would be a reset, which may overtake the alert.
    with connection.dup() as rest, suppress(OSError):
        rest.settimeout(2)
        with suppress(ssl.SSLError), context.wrap_socket(connection, server_side=True) as tls:
            tls.recv(1000)
        while rest.recv(1000):
            pass


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_missing_client_certificate_is_a_tls_error(pki, version):
    """A server that wants a certificate and gets none says so in a TLS alert."""
    context = pki.server_context("127.0.0.1", client_required=True)
    context.minimum_version = context.maximum_version = version

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(2)
            url = f"https://127.0.0.1:{listener.getsockname()[1]}/metrics"
            # aiohttp tries a second time where the alert comes after the handshake, as in TLS 1.3.
            tries = 1 if version == ssl.TLSVersion.TLSv1_2 else 2
            served = [asyncio.to_thread(refuse_client, listener, context) for _ in range(tries)]
            async with client_for(url, tls=TlsConfig(ca_file=pki.ca_file)) as client:
                return (await asyncio.gather(client.fetch(), *served))[0]

    assert_error(asyncio.run(main()), "tls")


def test_missing_client_certificate_at_an_asyncio_server_is_hinted_at(pki):
    """A server made with asyncio, as vLLM's is, only hangs up: the detail says what it may mean."""
    context = pki.server_context("127.0.0.1", client_required=True)
    got, _ = https(context, TlsConfig(ca_file=pki.ca_file))
    assert_error(got, "connection_reset")
    assert "client certificate" in got.detail


def test_plain_server_under_an_https_url_is_a_tls_error():
    """A server that answers without encryption is named as such."""

    async def main():
        async def greet(reader, writer):
            writer.write(answer(status="400 Bad Request"))
            await writer.drain()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with client_for(f"https://127.0.0.1:{port}/metrics") as client:
            got = await client.fetch()
        server.close()
        await server.wait_closed()
        return got

    assert_error(asyncio.run(main()), "tls")


def test_tls_handshake_that_never_ends_runs_into_the_timeout():
    """A server that accepts and says nothing is given up under https too."""

    async def main():
        async with (
            Server(silence).run() as server,
            client_for(server.url(scheme="https"), timeout=0.2) as client,
        ):
            return await client.fetch()

    assert_error(asyncio.run(main()), "timeout")


def test_renewed_authority_is_read_without_a_restart(pki, tmp_path):
    """After a TLS error the certificate files are read again."""
    file = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(file))

    async def main():
        server = Server(answer())
        async with (
            server.run(tls=pki.server_context("127.0.0.1")),
            client_for(server.url(scheme="https"), tls=TlsConfig(ca_file=str(file))) as client,
        ):
            before = await client.fetch()
            pki.ca.cert_pem.write_to_path(str(file))
            return before, await client.fetch()

    before, after = asyncio.run(main())
    assert_error(before, "tls")
    assert after.body == BODY


def test_missing_ca_file_is_an_error_that_names_the_option(tmp_path):
    """The detail says which option's file cannot be loaded."""
    got, _ = https(None, TlsConfig(ca_file=str(tmp_path / "none.pem")))
    assert_error(got, "tls")
    assert got.detail == "cannot load ca_file: no such file or directory"


def test_targets_with_the_same_settings_share_what_tls_needs(pki, tmp_path):
    """Made anew when a file changes, and gone with the last who uses it."""
    copy = tmp_path / "ca.pem"
    copy.write_bytes(Path(pki.ca_file).read_bytes())
    tls = TlsConfig(ca_file=str(copy))
    first = context(tls)
    assert context(TlsConfig(ca_file=str(copy))) is first
    assert context(TlsConfig(ca_file=str(copy), server_name="x")) is not first
    trustme.CA().cert_pem.write_to_path(str(copy))
    assert context(tls) is not first
    del first
    gc.collect()
    assert not [key for key in _CONTEXTS if key[0].ca_file == str(copy)]


def test_damaged_client_certificate_is_an_error_that_names_the_option(pki, tmp_path):
    """A file that is no certificate raises nothing."""
    file = tmp_path / "client.pem"
    file.write_text("not a certificate")
    got, _ = https(None, TlsConfig(ca_file=pki.ca_file, cert_file=str(file)))
    assert_error(got, "tls")
    assert got.detail.startswith("cannot load cert_file")


def test_encrypted_key_is_an_error_instead_of_a_question(pki, tmp_path):
    """Nobody is at the terminal to type a password."""
    plain = serialization.load_pem_private_key(Path(pki.key_file).read_bytes(), None)
    file = tmp_path / "client.key"
    file.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"x"),
        )
    )
    got, _ = https(None, TlsConfig(ca_file=pki.ca_file, cert_file=pki.cert_file, key_file=str(file)))
    assert_error(got, "tls")
    assert got.detail.startswith("cannot load cert_file or key_file")


def test_close_does_not_wait_for_a_silent_tls_server(pki):
    """A server that does not take part in closing TLS holds up nobody."""

    async def main():
        server = Server(answer(), silence)
        async with server.run(tls=pki.server_context("127.0.0.1")):
            client = MetricsClient(
                TargetConfig(url=server.url(scheme="https"), tls=TlsConfig(ca_file=pki.ca_file)),
                PollConfig(timeout=0.2),
            )
            await client.fetch()
            await client.fetch()
            async with asyncio.timeout(0.5):
                await client.close()

    asyncio.run(main())


# Other endpoints


def get_json(server, path, **options):
    """Runs a server and a client and asks for one JSON endpoint."""

    async def main():
        async with server.run(), client_for(server.url(), **options) as client:
            return await client.get_json(path)

    return asyncio.run(main())


def test_json_of_the_same_origin_is_parsed():
    """Other endpoints are asked with the same credentials, and for JSON."""
    server = Server(answer(b'{"version": "0.26.0"}'))
    got = get_json(server, "/server_info?config_format=json", bearer_token=Secret("tok"))
    assert (got.value, got.error) == ({"version": "0.26.0"}, None)
    assert server.heads[0].startswith("GET /server_info?config_format=json HTTP/1.1\r\n")
    assert "\r\nAccept: application/json\r\n" in server.heads[0]
    assert authorization(server.heads[0]) == ["Bearer tok"]


def test_relative_path_stays_under_the_prefix():
    """Behind a gateway a relative path stays beside the metrics."""

    async def main():
        async with (
            Server(answer(b"null")).run() as server,
            client_for(f"http://127.0.0.1:{server.port}/model-a/metrics") as client,
        ):
            return await client.get_json("version"), server.heads[0]

    got, head = asyncio.run(main())
    assert (got.value, got.error) == (None, None)
    assert head.startswith("GET /model-a/version ")


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"", b"\xff", b"[" * 200_000, b"9" * 10_000],
    ids=["html", "empty", "bytes", "deep", "long"],
)
def test_what_is_not_json_is_a_protocol_error(body):
    """A body that is not JSON, or only an attack in its form, is named as such."""
    got = get_json(Server(answer(body)), "/version")
    assert (got.value, got.error) == (None, "protocol")


def test_errors_of_json_endpoints_are_those_of_fetch():
    """An endpoint that is not there is its status."""
    assert get_json(Server(answer(b"", "404 Not Found")), "/version").error == "http_404"


@pytest.mark.parametrize("path", ["http://127.0.0.1:1/x", "//127.0.0.1:1/x", "file:///etc/passwd"])
def test_path_out_of_the_origin_is_refused(path):
    """A path cannot lead to another server."""
    server = Server(answer(b"{}"))
    assert get_json(server, path).error == "redirect"
    assert server.connections == 0
