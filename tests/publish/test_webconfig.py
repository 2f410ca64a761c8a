"""`--web.config.file`: who is let in, over which connections; a mistake in it is said and costs nothing."""

import asyncio
import base64
import contextlib
import logging
import select
import socket
import ssl
import threading
from contextlib import asynccontextmanager

import aiohttp
import bcrypt
import pytest
import trustme
from support.metrics_text import scrape_of
from support.process import ANYWHERE, FAST, Command, until
from support.servers import Server, recorded
from support.web_config import HASH, PASSWORD, TLS, USERS, VERIFIED, Pki

from exporter.config.options import ConfigError
from exporter.publish.web import passwords, webconfig
from exporter.publish.web.app import WebServer, make_app
from exporter.publish.web.webconfig import Guard, read


def basic(pair: bytes) -> dict[str, str]:
    """An Authorization header."""
    return {"Authorization": "Basic " + base64.b64encode(pair).decode()}


MISSING = "expected a readable file, got no such file or directory"


ALICE = basic(b"alice:" + PASSWORD.encode())


# What is read


def test_nothing_in_it_means_nothing_is_asked():
    """As with exporter-toolkit."""
    assert read("", "web.yml") == webconfig.WebFile()


def test_everything_that_is_known_is_read():
    """The keys of exporter-toolkit that keep here what they promise there."""
    file = read(
        "tls_server_config: {cert_file: a.pem, key_file: a.key, client_auth_type: RequireAndVerifyClientCert,"
        " client_ca_file: ca.pem, min_version: TLS13, max_version: TLS13}\n"
        "http_server_config: {http2: false, headers: {Strict-Transport-Security: max-age=60}}\n" + USERS,
        "web.yml",
    )
    assert file.tls_server_config.client_ca_file == "ca.pem"
    assert file.http_server_config.headers == {"Strict-Transport-Security": "max-age=60"}
    assert file.basic_auth_users == {"alice": HASH}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tls: {}", "tls: unknown key"),
        ("tls_server_config: {cipher_suites: [X]}", "tls_server_config.cipher_suites: unknown key"),
        ("tls_server_config: {client_allowed_sans: [X]}", "client_allowed_sans: unknown key"),
        ("tls_server_config: {cert_file: a}", "cert_file: expected both cert_file and key_file"),
        ("tls_server_config: {min_version: TLS13}", "cert_file: expected both cert_file and key_file"),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}",
            "one of TLS12, TLS13, got 'TLS10'",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS13, max_version: TLS12}",
            "min_version: expected at most max_version",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAnyClientCert}",
            "client_auth_type: expected one of",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "client_ca_file: expected it together with",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: VerifyClientCertIfGiven}",
            "client_ca_file: expected it together with",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}",
            "client_auth_type: expected one that asks for certificates",
        ),
        ("http_server_config: {headers: {X-Other: x}}", "headers.X-Other: expected one of"),
        (
            "http_server_config: {headers: {X-Frame-Options: DENY}}",
            "headers.X-Frame-Options: expected deny or sameorigin, got 'DENY'",
        ),
        (
            "http_server_config: {headers: {X-Content-Type-Options: sniff}}",
            "headers.X-Content-Type-Options: expected nosniff, got 'sniff'",
        ),
        ("http_server_config: {http2: maybe}", "http2: expected true or false, got 'maybe'"),
        ("{}\n---\n{}", "found another document"),
        ("basic_auth_users: {alice: secret-word}", "alice: expected a bcrypt hash such as"),
        (f"basic_auth_users: {{alice: {HASH[:4]}31{HASH[6:]}}}", "of a cost up to 16, got 31"),
        ("basic_auth_users: [alice]", "basic_auth_users: expected a mapping of names"),
        ("basic_auth_users: {a: b", "bad yaml"),
        ("basic_auth_users: {a: x, a: y}", "duplicated key"),
        ("basic_auth_users: {alice secret-word}", "(user 1): expected a bcrypt hash such as"),
        ('basic_auth_users: {"secret-word@": x, "secret-word@": y}', "(a name): duplicated key"),
        ('basic_auth_users: {"secret-word@": !x y}', "(a name): line 1: a tag that is not supported"),
        ('basic_auth_users: {"alice:secret-word": x}', "line 1: a key that is not a plain word"),
        ('basic_auth_users: {"secret-word\\n": x}', "line 1: a key that is not a plain word"),
        ("basic_auth_users: {<<: {alice: x}}", "line 1: a key that is not a plain word"),
        ('tls_server_config: {"secret word": x}', "line 1: a key that is not a plain word"),
    ],
)
def test_a_mistake_is_named(text, problem):
    """By its key; unknown keys are refused, for they may have promised something."""
    with pytest.raises(ConfigError) as raised:
        read(text, "web.yml")
    assert problem in str(raised.value)
    assert "secret-word" not in str(raised.value)


