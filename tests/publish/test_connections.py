"""Clients that hold the web server up: slow ones, silent ones, too many at once."""

import asyncio
import logging
import socket
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from exporter.publish import connections
from exporter.publish.web import WebServer, make_app

HEAD = b"GET /-/healthy HTTP/1.1\r\nHost: exporter\r\n"
REQUEST = HEAD + b"\r\n"


@pytest.fixture
def soon(monkeypatch):
    """All time limits a fraction of a second."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.6)
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.05)


@asynccontextmanager
async def serving(most=connections.MOST_CONNECTIONS, answer=None):
    """A running server and its port; `/big` is answered as the test says."""

    async def big(_request):
        return aiohttp.web.Response(body=bytes(20 << 20))

    app = make_app(CollectorRegistry(), dict)
    app.router.add_get("/big", answer or big)
    server = WebServer(app, "127.0.0.1", 0)
    server._connections._most = most
    base = await server.start()
    try:
        yield server, int(base.rpartition(":")[2])
    finally:
        await server.stop()


async def ended(reader, seconds=3.0):
    """Wait until the server has ended a connection; what it had sent before."""
    got = b""
    async with asyncio.timeout(seconds):
        try:
            while piece := await reader.read(1 << 16):
                got += piece
        except ConnectionError:
            pass
    return got


async def eventually(condition, seconds=3.0):
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.01)


async def healthy(port):
    """Whether somebody else is answered meanwhile."""
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://127.0.0.1:{port}/-/healthy") as answer,
    ):
        return answer.status == 200


def hold(*pieces, pause=0.0):
    """Send some pieces, never more, and wait to be cut off."""

    async def scenario():
        async with serving() as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(pause)
            assert await healthy(port)
            got = await ended(reader)
            writer.close()
            assert not server._connections._open
            return got

    return asyncio.run(scenario())


def test_a_client_that_says_nothing_is_cut_off(soon):
    """After the time that a whole request may take."""
    assert hold() == b""


def test_half_a_request_is_cut_off(soon):
    """Its end never comes."""
    assert hold(HEAD) == b""


def test_a_head_that_drips_is_cut_off(soon):
    """The time counts from its first byte: a byte now and then buys none."""
    assert hold(HEAD, *[b"X"] * 40, pause=0.02) == b""


def test_half_a_second_request_is_cut_off(soon):
    """A connection that has been served once is given no more time for its next request."""

    async def scenario():
        async with serving() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            assert (await reader.readuntil(b"healthy\n")).startswith(b"HTTP/1.1 200")
            loop = asyncio.get_running_loop()
            start = loop.time()
            writer.write(HEAD)
            await ended(reader)
            writer.close()
            return loop.time() - start

    assert asyncio.run(scenario()) < 0.55  # well before the limit of idle ones


def test_an_idle_connection_is_kept_for_a_while_and_then_ended(soon):
    """Scrapes find theirs open; what nobody uses any more goes."""

    async def scenario():
        async with serving() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                writer.write(REQUEST)
                await reader.readuntil(b"healthy\n")
                await asyncio.sleep(0.4)
            assert not reader.at_eof()
            await ended(reader)
            writer.close()

    asyncio.run(scenario())


def test_an_answer_that_nobody_reads_is_dropped(soon):
    """It holds memory."""

    async def scenario():
        async with serving() as (server, port):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, b"GET /big HTTP/1.1\r\nHost: exporter\r\n\r\n")
            await eventually(lambda: server._connections._open)
            assert await healthy(port)
            await eventually(lambda: not server._connections._open)
            client.close()

    asyncio.run(scenario())


def test_what_is_sent_without_an_end_is_cut_off():
    """Before it fills the memory: headers, bodies, requests one upon the other."""

    async def scenario(flood):
        async with serving() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError):
                for _ in range(10_000):
                    writer.write(flood)
                    await writer.drain()
                    await asyncio.sleep(0)
                pytest.fail("it was taken to its end")
            writer.close()
            assert await healthy(port)
            assert len(await ended(reader)) < 1 << 20

    for flood in (b"X" * 4096, b"X-Header: x\r\n" * 100):
        asyncio.run(scenario(HEAD + flood if flood[:2] == b"X-" else flood))


def test_the_idlest_connection_makes_room(caplog):
    """With the most connections open all at once, the next one is served, and it is said once."""

    async def scenario():
        async with serving(most=5) as (server, port):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            reader, writer = opened[0]
            writer.write(REQUEST)
            await reader.readuntil(b"healthy\n")
            for _ in range(4):
                assert await healthy(port)
            assert len(server._connections._open) <= 5
            assert await ended(opened[1][0]) == b""
            assert not reader.at_eof()  # it was in use later than the others
            for _, one in opened:
                one.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "too many connections, ending idle ones most=5"
    ]


def test_when_all_are_busy_the_next_is_refused():
    """What is under way is not given up for what comes."""

    async def scenario():
        done = asyncio.Event()

        async def wait(_request):
            await done.wait()
            return aiohttp.web.Response(text="done")

        async with serving(most=2, answer=wait) as (server, port), aiohttp.ClientSession() as client:
            asked = [asyncio.create_task(_text(client, f"http://127.0.0.1:{port}/big")) for _ in range(2)]
            await eventually(lambda: sum(one.busy for one in server._connections._open.values()) == 2)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await ended(reader) == b""
            writer.close()
            done.set()
            assert await asyncio.gather(*asked) == ["done", "done"]

    asyncio.run(scenario())


async def _text(client, url):
    async with client.get(url) as answer:
        return await answer.text()


def test_a_thousand_clients_at_once_leave_the_server_well():
    """Whoever comes and goes; nothing of them is left."""

    async def scenario():
        async with serving(most=50) as (server, port):
            opened = []
            for _ in range(1000):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
                opened.append(client)
                if len(opened) > 200:
                    opened.pop(0).close()
                await asyncio.sleep(0)
            assert await healthy(port)
            assert len(server._connections._open) <= 50
            for client in opened:
                client.close()
            await eventually(lambda: not server._connections._open)

    asyncio.run(scenario())
