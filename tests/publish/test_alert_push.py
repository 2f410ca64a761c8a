"""The push against Alertmanagers of every kind: good, slow, refusing, hanging, gone."""

import asyncio
import base64
import itertools
import json
import logging
import select
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from email.utils import formatdate
from typing import Any, Self

import pytest
import trustme
from aiohttp import web
from support.process import ANYWHERE, FAST, Command, refusing_port, until
from support.servers import HTML, Server
from test_alert_tracker import QUIET, reading

from exporter.config import AlertmanagerConfig, BasicAuthConfig, Secret, TlsConfig
from exporter.publish.alerts import push as push_module
from exporter.publish.alerts.push import OUTCOMES, Notifier, body
from exporter.publish.alerts.tracker import Notice

NOW = 1_700_000_000.0
PATIENCE = 60.0


@dataclass
class Fake:
    """An Alertmanager in the test's own loop.

    Attributes:
        answer: gets the number of the request and returns a status; may wait.
        posts: path, headers and alerts of every request.
        ahead: seconds by which its clock is ahead of the exporter's.
    """

    answer: Callable[[int], Awaitable[int]] | None = None
    ahead: float = 0.0
    tls: ssl.SSLContext | None = None
    posts: list[tuple[str, dict[str, str], list[dict[str, Any]]]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        async def take(request: web.Request) -> web.Response:
            self.posts.append((request.path, dict(request.headers), json.loads(await request.read())))
            status = 200 if self.answer is None else await self.answer(len(self.posts))
            headers = {"Date": formatdate(NOW + self.ahead, usegmt=True)}
            return web.Response(
                status=status, headers=headers | ({"Location": "/elsewhere"} if status == 307 else {})
            )

        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/{path:.*}", take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls).start()
        port = self._runner.addresses[0][1]
        self.url = f"{'https' if self.tls else 'http'}://localhost:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def names(self) -> list[list[str]]:
        """The names of the alerts of every request."""
        return [[alert["labels"]["alertname"] for alert in alerts] for _, _, alerts in self.posts]


class Push:
    """A notifier at work, without any hold time; its clock stands, and its waits are noted and skipped."""

    def __init__(self, *urls: str, **options: Any) -> None:
        self.counts: Counter[str] = Counter()
        self.waits: list[float] = []
        self.now = NOW
        config = AlertmanagerConfig(urls=urls, **{"hold": 0.0, "keep": 0.0, "timeout": 2.0, **options})
        self.notifier = Notifier(config, self._count, lambda: self.now, self._sleep)
        self.alerts = self.notifier.target({})
        self._times = itertools.count(1.0)

    def _count(self, outcome: str, alerts: int) -> None:
        self.counts[outcome] += alerts

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0)

    def say(self, *verdicts: str) -> None:
        """A poll found these verdicts."""
        self.alerts.note(reading(next(self._times), *verdicts))

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.notifier.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        assert self._task.cancelled()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 (conditions of all kinds)
                await asyncio.sleep(0.005)


def always(status: int) -> Callable[[int], Awaitable[int]]:
    """An Alertmanager that answers with one status."""

    async def answer(_number: int) -> int:
        return status

    return answer


def once(status: int) -> Callable[[int], Awaitable[int]]:
    """An Alertmanager that answers with a status, and from then on well."""

    async def answer(number: int) -> int:
        return status if number == 1 else 200

    return answer


async def hang(_number: int) -> int:
    """An Alertmanager that never answers."""
    await asyncio.sleep(60)
    return 200


# What is sent.


def test_an_alert_is_posted_as_the_api_takes_it():
    """A list of alerts with labels, annotations and times in RFC 3339."""
    key = (("alertname", "VllmKvBound"), ("model_name", "模型"))
    text = body([Notice(key, {"summary": "S."}, NOW + 0.25, NOW + 60.0, False, NOW + 60.0)])
    assert json.loads(text) == [
        {
            "labels": {"alertname": "VllmKvBound", "model_name": "模型"},
            "annotations": {"summary": "S."},
            "startsAt": "2023-11-14T22:13:20.250+00:00",
            "endsAt": "2023-11-14T22:14:20.000+00:00",
        }
    ]