def test_without_bcrypt_users_are_a_clear_error(tmp_path, monkeypatch):
    """It is an extra."""
    monkeypatch.setitem(__import__("sys").modules, "bcrypt", None)
    (tmp_path / "web.yml").write_text(USERS)
    with pytest.raises(ConfigError, match=r"vllm-preemption-exporter\[auth\]"):
        Guard(str(tmp_path / "web.yml"))


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "cert_file or key_file: " + MISSING),
        ({"cert.pem": b"x", "cert.key": b"x"}, "cert_file or key_file: expected a certificate and its key"),
    ],
)
def test_a_bad_certificate_is_named(tmp_path, files, problem):
    """At start, with the option that names it."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: cert.pem, key_file: cert.key}")
    with pytest.raises(ConfigError) as raised:
        Guard(str(tmp_path / "web.yml"))
    assert problem in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    """In the words of all files."""
    with pytest.raises(ConfigError, match=MISSING):
        Guard(str(tmp_path / "web.yml"))


# A server with it


@pytest.fixture
def pki(tmp_path):
    """An authority of the test's own."""
    return Pki(tmp_path)


@asynccontextmanager
async def serving(folder, text):
    """A server with a web configuration that is looked at often; its base URL."""
    (folder / "web.yml").write_text(text)
    server = WebServer(make_app(scrape_of(), dict), "127.0.0.1", 0, str(folder / "web.yml"))
    server._guard.seconds = 0.02
    try:
        yield server, await server.start()
    finally:
        await server.stop()


async def status(base, tls=True, path="/metrics", headers=None, source=None):
    """The status of one answer over a connection of its own, or how it failed."""
    connector = aiohttp.TCPConnector(ssl=tls, local_addr=source and (source, 0))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers) as client,
            client.get(base + path) as answer,
        ):
            return answer.status
    except aiohttp.ClientConnectionError:  # with TLS 1.3 a refused client certificate is a reset later on
        return "refused"


async def eventually(condition):
    """Wait for a condition."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.01)


def ask(folder, text, **question):
    """The status of one answer of a server with a web configuration."""

    async def scenario():
        async with serving(folder, text) as (_, base):
            return await status(base, **question)

    return asyncio.run(scenario())


def test_the_page_is_served_over_tls(tmp_path, pki):
    """With the certificate of the file, whose path is relative to the file's."""
    assert ask(tmp_path, TLS % "", tls=pki.client()) == 200


def test_its_url_says_so(tmp_path, pki):
    """As logged at start."""

    async def scenario():
        async with serving(tmp_path, TLS % "") as (_, base):
            return base

    assert asyncio.run(scenario()).startswith("https://127.0.0.1:")


def test_plain_http_is_refused_where_tls_is_asked_for(tmp_path, pki):
    """Nothing is answered in the clear."""

    async def scenario():
        async with serving(tmp_path, TLS % "") as (_, base):
            return await status(base.replace("https", "http"))

    assert asyncio.run(scenario()) == "refused"


