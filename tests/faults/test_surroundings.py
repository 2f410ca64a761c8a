"""What may happen around the program: to certificates, names, clocks, descriptors, disks, Alertmanager."""

import contextlib
import datetime as dt
import json
import signal
import socket
import ssl
import time

import pytest
import trustme
from support import bodies
from support.process import ANYWHERE, FAST, Command, refusing_port, until
from support.servers import CountingServer, good, with_body

from exporter.vllm.recording import Poll, RecordingError, read

# Against the running program, with time-outs to wait for: a minute together.
pytestmark = pytest.mark.long

KEY = '{engine="0",model_name="demo-7b"}'
PREEMPTIONS = "vllm_pressure_preemptions_total" + KEY
# Lets a test change the world of the program while it runs: the file says how.
WORLD = """\
import pathlib, socket, sys, time
world = pathlib.Path({path!r})
lookup, wall = socket.getaddrinfo, time.time
def getaddrinfo(host, *more, **named):
    if host != "vllm.test":
        return lookup(host, *more, **named)
    if "no name" in world.read_text():
        raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")
    return lookup("127.0.0.1", *more, **named)
socket.getaddrinfo = getaddrinfo
time.time = lambda: wall() + float(world.read_text() or 0) if "name" not in world.read_text() else wall()
from exporter.cli import main  # after the change: modules may keep the functions
sys.exit(main())
"""


def errors(command: Command, reason: str) -> float:
    """Polls that have ended in an error."""
    return command.metric(f'vllm_pressure_exporter_poll_errors_total{{reason="{reason}"}}') or 0.0


def begun(command: Command, server: CountingServer) -> None:
    """The program knows the first count; from now on it grows."""
    until(lambda: command.metric("vllm_pressure_up") == 1.0, "a good poll")
    server.still = False


def counted(command: Command, server: CountingServer) -> None:
    """Every preemption that was shown has been counted once, when the last poll is through."""
    server.still = True
    until(lambda: command.metric("vllm_pressure_up") == 1.0, "polls that succeed")
    until(lambda: command.metric(PREEMPTIONS) == server.preempted, f"{server.preempted} preemptions")
    server.still = False


@contextlib.contextmanager
def watching(folder, server, *more, url=None, script=None):
    """The program on a server, polling fast."""
    arguments = ("--target.url", url or server.url, *ANYWHERE, *FAST, *more)
    with Command(folder, *arguments, script=script) as command:
        yield command


# TLS


