"""``demo``: what it prints, and how it ends."""

import asyncio
import re
import signal
import socket

import pytest
from support.process import ANYWHERE, Command, shell, until
from support.servers import until as sooner_or_later

from exporter.commands import demo
from exporter.config import Config, PollConfig, WebConfig

pytestmark = pytest.mark.usefixtures("own_logging")


def test_the_demo_prints_urls_and_a_line_per_second(tmp_path):
    """Then it ends by itself."""
    arguments = ("demo", "--for", "3s", *ANYWHERE)
    with Command(tmp_path, *arguments) as command:
        base = until(lambda: re.search(r"for Prometheus +(http://\S+)/metrics", command.out), "the address")[
            1
        ]
        with socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2]))) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"200 OK" in connection.recv(1000)
        assert command.end() == 0
    status = re.findall(r"^ +(\d+)\.\ds  up  engine 0  \d+ running", command.out, re.MULTILINE)
    assert 1 <= len(status) <= 3  # the first may come before the first poll, where the machine is busy
    assert status == sorted(status)
    assert f"{base}/api/v1/status" in command.out
    assert command.err == ""


def test_the_demo_uses_another_port_when_the_default_one_is_taken(tmp_path, monkeypatch):
    """It must run beside an exporter; a configured port is not replaced."""
    lines: list[str] = []
    starts = []
    real = demo.Sidecar.start

    async def start(self):
        starts.append(self._server._port)
        if len(starts) == 1:
            raise OSError(98, "made up")
        return await real(self)

    monkeypatch.setattr(demo.Sidecar, "start", start)
    asyncio.run(demo.show(Config(), lines.append, seconds=0.1))
    assert starts == [21900, 0]
    assert re.search(r"the exporter +http://127\.0\.0\.1:\d+/", "\n".join(lines))


def test_the_demo_ends_at_once_on_ctrl_c(tmp_path):
    """With status 0 and without a message."""
    with Command(tmp_path, "demo", *ANYWHERE) as command:
        until(lambda: "Ctrl-C" in command.out, "the introduction")
        status, seconds = command.stop(signal.SIGINT)
    assert (status, command.err) == (0, "")
    assert seconds < 2.0


def test_a_closed_pipe_is_no_error():
    """`demo | head` ends in silence, with everything closed."""
    done = shell('"$@" | head -1', "demo", *ANYWHERE)
    assert done.stdout.startswith("A simulated vLLM")
    assert done.stderr == ""


@pytest.mark.long
def test_the_exporter_follows_the_scenario(monkeypatch):
    """A storm, live: each act is announced, and lines end with the verdict."""
    lines: list[str] = []
    config = Config(web=WebConfig(listen_address="127.0.0.1:0"), poll=PollConfig(interval=0.25))

    async def until_the_verdict():
        showing = asyncio.create_task(demo.show(config, lines.append, scenario="storm", seconds=None))
        await sooner_or_later(lambda: any("preemption_thrash (" in each for each in lines), "the verdict")
        showing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await showing

    asyncio.run(until_the_verdict())
    assert lines[0].startswith("A simulated vLLM, without a GPU or a model: a preemption storm")
    assert any(line.startswith("--- storm: 48 clients") for line in lines)


def test_the_recorded_demo_starts():
    """By its name."""
    lines: list[str] = []
    config = Config(web=WebConfig(listen_address="127.0.0.1:0"))
    asyncio.run(demo.show(config, lines.append, scenario="recorded", seconds=0.1))
    assert lines[0].startswith("A recorded vLLM 0.28")