def test_old_versions_of_tls_are_refused(tmp_path, pki):
    """Those before min_version, and those after max_version."""
    old, new = pki.client(version=ssl.TLSVersion.TLSv1_2), pki.client()
    new.minimum_version = ssl.TLSVersion.TLSv1_3
    assert ask(tmp_path, TLS % ", min_version: TLS13", tls=old) == "refused"
    assert ask(tmp_path, TLS % "", tls=old) == 200
    assert ask(tmp_path, TLS % ", max_version: TLS12", tls=new) == "refused"


def test_clients_must_show_a_certificate_where_that_is_asked_for(tmp_path, pki):
    """One of the authority in the file, no other."""
    assert ask(tmp_path, VERIFIED, tls=pki.client(pki.ca)) == 200
    assert ask(tmp_path, VERIFIED, tls=pki.client()) == "refused"
    assert ask(tmp_path, VERIFIED, tls=pki.client(trustme.CA())) == "refused"


def test_a_certificate_may_be_asked_for_and_left_out(tmp_path, pki):
    """But a bad one is refused."""
    text = TLS % ", client_ca_file: ca.pem, client_auth_type: VerifyClientCertIfGiven"
    assert ask(tmp_path, text, tls=pki.client()) == 200
    assert ask(tmp_path, text, tls=pki.client(pki.ca)) == 200
    assert ask(tmp_path, text, tls=pki.client(trustme.CA())) == "refused"


def test_headers_of_the_file_are_in_every_answer(tmp_path):
    """Beside the exporter's own."""

    async def scenario():
        text = "http_server_config: {headers: {X-Frame-Options: deny}}\n" + USERS
        async with (
            serving(tmp_path, text) as (_, base),
            aiohttp.ClientSession() as client,
            client.get(base + "/metrics") as answer,
        ):
            return answer.status, answer.headers

    code, headers = asyncio.run(scenario())
    assert code == 401
    assert headers["X-Frame-Options"] == "deny"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["WWW-Authenticate"].startswith("Basic ")


