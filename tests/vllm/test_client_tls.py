"""The HTTP client and TLS."""

import asyncio
import gc
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from support.http_client import (
    BODY,
    Pki,
    answer,
    assert_error,
    client_for,
    https,
    replying,
)
from support.servers import silent

from exporter.config import PollConfig, TargetConfig, TlsConfig
from exporter.net.tls import _CONTEXTS, context
from exporter.vllm.client import MetricsClient


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """One authority for all tests of this file."""
    return Pki(tmp_path_factory.mktemp("pki"))


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
            replying(silent).run() as server,
            client_for(server.url.replace("http:", "https:"), timeout=0.2) as client,
        ):
            return await client.fetch()

    assert_error(asyncio.run(main()), "timeout")


def test_renewed_authority_is_read_without_a_restart(pki, tmp_path):
    """After a TLS error the certificate files are read again."""
    file = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(file))

    async def main():
        server = replying(answer())
        async with (
            server.run(tls=pki.server_context("127.0.0.1")),
            client_for(server.url, tls=TlsConfig(ca_file=str(file))) as client,
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
        server = replying(answer(), silent)
        async with server.run(tls=pki.server_context("127.0.0.1")):
            client = MetricsClient(
                TargetConfig(url=server.url, tls=TlsConfig(ca_file=pki.ca_file)),
                PollConfig(timeout=0.2),
            )
            await client.fetch()
            await client.fetch()
            async with asyncio.timeout(10):
                await client.close()

    asyncio.run(main())
