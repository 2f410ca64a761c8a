"""The HTTP client against servers that behave, and against servers that do not."""

import asyncio
import gzip
import random
import socket
import tempfile
import tracemalloc
import zlib

import pytest
from aiohttp import web
from support.http_client import (
    BODY,
    CHUNKED,
    MIB,
    OK,
    answer,
    assert_error,
    client_for,
    fetch,
    in_pieces,
    redirect,
    replying,
    then_close,
    then_reset,
    until,
)
from support.servers import endless, silent

from exporter.config import PollConfig, TargetConfig
from exporter.net.errors import REASONS
from exporter.vllm.client import MetricsClient

# What good servers send


def test_plain_body_arrives_whole_with_its_type():
    """A plain 200 gives the body, its content type and the time it took."""
    got = fetch(replying(answer(Content_Type="text/plain; version=1.0.0; charset=utf-8")))
    assert (got.body, got.error, got.detail) == (BODY, None, "")
    assert got.content_type == "text/plain; version=1.0.0; charset=utf-8"
    assert 0 < got.seconds < 60


def test_chunked_body_arrives_whole():
    """A chunked body is put together again."""
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:]))
    assert fetch(replying(CHUNKED + parts + b"0\r\n\r\n")).body == BODY


def test_body_without_length_ends_with_the_connection():
    """A server of HTTP/1.0 marks the end by closing."""
    assert fetch(replying(then_close(b"HTTP/1.0 200 OK\r\n\r\n" + BODY))).body == BODY


def test_empty_body_is_an_answer():
    """A body of no bytes is a body: the reader of metrics judges it."""
    assert fetch(replying(answer(b""))).body == b""


def test_request_asks_for_classic_text_uncompressed():
    """The classic text is preferred, OpenMetrics accepted; no compression, no cookie."""
    server = replying(answer(Set_Cookie="a=b"))
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
    assert fetch(replying(answer(gzip.compress(BODY), Content_Encoding=encoding))).body == BODY


def test_deflate_body_is_decoded():
    """Deflate, that is zlib's form, is decoded too."""
    assert fetch(replying(answer(zlib.compress(BODY), Content_Encoding="deflate"))).body == BODY


def test_identity_is_no_encoding():
    """A body that is said to be encoded as it is, is taken as it is."""
    assert fetch(replying(answer(Content_Encoding="identity"))).body == BODY


def test_gzip_body_of_exactly_the_limit_is_accepted():
    """The limit itself is still allowed."""
    server = replying(answer(gzip.compress(b"x" * 5000), Content_Encoding="gzip"))
    assert fetch(server, limit=5000).body == b"x" * 5000


# Bodies that are too large, too slow or damaged


def test_gzip_bomb_is_refused_within_bounded_memory():
    """A few kilobytes that unfold to 32 MiB are refused without unfolding them."""
    server = replying(answer(gzip.compress(bytes(32 * MIB)), Content_Encoding="gzip"))
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
    assert_error(fetch(replying(in_pieces(OK + b"Content-Length: 9437184\r\n\r\n"))), "body_too_large")


def test_large_body_is_refused():
    """A body of 9 MiB, sent whole, is refused."""
    assert_error(fetch(replying(answer(bytes(9 * MIB)))), "body_too_large")


def test_body_of_exactly_the_limit_is_accepted():
    """The limit itself is still allowed."""
    assert fetch(replying(answer(b"x" * 5000)), limit=5000).body == b"x" * 5000
    assert_error(fetch(replying(answer(b"x" * 5001)), limit=5000), "body_too_large")


@pytest.mark.parametrize(
    "reply",
    [endless(CHUNKED, b"10000\r\n" + bytes(65536) + b"\r\n"), endless(OK + b"\r\n", bytes(65536))],
    ids=["chunked", "until-close"],
)
def test_endless_body_is_refused(reply):
    """A body without end is refused at the limit."""
    assert_error(fetch(replying(reply), limit=MIB), "body_too_large")


def test_next_fetch_works_after_a_refused_body():
    """The connection of a refused body is given up, not read from again."""
    server = replying(answer(bytes(9 * MIB)), answer())
    assert fetch(server, times=2).body == BODY
    assert server.connections == 2


def test_slow_body_runs_into_the_timeout():
    """A byte now and then does not keep the poll alive: the limit is on the whole."""
    got = fetch(replying(endless(OK + b"Content-Length: 1000\r\n\r\n", b"x", pause=0.1)), timeout=0.3)
    assert_error(got, "timeout")
    assert "0.3 s" in got.detail
    assert 0.25 < got.seconds < 60  # the body would take 100


def test_silent_server_runs_into_the_timeout():
    """A server that accepts and never answers is given up."""
    assert_error(fetch(replying(silent), timeout=0.1), "timeout")


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

    async def slow(_server, writer):
        await asyncio.sleep(0.15)
        writer.write(redirect("/metrics"))

    server = replying(slow)
    assert_error(fetch(server, timeout=0.3), "timeout")
    assert len(server.heads) <= 3