def test_every_peer_is_told():
    """And each is counted by itself."""

    async def story():
        async with Fake() as one, Fake() as other, Push(one.url, other.url) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["sent"] == 2)
            assert one.names == other.names == [["VllmKvBound"]]
            assert one.posts[0][0] == "/api/v2/alerts"

    asyncio.run(story())


def test_raised_and_resolved_are_told_in_turn():
    """With one start, and an end that has come."""

    async def story():
        async with Fake() as server, Push(server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: len(server.posts) == 1)
            push.now += 100
            server.ahead += 100
            push.say("healthy")
            await push.until(lambda: len(server.posts) == 2)
            (first,), (last,) = server.posts[0][2], server.posts[1][2]
            assert first["startsAt"] == last["startsAt"] == "2023-11-14T22:13:20.000+00:00"
            assert first["endsAt"] == "2023-11-14T22:17:20.000+00:00"
            assert last["endsAt"] == "2023-11-14T22:15:00.000+00:00"

    asyncio.run(story())


def test_path_prefix_tenant_and_headers_are_sent():
    """As Mimir's Alertmanager wants them."""

    async def story():
        given = {"path_prefix": "/alertmanager", "tenant": "team-a", "headers": {"X-Extra": Secret("1")}}
        async with Fake() as server, Push(server.url, **given) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["sent"])
            path, headers, _ = server.posts[0]
            assert path == "/alertmanager/api/v2/alerts"
            assert (headers["X-Scope-OrgID"], headers["X-Extra"]) == ("team-a", "1")
            assert headers["Content-Type"] == "application/json"

    asyncio.run(story())


def test_a_password_and_a_token_are_sent(tmp_path):
    """Given as such or in a file, which is read anew for every push."""
    file = tmp_path / "token"
    file.write_text("one\n")
    pair = base64.b64encode(b"exporter:pass").decode()
    ways = [
        ({"basic_auth": BasicAuthConfig(username="exporter", password=Secret("pass"))}, f"Basic {pair}"),
        ({"basic_auth": BasicAuthConfig(username="exporter", password_file=str(file))}, None),
        ({"bearer_token": Secret("abc")}, "Bearer abc"),
        ({"bearer_token_file": str(file)}, "Bearer one"),
    ]

    async def story():
        for options, wanted in ways:
            async with Fake() as server, Push(server.url, **options) as push:
                push.say("kv_bound")
                await push.until(lambda push=push: push.counts["sent"])
                sent = server.posts[0][1]["Authorization"]
                assert sent == (wanted or f"Basic {base64.b64encode(b'exporter:one').decode()}")
        file.write_text("two\n")
        async with Fake() as server, Push(server.url, bearer_token_file=str(file)) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["sent"])
            assert server.posts[0][1]["Authorization"] == "Bearer two"

    asyncio.run(story())


@pytest.fixture(scope="module")
def authority():
    """A certificate authority of the test's own."""
    return trustme.CA()


