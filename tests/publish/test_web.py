"""The exporter's web server: what each address answers, and on which addresses it listens."""

import asyncio
import dataclasses
import errno
import gzip
import json
import logging
import socket
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from support import bodies
from support.metrics_text import scrape_of

from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig, Config, Secret, TargetConfig, WebConfig
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import ReadingCollector
from exporter.publish.page.renderer import Page, assets
from exporter.publish.page.timeline import Timeline
from exporter.publish.page.view import TargetView, View
from exporter.publish.status import status_object
from exporter.publish.web import app as published
from exporter.publish.web.app import WebServer, make_app
from exporter.runtime.sidecar import Sidecar

HIDDEN = "hunter2-is-not-shown"
URL = "http://vllm:8000/metrics"
BODY = bodies.body(bodies.engine(running=3, waiting=1, kv=0.4, preemptions=2, finished=5))
PLAIN = {"Accept-Encoding": "identity"}


def reading(*given: bytes | str):
    """What is known after some polls."""
    pipeline = Pipeline(Config().analysis, {}, 1.0)
    for t, answer in enumerate(given):
        body, error = (answer, None) if isinstance(answer, bytes) else (None, answer)
        last = pipeline.feed(float(t), body, error)
    return last if given else None


@asynccontextmanager
async def serving(*given: bytes | str, shown=None):
    """A client of a server that shows what is known after some polls."""
    known = reading(*given)
    if shown is None:
        shown = ReadingCollector(lambda: known, lambda: float(len(given)), lambda: 1.7e9)
    scrape = scrape_of(shown, ExporterMetrics(), PollCounts())

    def status():
        return {"version": "0.0.0", "targets": [status_object(URL, known, float(len(given)))]}

    def view():
        return View(float(len(given)), 1.7e9, (TargetView(URL, known, Timeline()),), {})

    app = make_app(scrape, status, Page(view, time.monotonic))
    server = WebServer(app, "127.0.0.1", 0)
    base = await server.start()
    try:
        async with aiohttp.ClientSession(base, auto_decompress=False) as client:
            yield client
    finally:
        await server.stop()


def get(path: str, *given: bytes | str, headers=PLAIN, method="GET", shown=None):
    """Status, headers and text of one answer."""

    async def scenario():
        async with (
            serving(*given, shown=shown) as client,
            client.request(method, path, headers=headers) as answer,
        ):
            return SimpleNamespace(status=answer.status, headers=answer.headers, body=await answer.read())

    return asyncio.run(scenario())


# Routes


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8"),
        ("/-/healthy", "text/plain; charset=utf-8"),
        ("/-/ready", "text/plain; charset=utf-8"),
        ("/api/v1/status", "application/json; charset=utf-8"),
        ("/api/v1/history", "application/json; charset=utf-8"),
        ("/", "text/html; charset=utf-8"),
        ("/page.css", "text/css; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
        ("/page.svg", "image/svg+xml"),
    ],
)
@pytest.mark.parametrize("given", [(), (BODY,), ("connection_refused",)], ids=["new", "up", "down"])
def test_every_address_answers_whatever_vllm_does(path, kind, given):
    """Health and readiness of the sidecar are not vLLM's: a probe must not take it down."""
    answer = get(path, *given)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == kind
    assert answer.body


@pytest.mark.parametrize("path", ["/metrics", "/-/healthy", "/", "/page.js", "/nowhere"])
def test_every_answer_has_the_headers_that_make_it_harmless(path):
    """A browser runs nothing, frames nothing, guesses no type; the server does not say what it runs on."""
    headers = get(path, BODY).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Server" not in headers


def test_other_addresses_and_methods_are_refused():
    """With the usual words."""
    assert get("/metrics/x").status == 404
    assert get("/metrics", method="POST").status == 405
    assert get("/metrics", BODY, method="HEAD").status == 200


# Formats