def test_headers_of_the_file_are_in_the_answer_to_what_makes_no_sense(tmp_path):
    """No application sees that one."""

    async def scenario():
        text = "http_server_config: {headers: {X-Frame-Options: deny}}\n" + USERS
        async with serving(tmp_path, text) as (_, base):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
            writer.write(b"nonsense\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer

    answer = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.0 400")
    assert b"\r\nX-Frame-Options: deny\r\n" in answer


@pytest.mark.parametrize("path", ["/metrics", "/-/healthy", "/api/v1/status", "/nowhere"])
def test_without_a_password_nothing_is_shown(tmp_path, path):
    """Not even whether there is such an address."""
    assert ask(tmp_path, USERS, path=path) == 401


@pytest.mark.parametrize(
    "headers",
    [
        basic(b"alice:wrong"),
        basic(b"bob:" + PASSWORD.encode()),
        basic(b"alice"),
        basic(b"alice:a\0b"),
        basic(b"alice:\xff"),
        basic(b"alice:" + b"x" * 5000),
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic"},
        {"Authorization": f"Bearer {PASSWORD}"},
        {"Authorization": ""},
    ],
)
def test_whoever_is_not_named_is_refused(tmp_path, headers, caplog):
    """Whatever is sent in place of a name and its password; nothing of it is logged."""
    assert ask(tmp_path, USERS, headers=headers) == 401
    assert PASSWORD not in caplog.text


def test_whoever_is_named_is_let_in(tmp_path):
    """With the right password."""
    assert ask(tmp_path, USERS, headers=ALICE) == 200


@pytest.mark.parametrize("name", ["alice@example.com", "a b", "j\u00fcrgen", "", "123", "-"])
def test_a_user_may_have_any_name(tmp_path, name):
    """Of printable characters, but for the colon that ends it."""
    text = f'basic_auth_users: {{"{name}": {HASH}}}'
    assert ask(tmp_path, text, headers=basic(f"{name}:{PASSWORD}".encode())) == 200
    assert ask(tmp_path, text, headers=basic(f"{name}x:{PASSWORD}".encode())) == 401


def test_a_password_is_hashed_once_and_off_the_event_loop(tmp_path, monkeypatch):
    """Prometheus asks every few seconds; a hash costs a core a tenth of a second."""
    threads = []

    def check(password, hashed):
        threads.append(threading.current_thread())
        return bcrypt.checkpw(password, hashed)

    monkeypatch.setattr(passwords, "_check", check)

    async def scenario():
        async with serving(tmp_path, USERS) as (_, base):
            good = [await status(base, headers=ALICE) for _ in range(5)]
            bad = [await status(base, headers=basic(b"alice:wrong")) for _ in range(5)]
        return good, bad

    assert asyncio.run(scenario()) == ([200] * 5, [401] * 5)
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_wrong_passwords_push_out_no_right_one(tmp_path):
    """And what is remembered of them is bounded."""

    async def scenario():
        async with serving(tmp_path, USERS) as (server, base):
            assert await status(base, headers=ALICE) == 200
            guard = server._guard
            for number in range(passwords.MOST_REMEMBERED + 20):
                assert not await guard.passwords.accepts(basic(b"alice:%d" % number)["Authorization"])
            return len(guard.passwords._wrong), len(guard.passwords._right)

    assert asyncio.run(scenario()) == (passwords.MOST_REMEMBERED, 1)


def test_a_flood_of_passwords_is_told_to_come_again(tmp_path, monkeypatch):
    """While the one thread is at work, whoever is known already is answered."""
    release = threading.Event()

    def slow(_password, _hashed):
        assert release.wait(60)
        return False

    async def scenario():
        async with serving(tmp_path, USERS) as (_, base):
            assert await status(base, headers=ALICE) == 200
            monkeypatch.setattr(passwords, "_check", slow)
            monkeypatch.setattr(passwords, "MOST_WAITING", 3)
            flood = [
                asyncio.create_task(status(base, headers=basic(b"alice:%d" % number))) for number in range(8)
            ]
            await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
            assert await status(base, headers=ALICE) == 200
            release.set()
            return sorted(await asyncio.gather(*flood))

    assert asyncio.run(scenario()) == [401] * 3 + [503] * 5


def test_a_flood_from_one_address_leaves_room_for_others(tmp_path, monkeypatch):
    """Who was never seen before waits for some of the flood's passwords, not for all."""
    release = threading.Event()

    def slow(password, hashed):
        assert release.wait(60)
        return bcrypt.checkpw(password, hashed)

    monkeypatch.setattr(passwords, "_check", slow)

    async def scenario():
        async with serving(tmp_path, USERS) as (server, base):
            flood = [
                asyncio.create_task(status(base, headers=basic(b"alice:%d" % number), source="127.0.0.2"))
                for number in range(40)
            ]
            await eventually(lambda: sum(task.done() for task in flood) == 40 - passwords.MOST_WAITING_EACH)
            alice = asyncio.create_task(status(base, headers=ALICE))
            await eventually(lambda: server._guard.passwords._waiting["127.0.0.1"])
            release.set()
            return await alice, sorted(await asyncio.gather(*flood)), server._guard.passwords._waiting

    alice, flood, waiting = asyncio.run(scenario())
    assert alice == 200
    assert flood == [401] * passwords.MOST_WAITING_EACH + [503] * (40 - passwords.MOST_WAITING_EACH)
    assert not waiting


def test_whoever_waits_when_it_closes_is_told_to_come_again(tmp_path, monkeypatch):
    """At once; the hash that is under way ends in its own time, before the server does."""
    started, release = threading.Event(), threading.Event()

    def slow(_password, _hashed):
        started.set()
        assert release.wait(60)
        return True

    monkeypatch.setattr(passwords, "_check", slow)

    async def scenario():
        async with serving(tmp_path, USERS) as (server, base):
            asked = [asyncio.create_task(status(base, headers=basic(b"alice:%d" % n))) for n in range(5)]
            await eventually(lambda: server._guard.passwords._waiting.total() == 5 and started.is_set())
            server._guard.passwords.close()
            told = await asyncio.gather(*asked)
            asyncio.get_running_loop().call_later(0.1, release.set)
        return told, release.is_set()

    assert asyncio.run(scenario()) == ([503] * 5, True)


# Changes while it runs


def rewrite(folder, text) -> None:
    """Another configuration, whole from the first moment on: a thread may read it at any time."""
    (folder / "new.yml").write_text(text)
    (folder / "new.yml").rename(folder / "web.yml")


async def becomes(wanted, ask_again):
    """Wait until an answer is as wanted."""
    async with asyncio.timeout(60):
        while (got := await ask_again()) != wanted:  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.02)
    return got