def test_tls_is_verified_and_a_client_shows_its_certificate(authority, tmp_path):
    """An unknown authority is trouble that is tried again, and nothing is sent in the clear."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    client = authority.issue_cert("exporter@example.org")
    client.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    good = TlsConfig(ca_file=str(tmp_path / "ca.pem"), cert_file=str(tmp_path / "client.pem"))

    async def story():
        async with Fake(tls=context) as server:
            async with Push(server.url, tls=good) as push:
                push.say("kv_bound")
                await push.until(lambda: push.counts["sent"] == 1)
            for bad in (TlsConfig(), replace(good, cert_file=None), replace(good, ca_file="/nowhere")):
                async with Push(server.url, tls=bad) as push:
                    push.say("kv_bound")
                    await push.until(lambda push=push: push.counts["failed"] >= 2)
            async with Push(server.url, tls=replace(good, ca_file=None, insecure_skip_verify=True)) as push:
                push.say("kv_bound")
                await push.until(lambda: push.counts["sent"] == 1)
        assert len(server.posts) == 2

    asyncio.run(story())


# What goes wrong.


@pytest.mark.parametrize("status", [307, 401, 403, 404, 429, 500, 503])
def test_what_may_get_better_is_tried_again(status):
    """A redirect is not followed: it would lead the token elsewhere."""

    async def story():
        async with Fake(once(status)) as server, Push(server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["sent"])
            assert push.counts == {"sent": 1, "failed": 1, "rejected": 0, "dropped": 0}
            assert len(push.waits) == 1
            assert {path for path, _, _ in server.posts} == {"/api/v2/alerts"}

    asyncio.run(story())


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_is_refused_for_good_is_not_tried_again(status):
    """And what comes later is sent."""

    async def story():
        async with Fake(once(status)) as server, Push(server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["rejected"])
            push.say("seat_bound")
            await push.until(lambda: push.counts["sent"])
            assert push.counts["failed"] == 0
            assert len(server.posts) == 2

    asyncio.run(story())


def test_waits_grow_to_half_a_minute():
    """Never longer, and never quite the same for all exporters."""

    async def story():
        async with Fake(always(500)) as server, Push(server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: len(push.waits) >= 12)
            wanted = [1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30, 30]
            assert all(0.8 * top <= wait <= top for top, wait in zip(wanted, push.waits[:12], strict=True))

    asyncio.run(story())


def test_after_a_success_waits_begin_anew():
    """One failure is not held against the next."""

    async def answer(number: int) -> int:
        return 200 if number == 4 else 500

    async def story():
        async with Fake(answer) as server, Push(server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["sent"])
            push.say("seat_bound")
            await push.until(lambda: len(push.waits) >= 4)
            assert push.waits[2] > 3.0
            assert push.waits[3] <= 1.0

    asyncio.run(story())


def test_only_the_newest_state_of_an_alert_waits():
    """An Alertmanager that was away is told how it is, not how it was."""

    async def story():
        gate = asyncio.Event()

        async def answer(number: int) -> int:
            if number == 1:
                await gate.wait()
                return 500
            return 200

        async with Fake(answer) as server, Push(server.url, resend_interval=1.0) as push:
            push.say("kv_bound")
            await push.until(lambda: server.posts)
            push.now += 1
            push.say("kv_bound")
            push.say("kv_bound")
            push.now += 1
            push.say("seat_bound")
            gate.set()
            await push.until(lambda: push.counts["sent"] == 2)
            alerts = {alert["labels"]["alertname"]: alert for alert in server.posts[1][2]}
            assert alerts.keys() == {"VllmKvBound", "VllmSeatBound"}
            assert alerts["VllmKvBound"]["endsAt"] == "2023-11-14T22:13:22.000+00:00"
            assert len(server.posts) == 2

    asyncio.run(story())


def test_a_state_that_came_during_a_push_is_pushed_too():
    """The success of the older one does not take it away."""

    async def story():
        gate = asyncio.Event()

        async def answer(number: int) -> int:
            if number == 1:
                await gate.wait()
            return 200

        async with Fake(answer) as server, Push(server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: server.posts)
            push.say("healthy")
            gate.set()
            await push.until(lambda: push.counts["sent"] == 2)
            assert len(server.posts) == 2

    asyncio.run(story())


def test_the_queue_is_bounded(monkeypatch):
    """The oldest alerts go, and are counted."""
    monkeypatch.setattr(push_module, "MOST_WAITING", 3)

    async def story():
        async with Fake() as server:
            push = Push(server.url)
            for verdict in ("kv_bound", "seat_bound", "prefill_bound", "queue_not_kv"):
                push.say(verdict)
            async with push:
                await push.until(lambda: push.counts["sent"] == 3)
            assert push.counts["dropped"] == 1
            assert "VllmQueueNotKv" in server.names[0]

    asyncio.run(story())


def test_many_alerts_go_in_several_pushes(monkeypatch):
    """One request stays small."""
    monkeypatch.setattr(push_module, "MOST_PER_PUSH", 2)

    async def story():
        async with Fake() as server, Push(server.url) as push:
            push.say("kv_bound")
            push.say("seat_bound")
            push.say("prefill_bound")
            await push.until(lambda: sum(map(len, server.names)) == 3)
            assert all(len(names) <= 2 for names in server.names)

    asyncio.run(story())


def test_one_alert_that_is_refused_keeps_no_other_from_being_sent():
    """The batch is split until it is alone; the others arrive once."""

    async def story():
        async with Fake() as server, Push(server.url) as push:

            async def answer(number: int) -> int:
                return 400 if "VllmSeatBound" in server.names[number - 1] else 200

            server.answer = answer
            push.say("kv_bound")
            push.notifier.put(push.alerts.active.observe(reading(9.0, "seat_bound"), NOW))
            push.notifier.put(push.alerts.active.observe(reading(10.0, "prefill_bound"), NOW))
            await push.until(lambda: sum(push.counts.values()) == 3)
            assert push.counts == {"sent": 2, "rejected": 1, "failed": 0, "dropped": 0}
            assert {"VllmKvBound"} | {"VllmPrefillBound"} <= {
                names[0] for names in server.names if len(names) == 1
            }

    asyncio.run(story())


@pytest.mark.parametrize("ahead", [-3600.0, -300.0, 300.0, 3600.0])
def test_an_alert_is_active_by_alertmanagers_clock(ahead):
    """A node whose clock is minutes off still pages: the alert is sent again at once, in the other's time."""

    async def story():
        async with Fake(ahead=ahead) as server, Push(server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["sent"])
            push.say("kv_bound")
            times = [
                datetime.fromisoformat(alerts[0]["startsAt"]).timestamp() for _, _, alerts in server.posts
            ]
            assert times == [NOW, NOW + ahead]
            ends = datetime.fromisoformat(server.posts[-1][2][0]["endsAt"]).timestamp()
            assert ends - (NOW + ahead) == 240

    asyncio.run(story())


