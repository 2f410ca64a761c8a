"""Clients that hold the web server up: slow ones, silent ones, too many at once."""

import asyncio
import logging
import socket
import ssl
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
import trustme
from support.metrics_text import scrape_of

from exporter.publish.web import connections
from exporter.publish.web.app import WebServer, make_app

PROMPT = 9.0  # seconds; shorter than every limit that the server has by default
HEAD = b"GET /-/healthy HTTP/1.1\r\nHost: exporter\r\n"
REQUEST = HEAD + b"\r\n"


@pytest.fixture
def soon(monkeypatch):
    """All time limits a fraction of a second."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.6)
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.6)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.9)
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.05)


class Tls:
    """A web configuration with a certificate, and a client that trusts it."""

    def __init__(self, folder):
        authority = trustme.CA()
        made = authority.issue_cert("127.0.0.1")
        made.private_key_pem.write_to_path(str(folder / "key.pem"))
        made.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
        self.config = folder / "web.yml"
        self.config.write_text("tls_server_config: {cert_file: cert.pem, key_file: key.pem}")
        self.client = ssl.create_default_context()
        authority.configure_trust(self.client)


@pytest.fixture
def tls(tmp_path):
    """TLS with a certificate of the test's own."""
    return Tls(tmp_path)


@pytest.fixture(params=["plain", "tls"])
def either(request, tmp_path):
    """No TLS, and TLS."""
    return Tls(tmp_path) if request.param == "tls" else None


@asynccontextmanager
async def serving(most=connections.MOST_CONNECTIONS, answer=None, tls=None):
    """A running server and its port; `/big` is answered as the test says."""

    async def big(_request):
        return aiohttp.web.Response(body=bytes(20 << 20))

    app = make_app(scrape_of(), dict)
    app.router.add_get("/big", answer or big)
    server = WebServer(app, "127.0.0.1", 0, str(tls.config) if tls else None)
    server._connections._most = most
    base = await server.start()
    try:
        yield server, int(base.rpartition(":")[2])
    finally:
        await server.stop()


async def ended(reader, seconds=60.0):
    """Wait until the server has ended a connection; what it had sent before."""
    got = b""
    async with asyncio.timeout(seconds):
        try:
            while piece := await reader.read(1 << 16):
                got += piece
        except ConnectionError:
            pass
    return got


async def eventually(condition, seconds=PROMPT):
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.01)


async def healthy(port, tls=None):
    """Whether somebody else is answered meanwhile."""
    connector = aiohttp.TCPConnector(ssl=tls.client) if tls else None
    async with aiohttp.ClientSession(connector=connector) as client:
        return await _is_well(client, port, tls)


async def _is_well(client, port, tls=None):
    scheme = "https" if tls else "http"
    async with (
        asyncio.timeout(PROMPT),
        client.get(f"{scheme}://127.0.0.1:{port}/-/healthy") as answer,
    ):
        return answer.status == 200


@asynccontextmanager
async def scraping(port, tls=None):
    """Whether one client is answered, always over the connection that it opened first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls.client if tls else None)

    async def scrape():
        writer.write(REQUEST)
        async with asyncio.timeout(PROMPT):
            return (await reader.readuntil(b"healthy\n")).startswith(b"HTTP/1.1 200")

    assert await scrape()
    yield scrape
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def silent(port, count):
    """Connections over which nothing is ever sent."""
    clients = []
    for _ in range(count):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        clients.append(client)
        await asyncio.sleep(0)
    yield clients
    for client in clients:
        client.close()


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


def test_half_a_second_request_is_cut_off(soon, monkeypatch):
    """A connection that has been served once is given no more time for its next request."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 3600.0)  # it is not the limit of idle ones

    async def scenario():
        async with serving() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            assert (await reader.readuntil(b"healthy\n")).startswith(b"HTTP/1.1 200")
            writer.write(HEAD)
            await ended(reader)
            writer.close()

    asyncio.run(scenario())