def test_a_user_who_is_struck_out_is_locked_out(tmp_path):
    """Also over a connection that is open already; whoever was added is let in."""
    bob = bcrypt.hashpw(b"bob's", bcrypt.gensalt(4)).decode()

    async def scenario():
        async with serving(tmp_path, USERS) as (_, base), aiohttp.ClientSession(headers=ALICE) as client:

            async def alice():
                async with client.get(base + "/metrics") as answer:
                    return answer.status

            assert await alice() == 200
            rewrite(tmp_path, f"basic_auth_users: {{bob: {bob}}}")
            await becomes(401, alice)
            assert await status(base, headers=basic(b"bob:bob's")) == 200

    asyncio.run(scenario())


def test_a_renewed_certificate_is_shown_from_then_on(tmp_path, pki):
    """cert-manager writes it into the same files."""

    async def scenario():
        async with serving(tmp_path, TLS % "") as (_, base):
            port = int(base.rpartition(":")[2])

            async def serial():
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=pki.client())
                number = writer.get_extra_info("peercert")["serialNumber"]
                writer.close()
                await writer.wait_closed()
                return number

            before = await serial()
            pki.renew()

            async def renewed():
                return await serial() != before

            await becomes(True, renewed)
            assert await status(base, tls=pki.client()) == 200

    asyncio.run(scenario())


def test_another_authority_of_clients_counts_at_once(tmp_path, pki):
    """Who was let in by the old one is not any more, not even over a connection that is open."""
    other = trustme.CA()

    async def scenario():
        connector = aiohttp.TCPConnector(ssl=pki.client(pki.ca), limit=1)
        async with (
            serving(tmp_path, VERIFIED) as (_, base),
            aiohttp.ClientSession(connector=connector) as client,
        ):
            async with client.get(base + "/metrics") as answer:
                assert answer.status == 200
            other.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
            await becomes("refused", lambda: status(base, tls=pki.client(pki.ca)))
            with pytest.raises(aiohttp.ClientConnectionError):
                await client.get(base + "/metrics")
            assert await status(base, tls=pki.client(other)) == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("bad", ["basic_auth_users: {alice: plain}", "nonsense: 1", ""], ids=range(3))
def test_a_change_that_cannot_be_used_changes_nothing(tmp_path, pki, caplog, bad):
    """It is said once, without what it holds, and the old one stays until it is mended."""

    async def scenario():
        async with serving(tmp_path, TLS % "" + USERS) as (_, base):
            rewrite(tmp_path, bad)
            async with asyncio.timeout(60):
                while not caplog.records:  # noqa: ASYNC110 (what is waited for sets no event)
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            assert await status(base, tls=pki.client(), headers=ALICE) == 200
            assert await status(base, tls=pki.client()) == 401
            rewrite(tmp_path, TLS % "")
            await becomes(200, lambda: status(base, tls=pki.client()))

    with caplog.at_level(logging.WARNING, "exporter"):
        asyncio.run(scenario())
    (record,) = caplog.records
    assert record.getMessage().startswith("invalid web configuration, keeping the previous one")
    assert "plain" not in record.getMessage()