@pytest.mark.parametrize(
    "reply",
    [
        then_close(OK + b"Content-Length: 100\r\n\r\nshort"),
        then_close(CHUNKED + b"5\r\nshort\r\n"),
        in_pieces(CHUNKED + b"zz\r\ngarbage"),
        answer(b"this is not gzip", Content_Encoding="gzip"),
        answer(gzip.compress(BODY)[:-12], Content_Encoding="gzip"),
        answer(gzip.compress(BODY)[:-8] + b"wrongsum", Content_Encoding="gzip"),
        answer(gzip.compress(BODY) * 2, Content_Encoding="gzip"),
        answer(b"", Content_Encoding="gzip"),
        answer(BODY, Content_Encoding="br"),
        answer(BODY, Content_Encoding="gzip, gzip"),
    ],
    ids=[
        "short", "chunks cut off", "garbage chunk", "no gzip", "gzip cut off", "gzip checksum", "two members",
        "empty gzip", "brotli", "gzip twice",
    ],
)  # fmt: skip
def test_damaged_body_is_a_bad_encoding(reply):
    """A body that cannot be put together or decoded is named as such."""
    assert_error(fetch(replying(reply)), "bad_encoding")


@pytest.mark.parametrize("first", [CHUNKED, CHUNKED + b"5\r\nwhole\r\n"], ids=["at once", "after a chunk"])
def test_damage_in_a_later_packet_is_a_bad_encoding(first):
    """The HTTP client waits for the rest until the timeout; the cause is named all the same."""
    assert_error(fetch(replying(in_pieces(first, b"zz\r\ngarbage")), timeout=2.0), "bad_encoding")


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
    assert_error(fetch(replying(in_pieces(reply))), "protocol")


def test_random_bytes_never_raise():
    """Whatever comes instead of an answer, there is one of the named errors, or a body."""
    rng = random.Random(1)
    replies = [then_close(start + rng.randbytes(300)) for start in (b"", OK, OK + b"\r\n", CHUNKED) * 15]

    async def main():
        async with replying(*replies).run() as server, client_for(server.url, timeout=0.5) as client:
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
    assert_error(fetch(replying(reply)), "connection_reset")


def test_two_fetches_use_one_connection():
    """The connection is kept alive."""
    server = replying(answer())
    assert fetch(server, times=5).body == BODY
    assert (server.connections, len(server.heads)) == (1, 5)


def test_concurrent_requests_share_the_one_connection():
    """Requests at the same time queue for the connection instead of opening another one."""

    async def main():
        async with replying(answer(b"{}")).run() as server, client_for(server.url) as client:
            await asyncio.gather(client.fetch(), client.get_json("/version"), client.fetch())
            return server.connections

    assert asyncio.run(main()) == 1


def test_connection_closed_while_idle_is_no_error():
    """A server may close the kept connection between two polls."""

    async def main():
        async with replying(then_close(answer())).run() as server, client_for(server.url) as client:
            first = await client.fetch()
            await until(lambda: not server.open_connections)
            second = await client.fetch()
            return first.body, second.body, server.connections

    assert asyncio.run(main()) == (BODY, BODY, 2)


@pytest.mark.parametrize("end", [then_close(b""), then_reset(b"")], ids=["closed", "reset"])
def test_connection_that_dies_under_the_request_is_replaced(end):
    """A kept connection that is dead by the time the request arrives costs a second try, not an error."""
    server = replying(answer(), end, answer())
    got = fetch(server, times=2)
    assert (got.body, got.error) == (BODY, None)
    assert (server.connections, len(server.heads)) == (2, 3)


def test_second_death_is_an_error():
    """There is one more try, not many."""
    server = replying(answer(), then_close(b""))
    assert_error(fetch(server, times=2), "connection_reset")
    assert len(server.heads) == 3


def test_close_closes_the_connection():
    """After close() the server sees the end, and a fetch is an error, not an exception."""

    async def main():
        async with replying(answer()).run() as server:
            client = MetricsClient(TargetConfig(url=server.url), PollConfig())
            await client.fetch()
            assert len(server.open_connections) == 1
            await client.close()
            await client.close()
            await until(lambda: not server.open_connections)
            return await client.fetch()

    assert_error(asyncio.run(main()), "unreachable")


def test_close_ends_a_fetch_under_way():
    """Closing while a fetch waits gives that fetch an error, soon."""

    async def main():
        async with replying(silent).run() as server, client_for(server.url, timeout=60) as client:
            task = asyncio.create_task(client.fetch())
            await until(lambda: server.heads)
            await client.close()
            return await asyncio.wait_for(task, 30)

    assert_error(asyncio.run(main()), "unreachable")


@pytest.mark.parametrize(
    "reply", [silent, in_pieces(CHUNKED, b"zz\r\n", pause=0.05)], ids=["silent", "garbage"]
)
def test_cancellation_is_passed_on(reply):
    """Only a cancellation comes out of fetch() as an exception."""

    async def main():
        async with replying(reply).run() as server, client_for(server.url, timeout=5) as client:
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
                replying(answer()).run(path=path) as server,
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
    """Encryption that was asked for is not dropped in silent."""

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
    assert fetch(replying(answer()), host="[::1]").body == BODY


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
        async with replying(answer(b"from the proxy")).run() as proxy, replying(answer()).run() as server:
            for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            async with client_for(server.url) as client:
                return (await client.fetch()).body, proxy.connections

    assert asyncio.run(main()) == (BODY, 0)