class Authority:
    """Contexts of servers with certificates that are good and that are not."""

    def __init__(self, folder) -> None:
        self.ca = trustme.CA()
        self.file = str(folder / "ca.pem")
        self.ca.cert_pem.write_to_path(self.file)

    def server(self, *names, authority=None, until_=None) -> ssl.SSLContext:
        """A server's side; `until_` is when its certificate ends."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        made = (authority or self.ca).issue_cert(*(names or ("127.0.0.1",)), not_after=until_)
        made.configure_cert(context)
        return context


def present(server: CountingServer, context: ssl.SSLContext) -> None:
    """Let the server answer with another certificate, at the same address."""
    server.close()
    server.tls = context
    server.open()


def test_certificates_that_are_bad_are_refused_until_they_are_good_again(tmp_path):
    """Expired, of another name, of an unknown authority: one error, told apart in the log, nothing sent."""
    authority = Authority(tmp_path)
    past = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)
    bad = {
        "expired": authority.server(until_=past),
        "IP address mismatch": authority.server("other.example"),
        "unable to get local issuer": authority.server(authority=trustme.CA()),
    }
    sound = authority.server()

    async def closing(server, writer):
        await good(server, writer)
        writer.close()  # so that the next poll makes a new connection

    with (
        CountingServer(sound) as server,
        watching(tmp_path, server, "--target.tls.ca-file", authority.file) as command,
    ):
        server.mode = closing
        begun(command, server)
        for said, context in bad.items():
            before, requests = errors(command, "tls"), None
            present(server, context)
            until(lambda before=before: errors(command, "tls") > before + 1, f"tls errors: {said}")
            requests = len(server.polls)
            until(lambda before=before: errors(command, "tls") > before + 2, "one more")
            assert len(server.polls) == requests
            assert said in command.err
            present(server, sound)
            counted(command, server)


# Names and clocks


def test_a_name_server_that_fails_and_comes_back(tmp_path):
    """A restarted DNS is an error of its own name, and over when it is over."""
    world = tmp_path / "world"
    world.write_text("no name")
    with CountingServer() as server:
        url = f"http://vllm.test:{server.port}/metrics"
        with watching(tmp_path, server, url=url, script=WORLD.format(path=str(world))) as command:
            until(lambda: errors(command, "dns") >= 2, "dns errors")
            world.write_text("name")
            begun(command, server)
            counted(command, server)


@pytest.mark.parametrize("step", [86_400.0, -86_400.0])
def test_a_step_of_the_clock_changes_the_time_of_day_only(tmp_path, step):
    """A day forth or back: polls go on at their pace, and no counter notices."""
    world = tmp_path / "world"
    world.write_text("0")
    with (
        CountingServer() as server,
        watching(tmp_path, server, script=WORLD.format(path=str(world))) as command,
    ):
        begun(command, server)
        world.write_text(str(step))
        before, start = len(server.polls), time.monotonic()
        until(lambda: len(server.polls) >= before + 5, "five polls")
        assert time.monotonic() - start > 0.2  # those that a clock a day ahead has missed do not come at once
        stamp = "vllm_pressure_last_success_timestamp_seconds"
        until(lambda: abs(command.metric(stamp) - (time.time() + step)) < 60.0, "the time of day")
        assert command.metric("vllm_pressure_restarts_total") == 0.0
        counted(command, server)


# Signals


def test_a_program_that_was_stopped_goes_on_where_it_was(tmp_path):
    """SIGSTOP for a minute, as a frozen container: missed polls are skipped, and nothing is lost."""
    with CountingServer() as server, watching(tmp_path, server) as command:
        begun(command, server)
        command.send(signal.SIGSTOP)
        time.sleep(0.3)  # a poll that was under way
        before = len(server.polls)
        server.shown += 500  # preempted meanwhile
        time.sleep(60.0)
        assert len(server.polls) == before
        command.send(signal.SIGCONT)
        counted(command, server)
        assert server.preempted >= 500
        assert command.metric("vllm_pressure_exporter_polls_skipped_total") >= 250
        assert command.metric("vllm_pressure_restarts_total") == 0.0
        assert len(server.polls) - before < 100  # and not 300 at once


# Descriptors and disks


def limited(what: str, soft: int) -> str:
    """The program under a limit of its process."""
    return (
        "import resource, sys\n"
        "from exporter.cli import main\n"
        "import exporter.runtime.sidecar, exporter.commands.record\n"
        f"resource.setrlimit(resource.{what}, ({soft}, {soft}))\n"
        "sys.exit(main())\n"
    )


def test_without_descriptors_left_it_waits_for_some(tmp_path):
    """Clients take them all: polls over a new connection fail by name, and succeed when they are gone."""

    async def closing(server, writer):
        await good(server, writer)
        writer.close()  # so that the next poll makes a new connection

    with (
        CountingServer() as server,
        watching(tmp_path, server, script=limited("RLIMIT_NOFILE", 40)) as command,
    ):
        begun(command, server)
        base = command.base()
        address = ("127.0.0.1", int(base.rpartition(":")[2]))
        clients = [socket.create_connection(address) for _ in range(60)]
        server.mode = closing
        until(
            lambda: '"target down error=unreachable' in command.err, f"no descriptors\n{command.err[-800:]}"
        )
        for client in clients:
            client.close()
        counted(command, server)
        assert command.stop()[0] == 0


@pytest.mark.parametrize("name", ["full.jsonl", "full.jsonl.gz"])
def test_a_disk_that_fills_up_ends_a_recording_and_keeps_it(tmp_path, name):
    """In one line, with exit status 1; what fitted can be read."""
    script = limited("RLIMIT_FSIZE", 4000).replace("import resource", "import resource, signal", 1)
    script = script.replace("sys.exit", "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nsys.exit")
    # Command's own output would hit the limit too, were it long.
    with CountingServer() as server:
        arguments = ("record", server.url, "-o", str(tmp_path / name), *FAST[:1], "100ms")
        with Command(tmp_path, *arguments, script=script) as command:
            assert command.end() == 1
    assert "cannot write" in command.err
    assert "Traceback" not in command.err
    polls = []
    with contextlib.suppress(RecordingError):  # the last line, cut off
        for line in read(tmp_path / name):
            polls += [line] if isinstance(line, Poll) else []
    assert len(polls) >= 3
    assert all(poll.body.endswith(b"\n") for poll in polls)


# Alertmanager


def test_a_dead_alertmanager_delays_no_poll_and_fills_no_memory(tmp_path):
    """Alerts that cannot be pushed are counted as failed; polls go on."""
    more = ("--alertmanager.hold", "0s", "--analysis.max-age", "1s", "--analysis.startup-grace", "0s")
    with contextlib.ExitStack() as stack:
        server, port = (stack.enter_context(given) for given in (CountingServer(), refusing_port()))
        more += ("--alertmanager.urls", f"http://127.0.0.1:{port},http://alertmanager.invalid:9093")
        command = stack.enter_context(watching(tmp_path, server, *more))
        begun(command, server)
        server.close()
        until(
            lambda: command.metric('vllm_pressure_exporter_notifications_total{outcome="failed"}'),
            "a push that failed",
        )
        server.open()
        before = len(server.polls)
        until(lambda: len(server.polls) >= before + 10, "ten polls")
        counted(command, server)
        assert command.stop()[0] == 0


# Labels


def test_hostile_names_are_inert_everywhere(tmp_path):
    """Markup, quotes, line feeds, terminal sequences: bounded and escaped in text, JSON and page."""
    name = '<script>alert(1)</script>"\\\n\x1b[31m{x="y"} ' + "z" * 100_000
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    body = bodies.body(bodies.engine(model=escaped, running=1, waiting=0, kv=0.4, preemptions=1))

    with CountingServer() as server:
        server.mode = with_body(body)
        with watching(tmp_path, server) as command:
            until(lambda: command.metric("vllm_pressure_engines") == 1.0, "a good poll")
            text, page, state = (command.get(path) for path in ("/metrics", "/", "/api/v1/status"))
            command.stop()
    assert max(map(len, text.splitlines())) < 600
    assert all("\x1b" not in shown for shown in (text, page, state, command.err))
    assert "<script>alert" not in page
    (target,) = json.loads(state)["targets"]
    assert target["engines"]
