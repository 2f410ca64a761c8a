"""The HTTP client: redirects, credentials and other endpoints."""

import asyncio
import os
from pathlib import Path

import pytest
from support.http_client import (
    BODY,
    CHUNKED,
    OK,
    SECRET,
    answer,
    assert_error,
    client_for,
    fetch,
    in_pieces,
    redirect,
    replying,
    then_close,
    then_reset,
)
from support.servers import silent

from exporter.config import Secret

# Statuses and redirects


@pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 403, 404, 429, 500, 503, 599])
def test_status_is_the_error(status):
    """Any status but 200 is an error with its number, and the next fetch works."""
    server = replying(answer(b"" if status in {204, 304} else b"no", f"{status} Whatever"), answer())

    async def main():
        async with server.run(), client_for(server.url) as client:
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
        server = replying(b"", answer())
        async with (
            server.run(),
            client_for(server.url, bearer_token=Secret(SECRET)) as client,
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
    server = replying(redirect("/metrics"))
    assert_error(fetch(server), "redirect")
    assert len(server.heads) == 4


def test_three_redirects_are_followed():
    """Three redirects are still in order."""
    assert fetch(replying(redirect("/a"), redirect("/b"), redirect("/c"), answer())).body == BODY


def test_redirect_to_another_port_is_refused_and_learns_nothing(tmp_path):
    """No connection is made to another origin, so no credential can get there."""

    async def main():
        async with (
            replying(answer()).run() as other,
            replying(redirect(other.url)).run() as server,
            client_for(
                server.url, bearer_token=Secret(SECRET), headers={"X-Api-Key": Secret(SECRET)}
            ) as client,
        ):
            return await client.fetch(), other

    got, other = asyncio.run(main())
    assert_error(got, "redirect")
    assert got.detail == "redirected to another origin"
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
    got = fetch(replying(redirect(location)))
    assert_error(got, "redirect")
    assert SECRET not in repr(got)


def test_redirect_cannot_smuggle_credentials():
    """A user and password that the server puts into a redirect are not used."""

    async def main():
        server = replying(b"", answer())
        async with server.run(), client_for(server.url) as client:
            server.replies[0] = redirect(f"http://me:other@127.0.0.1:{server.port}/next")
            await client.fetch()
            return server.heads[1]

    head = asyncio.run(main())
    assert head.startswith("GET /next ")
    assert "Authorization" not in head


def test_redirect_without_location_is_its_status():
    """A redirect to nowhere is an answer of that status."""
    assert_error(fetch(replying(answer(b"", "301 Moved"))), "http_301")


# Credentials


def authorization(head):
    """Gives the Authorization headers of a request."""
    return [
        line.partition(": ")[2] for line in head.split("\r\n") if line.lower().startswith("authorization:")
    ]


def test_bearer_token_and_headers_are_sent():
    """The operator's token and headers go with each request."""
    server = replying(answer())
    fetch(server, bearer_token=Secret("tok"), headers={"X-Api-Key": Secret("key"), "accept": Secret("x/y")})
    head = server.heads[0]
    assert authorization(head) == ["Bearer tok"]
    assert "\r\nX-Api-Key: key\r\n" in head
    assert head.lower().count("\r\naccept: ") == 1
    assert "\r\naccept: x/y\r\n" in head


def test_bearer_token_wins_over_an_authorization_header():
    """Two Authorization headers are never sent."""
    server = replying(answer())
    fetch(server, bearer_token=Secret("tok"), headers={"authorization": Secret("other")})
    assert authorization(server.heads[0]) == ["Bearer tok"]


def test_credentials_in_the_url_become_basic_authorization():
    """A user and password in the URL are sent as such, and leave the URL."""

    async def main():
        async with replying(answer()).run() as server:
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
            replying(answer()).run() as server,
            client_for(server.url, bearer_token_file=str(file)) as client,
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
    fetch(replying(answer()), times=3, bearer_token_file=str(file))
    assert opened == [file]


def test_a_redirect_that_repeats_the_token_is_not_told():
    """A host's name may hold what the server was sent."""
    got = fetch(replying(redirect(f"http://{SECRET.lower()}.evil.example/")), bearer_token=Secret(SECRET))
    assert_error(got, "redirect")
    assert SECRET.lower() not in got.detail.lower()


def test_a_token_file_that_is_a_pipe_holds_nothing_up(tmp_path):
    """Nobody writes into it, as on a mount that hangs."""
    file = tmp_path / "token"
    os.mkfifo(file)
    got = fetch(replying(answer()), bearer_token_file=str(file))
    assert_error(got, "unreachable")
    assert got.detail == "the bearer token file is not a regular file"


def test_missing_token_file_is_an_error_until_it_is_there(tmp_path):
    """Without its token the request is not sent at all; once the file is there it is."""
    file = tmp_path / "token"

    async def main():
        async with (
            replying(answer()).run() as server,
            client_for(server.url, bearer_token_file=str(file)) as client,
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
    server = replying(answer())
    assert_error(fetch(server, bearer_token_file=str(file)), "protocol")
    assert server.heads == []


@pytest.mark.parametrize(
    "bad",
    [{"bearer_token": Secret(f"{SECRET}\r\nX: 1")}, {"headers": {"X-Key": Secret(f"{SECRET}\r\nX: 1")}}],
    ids=["token", "header"],
)
def test_secret_that_no_header_can_carry_is_an_error_that_does_not_quote_it(bad):
    """A line break within a secret neither raises nor shows the secret."""
    server = replying(answer())
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
        silent,
    ],
)
def test_no_secret_appears_in_an_error(reply, caplog):
    """Even a server that sends the secrets back cannot get them into the answer or the log."""

    async def main():
        async with (
            replying(reply).run() as server,
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


# Other endpoints


def get_json(server, path, **options):
    """Runs a server and a client and asks for one JSON endpoint."""

    async def main():
        async with server.run(), client_for(server.url, **options) as client:
            return await client.get_json(path)

    return asyncio.run(main())


def test_json_of_the_same_origin_is_parsed():
    """Other endpoints are asked with the same credentials, and for JSON."""
    server = replying(answer(b'{"version": "0.26.0"}'))
    got = get_json(server, "/server_info?config_format=json", bearer_token=Secret("tok"))
    assert (got.value, got.error) == ({"version": "0.26.0"}, None)
    assert server.heads[0].startswith("GET /server_info?config_format=json HTTP/1.1\r\n")
    assert "\r\nAccept: application/json\r\n" in server.heads[0]
    assert authorization(server.heads[0]) == ["Bearer tok"]


def test_relative_path_stays_under_the_prefix():
    """Behind a gateway a relative path stays beside the metrics."""

    async def main():
        async with (
            replying(answer(b"null")).run() as server,
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
    got = get_json(replying(answer(body)), "/version")
    assert (got.value, got.error) == (None, "protocol")


def test_errors_of_json_endpoints_are_those_of_fetch():
    """An endpoint that is not there is its status."""
    assert get_json(replying(answer(b"", "404 Not Found")), "/version").error == "http_404"


@pytest.mark.parametrize("path", ["http://127.0.0.1:1/x", "//127.0.0.1:1/x", "file:///etc/passwd"])
def test_path_out_of_the_origin_is_refused(path):
    """A path cannot lead to another server."""
    server = replying(answer(b"{}"))
    assert get_json(server, path).error == "redirect"
    assert server.connections == 0