def test_what_has_run_out_is_not_told():
    """An alert that ended unseen would be raised and resolved at once."""

    async def story():
        async with Fake() as server, Push(server.url, resend_interval=60.0) as push:
            push.alerts.note(reading(1.0, "kv_bound"))
            push.now += 241.0
            await push.until(lambda: push.counts["dropped"] == 1)
            assert server.posts == []

    asyncio.run(story())


def test_what_is_sent_again_is_logged_once(caplog):
    """Raised, accepted, resolved: one line each, however often the alert is sent again."""
    caplog.set_level(logging.INFO, logger="exporter")

    async def story():
        async with Fake() as server, Push(server.url, resend_interval=1.0) as push:
            for sent in range(1, 4):
                push.say("kv_bound")
                await push.until(lambda sent=sent: push.counts["sent"] >= sent)
            push.say("healthy")
            await push.until(lambda: push.counts["sent"] >= 4)

    asyncio.run(story())
    words = [record.getMessage().partition("=")[0].rpartition(" ")[0] for record in caplog.records]
    assert words == ["alert raised", "alerts accepted", "alert resolved"]


def test_lasting_trouble_is_logged_again_with_its_count(caplog):
    """After every twenty failures, which take about ten minutes."""
    caplog.set_level(logging.WARNING, logger="exporter")

    async def story():
        async with Fake(always(500)) as server, Push(server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: len(push.waits) >= 45)

    asyncio.run(story())
    counts = [record.getMessage().rpartition("failures=")[2] for record in caplog.records]
    assert counts[:3] == ["1", "20", "40"]


def test_trouble_is_logged_once_and_its_end_too(caplog):
    """With the address, and nothing that is secret."""
    caplog.set_level(logging.INFO, logger="exporter")

    async def answer(number: int) -> int:
        return 500 if number <= 3 else 200

    async def story():
        async with Fake(answer) as server, Push(server.url, bearer_token=Secret("hush")) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["sent"])

    asyncio.run(story())
    said = [record.getMessage() for record in caplog.records if "alertmanager=" in record.getMessage()]
    assert [line.split(" alertmanager=")[0] for line in said] == [
        "cannot push alerts",
        "alerts accepted",
    ]
    assert "error=http_500" in said[0]
    assert said[0].endswith(" waiting=1 failures=1")
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    ("peer", "word"), [("127.0.0.1:{port}", "connection_refused"), ("no-such-name.invalid", "dns")]
)
def test_a_peer_that_is_not_there_does_not_keep_the_others_waiting(peer, word, caplog):
    """Each has a task of its own."""

    async def story(url):
        async with Fake() as server, Push(url, server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["sent"] == 1 and push.counts["failed"])

    with refusing_port() as port:
        asyncio.run(story(f"http://{peer.format(port=port)}"))
    assert word in caplog.text