def accepting(accept: str):
    """What `/metrics` answers to an Accept header."""
    return get("/metrics", BODY, headers=PLAIN | {"Accept": accept})


def test_prometheus_gets_openmetrics():
    """By the header that it really sends."""
    answer = accepting(
        "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
        "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    )
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.body.endswith(b"# EOF\n")
    assert list(read_openmetrics(answer.body.decode()))


def test_everybody_else_gets_the_plain_text():
    """A browser, curl, promtool."""
    answer = accepting("text/html,application/xhtml+xml,*/*;q=0.8")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert list(read_text(answer.body.decode()))


@pytest.mark.parametrize(
    "accept", ["text/plain;version=abc", "application/openmetrics-text;version=..", ";;;", "\xe9", ""]
)
def test_a_question_that_makes_no_sense_gets_an_answer(accept):
    """A scrape never fails."""
    answer = accepting(accept)
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain")


def test_metrics_are_compressed_for_whoever_takes_it():
    """As Prometheus does."""
    answer = get("/metrics", BODY, headers={"Accept-Encoding": "gzip"})
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.body.startswith(b"\x1f\x8b")
    assert "Content-Encoding" not in get("/metrics", BODY).headers


def test_a_scrape_of_many_engines_is_compressed_without_a_warning():
    """A text of megabytes, in a thread; warnings are errors in these tests."""
    many = bodies.body(*(bodies.engine(str(number), model="m" * 1000, kv=0.5) for number in range(200)))
    answer = get("/metrics", many, headers={"Accept-Encoding": "gzip"})
    assert answer.status == 200
    assert answer.headers["Content-Encoding"] == "gzip"


def test_a_metric_that_fails_does_not_fail_the_scrape():
    """All others are there."""
    known = reading(BODY)
    (key,) = known.engines
    broken = dataclasses.replace(known, engines={key: dataclasses.replace(known.engines[key], kv_polls=())})
    shown = ReadingCollector(lambda: broken, lambda: 0.0, lambda: 0.0)
    logging.getLogger("exporter.publish.metrics.table").setLevel(logging.CRITICAL)
    try:
        answer = get("/metrics", shown=shown)
    finally:
        logging.getLogger("exporter.publish.metrics.table").setLevel(logging.NOTSET)
    assert answer.status == 200
    assert b"vllm_pressure_kv_usage_ratio{" in answer.body


# Status and page


def test_the_status_says_what_is_known():
    """As JSON, with ages instead of times by a clock that nobody else has."""
    state = json.loads(get("/api/v1/status", BODY, "timeout").body)
    (target,) = state["targets"]
    engine = target["engines"].pop("0")
    assert state["version"] == "0.0.0"
    expected = {
        "url": URL, "up": False, "error": "timeout", "poll_age_seconds": 1.0, "success_age_seconds": 2.0,
    }  # fmt: skip
    assert target | expected == target
    assert engine["model"] == "demo-7b"
    assert engine["signals"]["kv_usage_ratio"] == 0.4
    assert engine["age_seconds"] == 2.0
    assert (engine["missing"], engine["restarts"], engine["untrusted"]) == (False, 0, {})


def test_the_status_before_the_first_poll_is_unknown():
    """Not down: nothing was asked yet."""
    (target,) = json.loads(get("/api/v1/status").body)["targets"]
    assert target | {"url": URL, "up": None, "error": None, "engines": {}} == target


def test_the_status_is_not_cached():
    """By whatever stands between."""
    assert get("/api/v1/status").headers["Cache-Control"] == "no-store"


def test_no_secret_is_in_any_answer():
    """Tokens, header values and what the URL's query holds, of a target that was really asked."""
    target = TargetConfig(
        url=f"http://127.0.0.1:9/metrics?token={HIDDEN}",
        headers={"X-Key": Secret(HIDDEN)},
        bearer_token=Secret(HIDDEN),
    )

    async def scenario():
        sidecar = Sidecar(Config(targets=(target,), web=WebConfig(listen_address="127.0.0.1:0")))
        base = await sidecar.start()
        try:
            while sidecar.reading is None:  # noqa: ASYNC110 (there is nothing to wait on, and no need for it)
                await asyncio.sleep(0.01)
            async with aiohttp.ClientSession() as client:
                texts = []
                for path in ("/", "/metrics", "/api/v1/status", "/api/v1/history"):
                    async with client.get(base + path) as answer:
                        texts.append(await answer.text())
        finally:
            await sidecar.stop()
        return "".join(texts)

    text = asyncio.run(scenario())
    assert "http://127.0.0.1:9/metrics" in text
    assert HIDDEN not in text


@pytest.mark.parametrize("path", ["/", "/api/v1/history", "/page.js"])
def test_the_page_is_compressed_for_whoever_takes_it(path):
    """It may come through a slow port-forward."""
    answer = get(path, BODY, headers={"Accept-Encoding": "gzip"})
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.headers["Vary"] == "Accept-Encoding"
    assert gzip.decompress(answer.body)[:20] == get(path, BODY).body[:20]


def test_only_what_never_changes_is_kept_by_browsers():
    """The page's parts by their version; the state of things never."""
    version = assets()[1]
    assert "immutable" in get(f"/page.css?v={version}").headers["Cache-Control"]
    assert get("/page.css").headers["Cache-Control"] == "no-cache"
    assert get("/page.css?v=old").headers["Cache-Control"] == "no-cache"
    assert get("/", BODY).headers["Cache-Control"] == "no-store"
    assert get("/api/v1/history", BODY).headers["Cache-Control"] == "no-store"


# Listening


def has_ipv6() -> bool:
    """Whether this machine has a loopback of the sixth version."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def reached(base: str, *hosts: str) -> list[bool]:
    """Which loopback addresses answer on the port of a base URL."""
    port, answers = base.rpartition(":")[2], []
    async with aiohttp.ClientSession() as client:
        for host in hosts:
            try:
                async with client.get(f"http://{host}:{port}/-/healthy") as answer:
                    answers.append(answer.status == 200)
            except aiohttp.ClientConnectionError:
                answers.append(False)
    return answers


def started(host: str, *asked: str) -> tuple[str, list[bool]]:
    """The base URL of a server on any port, and which addresses reach it."""

    async def scenario():
        server = WebServer(make_app(scrape_of(), dict), host, 0)
        base = await server.start()
        try:
            return base, await reached(base, *asked)
        finally:
            await server.stop()

    return asyncio.run(scenario())


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_every_address_means_both_families():
    """A pod may have either."""
    base, answers = started("::", "127.0.0.1", "[::1]")
    assert base.startswith("http://localhost:")
    assert answers == [True, True]


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_an_address_of_the_sixth_version_has_brackets_in_the_url():
    """And only that address is listened on."""
    base, answers = started("::1", "127.0.0.1", "[::1]")
    assert base.startswith("http://[::1]:")
    assert answers == [False, True]


def test_one_address_means_that_one():
    """Loopback stays loopback."""
    base, answers = started("127.0.0.1", "127.0.0.1")
    assert base.startswith("http://127.0.0.1:")
    assert answers == [True]


def test_a_kernel_without_ipv6_means_ipv4(monkeypatch):
    """As Python tells it."""
    monkeypatch.setattr(published.socket, "has_dualstack_ipv6", lambda: False)
    assert started("::", "127.0.0.1")[1] == [True]


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_ipv6_that_is_switched_off_means_ipv4(number, monkeypatch):
    """The kernel knows it, but no address has it."""
    create = socket.create_server

    def refusing(address, *, family=socket.AF_INET, **more):
        if family == socket.AF_INET6:
            raise OSError(number, "made up")
        return create(address, family=family, **more)

    monkeypatch.setattr(published.socket, "has_dualstack_ipv6", lambda: True)
    monkeypatch.setattr(published.socket, "create_server", refusing)
    assert started("::", "127.0.0.1")[1] == [True]


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_port_that_is_taken_is_a_clear_error(host):
    """With the address, and without falling back to another family."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = WebServer(make_app(scrape_of(), dict), host, port)
        with pytest.raises(OSError, match="cannot listen on") as caught:
            asyncio.run(server.start())
    where = f"[::]:{port}" if host == "::" else f"{host}:{port}"
    assert caught.value.strerror == f"cannot listen on {where}: address already in use"
    assert caught.value.errno == errno.EADDRINUSE


def test_a_name_that_does_not_exist_is_a_clear_error():
    """With the name."""
    server = WebServer(make_app(scrape_of(), dict), "nowhere.invalid", 21900)
    with pytest.raises(OSError, match=r"cannot listen on nowhere\.invalid:21900: "):
        asyncio.run(server.start())


def test_garbage_in_place_of_a_request_is_refused_without_a_word_in_the_log(caplog):
    """Port scanners come by every day."""

    async def scenario():
        async with serving(BODY) as client:
            base = str(client._base_url)
            port = int(base.rpartition(":")[2].strip("/"))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01\x02\x00garbage\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer

    with caplog.at_level(logging.INFO):
        assert asyncio.run(scenario()).startswith(b"HTTP/1.0 400")
    assert not caplog.records


# Requests that make no sense

SECRET = f"Authorization: Bearer {HIDDEN}"
MALFORMED = {
    "no host": f"GET /metrics HTTP/1.1\r\n{SECRET}\r\n\r\n",
    "two hosts": f"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n{SECRET}\r\n\r\n",
    "a control character": f"GET /metrics HTTP/1.1\r\nHost: x\r\n{SECRET}\x01\r\n\r\n",
    "a nul": f"GET /metrics HTTP/1.1\r\nHost: x\r\n{SECRET}\0\r\n\r\n",
    "two lengths": f"GET / HTTP/1.1\r\nHost: x\r\n{SECRET}\r\nContent-Length: 5\r\n"
    "Transfer-Encoding: chunked\r\n\r\n",
    "a length of letters": f"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: {HIDDEN}\r\n\r\n",
    "bad chunks": f"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{HIDDEN}\r\n\r\n",
    "5,000 headers": f"GET / HTTP/1.1\r\nHost: x\r\n{SECRET}\r\n" + "X: y\r\n" * 5000 + "\r\n",
    "a long header": f"GET / HTTP/1.1\r\nHost: x\r\n{SECRET}{'y' * 10_000}\r\n\r\n",
    "1 MB": f"GET /{HIDDEN}{'x' * (1 << 20)} HTTP/1.1\r\nHost: x\r\n\r\n",
    "no method": f"{HIDDEN}\xff / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no version": f"GET / {HIDDEN}\r\nHost: x\r\n\r\n",
    "no url": f"GET http://[{HIDDEN}/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "letters": f"GET /\xff HTTP/1.1\r\nHost: x\r\n{SECRET}\r\n\r\n",
    "http 2": f"PRI * HTTP/2.0\r\n\r\nSM\r\n{SECRET}\r\n\r\n",
    "tls": f"\x16\x03\x01\x02\0\x01\0\x01\xfc{HIDDEN}\r\n\r\n",
}
# So much that the connection may be cut off before the answer is read; and what aiohttp 3.14.3 cannot read.
CUT_OFF = ("1 MB", "no url")


async def asked(port: int, *pieces: bytes) -> bytes:
    """What comes over a connection until it is ended; each piece but the first follows some answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    async with asyncio.timeout(60):
        try:
            for number, piece in enumerate(pieces):
                if number:
                    got += await reader.readuntil(b"\r\n\r\n")
                writer.write(piece)
            got += await reader.read()
        except ConnectionError:
            pass
    writer.close()
    return got


def answers(*requests: tuple[bytes, ...]) -> list[bytes]:
    """What a server answers to each, and that it is well afterwards."""

    async def scenario():
        async with serving(BODY) as client:
            got = [await asked(client._base_url.port, *pieces) for pieces in requests]
            async with client.get("/-/healthy") as answer:
                assert answer.status == 200
            return got

    return asyncio.run(scenario())


@pytest.mark.parametrize("what", MALFORMED)
def test_a_request_that_makes_no_sense_is_refused_in_silence(what, caplog):
    """No part of it is logged, which may be a secret; the answer has our headers and no version."""
    with caplog.at_level(logging.DEBUG):
        (answer,) = answers((MALFORMED[what].encode("latin-1"),))
    assert HIDDEN not in caplog.text
    assert not [record for record in caplog.records if record.name != "asyncio"]
    if answer or what not in CUT_OFF:
        assert answer.startswith(b"HTTP/1.0 400 Bad Request\r\n")
        head, _, text = answer.decode().partition("\r\n\r\n")
        assert text == "Bad Request\n"
        assert "\r\nX-Content-Type-Options: nosniff\r\n" in head
        assert "\r\nContent-Security-Policy: default-src 'none';" in head
        assert "\r\nReferrer-Policy: no-referrer\r\n" in head
        assert "Python" not in head
        assert "aiohttp" not in head


def test_a_body_that_makes_no_sense_is_passed_over_in_silence(caplog):
    """It comes after the answer, which did not wait for it."""
    body = f"{HIDDEN} is not compressed".encode()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    with caplog.at_level(logging.DEBUG):
        (answer,) = answers((head, body))
    assert answer.startswith(b"HTTP/1.1 405")
    assert HIDDEN not in caplog.text
    assert not [record for record in caplog.records if record.name != "asyncio"]


def test_a_thousand_of_them_write_no_line(caplog):
    """Whoever sends them needs no password."""
    with caplog.at_level(logging.INFO):
        got = answers(*[(MALFORMED["no host"].encode(),)] * 1000)
    assert all(answer.startswith(b"HTTP/1.0 400") for answer in got)
    assert not caplog.records


def test_a_fault_of_our_own_is_logged(caplog):
    """With its trace: it is no request's fault."""

    async def scenario():
        app = make_app(scrape_of(), lambda: 1 / 0)
        server = WebServer(app, "127.0.0.1", 0)
        base = await server.start()
        try:
            async with aiohttp.ClientSession() as client, client.get(base + "/api/v1/status") as answer:
                return answer.status, "Server" in answer.headers
        finally:
            await server.stop()

    assert asyncio.run(scenario()) == (500, False)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("path", ["/metrics", "/", "/page.css"])
@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        ("gzip", True),
        ("br;q=1.0, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, identity", False),
        ("xgzip", False),
        ("identity", False),
    ],
)
def test_an_answer_is_packed_for_those_who_accept_it(path, accepted, packed):
    """A weight of 0 refuses it."""
    answer = get(path, BODY, headers={"Accept-Encoding": accepted})
    assert (answer.headers.get("Content-Encoding") == "gzip") is packed
    assert (answer.body[:2] == b"\x1f\x8b") is (answer.headers.get("Content-Encoding") == "gzip")


def test_no_engine_hides_another_of_the_same_name():
    """Names are made up by servers: a model's may look like a model and an engine."""
    keys = [("m", "m"), ("a", None), ("m", None), ("m/m", "m"), ("m/m", None)]
    engines = [bodies.engine("0", model=model, replica=replica, running=1, kv=0.5) for model, replica in keys]
    reading = Pipeline(AnalysisConfig(), {}, 1.0).feed(1.0, bodies.body(*engines), None)
    assert sorted(status_object(URL, reading, 1.0)["engines"]) == ["0", "m/0", "m/m/0", "m/m/0#2", "m/m/m/0"]