def test_an_idle_connection_is_kept_for_a_while_and_then_ended(soon, monkeypatch):
    """Scrapes find theirs open; what nobody uses any more goes."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 2.0)  # far above the pause, which load makes longer

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


def test_a_thousand_clients_at_once_leave_the_server_well(either):
    """Whoever comes and goes; nothing of them is left."""

    async def scenario():
        async with serving(most=50, tls=either) as (server, port):
            opened = []
            for _ in range(1000):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
                opened.append(client)
                if len(opened) > 200:
                    opened.pop(0).close()
                await asyncio.sleep(0)
            assert await healthy(port, either)
            assert len(server._connections._open) <= 50
            for client in opened:
                client.close()
            await eventually(lambda: not server._connections._open and not server._connections._handshakes)

    asyncio.run(scenario())


def test_silent_clients_keep_nobody_out(either):
    """Neither who comes new, nor who has been answered long before all of them came."""

    async def scenario():
        async with (
            serving(tls=either) as (server, port),
            scraping(port, either) as scrape,
            silent(port, 210),
        ):
            await eventually(lambda: len(server._connections._open) == connections.MOST_CONNECTIONS)
            for _ in range(3):
                assert await healthy(port, either)
            assert await scrape()
            assert len(server._connections._open) <= connections.MOST_CONNECTIONS

    asyncio.run(scenario())


def test_answered_clients_make_room_too():
    """Half of the places are theirs: who holds more of them, and asks nothing, makes room for who comes."""

    async def scenario():
        async with serving(most=6) as (_, port):
            kept = []
            for _ in range(6):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(REQUEST)
                await reader.readuntil(b"healthy\n")
                kept.append((reader, writer))
            async with silent(port, 2):
                assert await ended(kept[0][0]) == b""
                assert await ended(kept[1][0]) == b""
                assert await healthy(port)
                assert not kept[5][0].at_eof()
            for _, writer in kept:
                writer.close()

    asyncio.run(scenario())


def test_clients_that_go_at_once_keep_nobody_out(either):
    """A port scan, a TCP probe: what has gone holds no place, though its handshake was never told to fail."""

    async def scenario():
        async with serving(tls=either) as (server, port), scraping(port, either) as scrape:
            for _ in range(200):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
            assert await healthy(port, either)
            assert await scrape()
            await eventually(lambda: len(server._connections._open) == 1)

    asyncio.run(scenario())


# TLS


@pytest.mark.parametrize("sent", [REQUEST, b"nonsense" * 100, b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"])
def test_a_handshake_that_fails_leaves_at_once(tls, sent):
    """With all that it held, and without a line."""

    async def scenario():
        async with serving(tls=tls) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await ended(reader, seconds=PROMPT)
            writer.close()
            await eventually(lambda: not server._connections._open and not server._connections._handshakes)
            assert await healthy(port, tls)

    asyncio.run(scenario())


def test_a_handshake_that_does_not_end_is_cut_off(soon, tls, caplog):
    """After the time that a request may take; others are answered meanwhile."""

    async def scenario():
        async with serving(tls=tls) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01\x02\x00\x01")
            assert await healthy(port, tls)
            assert await ended(reader) == b""
            writer.close()
            await eventually(lambda: not server._connections._open and not server._connections._handshakes)

    asyncio.run(scenario())
    assert not caplog.records


def test_a_client_that_says_nothing_after_its_handshake_is_cut_off(soon, tls):
    """TLS alone buys no time."""

    async def scenario():
        async with serving(tls=tls) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls.client)
            assert await ended(reader) == b""
            writer.close()
            await eventually(lambda: not server._connections._open)

    asyncio.run(scenario())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(tls, version):
    """In one piece with it: before the server knows that there is a connection."""

    async def scenario():
        async with serving(tls=tls) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            tls.client.maximum_version = version
            came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
            spoken = tls.client.wrap_bio(came, goes, server_hostname="127.0.0.1")

            async def pumped(step):
                while True:
                    try:
                        return step()
                    except ssl.SSLWantReadError:
                        writer.write(goes.read())
                        came.write(await reader.read(1 << 16))

            async with asyncio.timeout(PROMPT):
                await pumped(spoken.do_handshake)
                spoken.write(REQUEST)
                got = b""
                while b"healthy\n" not in got:
                    got += await pumped(lambda: spoken.read(1 << 16))
            writer.close()
            return got

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/-/healthy", "/nowhere"])
def test_a_handshake_begun_under_old_settings_is_good_for_one_answer(tls, path):
    """Whoever renews a certificate breaks no connection, and none stays for long under what was before."""

    async def scenario():
        async with serving(tls=tls) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await eventually(lambda: server._connections._handshakes)
            server._connections.finish()
            await writer.start_tls(tls.client, server_hostname="127.0.0.1")
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            got = await ended(reader)
            writer.close()
            return got

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 ")


def test_an_end_in_the_middle_of_handshakes_leaves_nothing(tls):
    """Neither a task nor a connection, and it does not wait for them."""

    async def scenario():
        async with serving(tls=tls) as (server, port), silent(port, 20):
            await eventually(lambda: len(server._connections._handshakes) == 20)
            async with asyncio.timeout(PROMPT):
                await server.stop()
            assert not server._connections._handshakes
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_few_answers_wait_to_be_read_at_a_time(monkeypatch):
    """Of forty clients that read nothing of 20 MB only eight have an answer; one that reads gets its own."""
    monkeypatch.setattr(connections, "STALLED_SECONDS", 0.2)

    async def story():
        most = 0
        async with serving() as (server, port):
            silent = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 10) for _ in range(40)]
            for _, writer in silent:
                writer.write(b"GET /big HTTP/1.1\r\nHost: exporter\r\n\r\n")

            def unread():
                each = [one._transport.get_write_buffer_size() for one in server._connections._open.values()]
                return sum(size > 1 << 20 for size in each)

            async with aiohttp.ClientSession() as client:
                reading = asyncio.create_task(_length(client, port))
                while not reading.done():
                    most = max(most, unread())
                    assert await healthy(port)
                    await asyncio.sleep(0)
                assert await reading == 20 << 20
            for _, writer in silent:
                writer.close()
        return most

    assert 0 < asyncio.run(story()) <= connections.MOST_ANSWERS


async def _length(client, port):
    async with asyncio.timeout(60), client.get(f"http://127.0.0.1:{port}/big") as answer:
        return len(await answer.read())


def test_a_connection_that_stays_open_keeps_no_answer():
    """Each of two hundred scrapers would keep a text of its own."""

    async def story():
        made = []

        async def answer(_request):
            response = aiohttp.web.Response(body=bytes(1 << 20))
            made.append(response)
            return response

        async with serving(answer=answer) as (_, port), aiohttp.ClientSession() as client:
            assert await _length(client, port) == 1 << 20
            await eventually(lambda: made[0].body is None)

    asyncio.run(story())