def test_a_secret_that_cannot_be_read_is_trouble_that_is_tried_again(tmp_path, caplog):
    """The log names the option and not the path."""
    file = tmp_path / "token"

    async def story():
        async with Fake() as server, Push(server.url, bearer_token_file=str(file)) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["failed"])
            file.write_text("late")
            await push.until(lambda: push.counts["sent"])

    asyncio.run(story())
    assert "cannot read bearer_token_file" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_a_hanging_peer_costs_its_time_out(caplog):
    """Then it is tried again, with a new connection."""

    async def story():
        async with Fake(hang) as server, Push(server.url, timeout=0.1) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["failed"] >= 2 and len(server.posts) >= 2)

    asyncio.run(story())
    assert "error=timeout" in caplog.text


def test_taking_a_reading_never_waits():
    """Whatever the Alertmanager does: it is a plain call that returns before anything is sent."""

    async def story():
        async with Fake(hang) as server, Push(server.url) as push:
            loop = asyncio.get_running_loop()
            push.say("kv_bound")
            await push.until(lambda: server.posts)
            begin = loop.time()
            for _ in range(100):
                push.say("kv_bound")
                push.say("seat_bound")
            assert loop.time() - begin < 5  # a wait for the server would last for ever

    asyncio.run(story())


# Its end.


def test_after_the_close_nothing_is_raised_and_nothing_resolved():
    """What was told before runs out by itself."""

    async def story():
        async with Fake() as server, Push(server.url) as push:
            push.say("kv_bound")
            await push.until(lambda: push.counts["sent"])
            push.notifier.close()
            push.say("healthy")
            push.say("preemption_thrash")
            await asyncio.sleep(0.1)
            assert len(server.posts) == 1

    asyncio.run(story())


def test_without_urls_nothing_happens():
    """Not even a count."""

    async def story():
        async with Push() as push:
            push.say("preemption_thrash")
            assert push.counts == {}

    asyncio.run(story())


def test_all_outcomes_are_counted_from_zero():
    """So that a rate sees the first one."""
    counted: dict[str, int] = {}
    Notifier(AlertmanagerConfig(urls=("http://a",)), counted.__setitem__, lambda: NOW)
    assert counted == dict.fromkeys(OUTCOMES, 0)


# The whole sidecar.


@pytest.mark.parametrize("kind", ["refused", "hanging"])
def test_polls_go_on_whatever_the_alertmanager_does(tmp_path, kind):
    """Also during a push that takes a minute; failures are counted, and the end is as quick as ever."""
    failed = 'vllm_pressure_exporter_notifications_total{outcome="failed"}'
    with socket.create_server(("127.0.0.1", 0)) as listener, refusing_port() as closed, Server() as upstream:
        # To the listener connections are made, and nobody ever answers.
        port = closed if kind == "refused" else listener.getsockname()[1]
        upstream.mode = HTML
        options = {
            "--target.url": upstream.url,
            "--alertmanager.urls": f"http://127.0.0.1:{port}",
            "--alertmanager.hold": "0s",
            "--alertmanager.timeout": "60s",
        }
        with Command(tmp_path, *itertools.chain(*options.items()), *ANYWHERE, *FAST) as command:
            if kind == "refused":
                until(lambda: (command.metric(failed) or 0) >= 2, "two failures")
            else:
                until(lambda: select.select([listener], [], [], 0)[0], "the push that hangs")
            before = len(upstream.polls)
            until(lambda: len(upstream.polls) >= before + 5, "five polls")
            assert (command.metric(failed) > 0) == (kind == "refused")
            status, seconds = command.stop()
    assert (status, seconds < 2.0) == (0, True)
    assert ("error=connection_refused" in command.err) == (kind == "refused")
    assert "Traceback" not in command.err


def test_the_base_reading_of_these_tests_is_quiet():
    """It brings no alert of its own."""
    assert QUIET.judgement.verdict == "reachable"