def test_a_file_that_is_emptied_lets_nobody_in(tmp_path, caplog):
    """Who writes it in place empties it first. Users are taken away by a file that says so."""

    async def scenario():
        async with serving(tmp_path, USERS) as (_, base):
            rewrite(tmp_path, "\n")
            await eventually(lambda: caplog.records)
            assert await status(base) == 401
            assert await status(base, headers=ALICE) == 200
            rewrite(tmp_path, "basic_auth_users: {}\n")
            await becomes(200, lambda: status(base))

    with caplog.at_level(logging.WARNING, "exporter"):
        asyncio.run(scenario())
    (record,) = caplog.records
    assert "got an empty file" in record.getMessage()


def test_a_file_that_hangs_holds_up_nothing(tmp_path, monkeypatch):
    """Neither answers nor the end; what was read before stays."""
    reading, release = threading.Event(), threading.Event()
    real = webconfig.read

    def read_slowly(text, name):
        reading.set()
        assert release.wait(60)
        return real(text, name)

    async def scenario():
        async with serving(tmp_path, USERS) as (_, base):
            monkeypatch.setattr(webconfig, "read", read_slowly)
            rewrite(tmp_path, "{}")
            await eventually(reading.is_set)
            told = await status(base, headers=ALICE), await status(base)
        release.set()
        return told

    assert asyncio.run(scenario()) == (200, 401)


# The command with it


@pytest.mark.parametrize("attempt", range(3))
def test_a_signal_ends_the_command_while_passwords_are_hashed(tmp_path, attempt):
    """With status 0, though the hash is made in a language that bears no daemon thread being cut off."""
    dear = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(10)).decode()
    (tmp_path / "web.yml").write_text(f"basic_auth_users: {{alice: {dear}}}")
    arguments = ("--target.url", "http://127.0.0.1:9", "--web.config.file", str(tmp_path / "web.yml"))
    with Command(tmp_path, *arguments, *ANYWHERE) as command, contextlib.ExitStack() as opened:
        address = ("127.0.0.1", int(command.base().rpartition(":")[2]))
        clients = [opened.enter_context(socket.create_connection(address)) for _ in range(30)]
        for number, client in enumerate(clients):
            given = basic(b"alice:%d-%d" % (attempt, number))["Authorization"]
            client.sendall(f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: {given}\r\n\r\n".encode())
        # One is refused by then, and the others wait: another is being hashed.
        until(lambda: select.select(clients, [], [], 0)[0], "an answer")
        code, seconds = command.stop()
    assert code == 0, command.err
    assert seconds < 3.0
    assert "FATAL" not in command.err


def test_the_command_serves_with_it(tmp_path, pki):
    """TLS, a password, polls; neither of the secrets is in its log."""
    (tmp_path / "web.yml").write_text(TLS % "" + USERS)
    arguments = ("--web.config.file", str(tmp_path / "web.yml"), *ANYWHERE, *FAST)
    with (
        Server(recorded()) as upstream,
        Command(tmp_path, "--target.url", upstream.url, *arguments) as command,
    ):
        base = command.base()
        until(lambda: upstream.polls, "a poll")
        assert asyncio.run(status(base, tls=pki.client(), headers=ALICE)) == 200
        assert asyncio.run(status(base, tls=pki.client())) == 401
        assert command.stop()[0] == 0
    assert PASSWORD not in command.err
    assert HASH not in command.err


@pytest.mark.parametrize("more", [(), ("--config.check",)])
def test_the_command_says_what_is_wrong_with_it_and_ends(tmp_path, more):
    """With exit status 2, as with any configuration."""
    (tmp_path / "web.yml").write_text("nonsense: 1")
    with Command(tmp_path, "serve", "--web.config.file", str(tmp_path / "web.yml"), *more) as command:
        assert command.end() == 2
    assert "web.yml: nonsense: unknown key" in command.err
    assert "Traceback" not in command.err
