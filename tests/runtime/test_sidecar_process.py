"""The sidecar as a whole: the real command on loopback, beside servers that behave and that do not."""

import asyncio
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import aiohttp
import pytest
from support import real_recordings
from support.process import ANYWHERE, FAST, Command, until
from support.servers import HTML, Server, good, recorded, silent, status

from exporter.config import Config, PollConfig, TargetConfig, WebConfig
from exporter.runtime import process
from exporter.runtime.sidecar import Sidecar

HIDDEN = "hunter2-is-not-shown"
PROMPT = 2.0  # seconds within which a stopped sidecar is gone


@pytest.fixture
def upstream():
    """A server that is good until told otherwise."""
    with Server(recorded()) as server:
        yield server


@contextmanager
def serving(folder, upstream, *more, environ=None):
    """The command `serve` on a server, polling fast."""
    arguments = ("serve", "--target.url", upstream.url, *ANYWHERE, *FAST, *more)
    with Command(folder, *arguments, environ=environ) as command:
        yield command


def states(command) -> list[str]:
    """The changes of state in a log, in order."""
    found = re.findall(r'msg="target (up|down)(?: error=(\w+))?', command.err)
    return [error or state for state, error in found]


def words(command) -> list[str]:
    """The first word of each line of a log; but for what a starved machine and the server's answers add."""
    lines = [
        line
        for line in command.err.splitlines()
        if not re.search(r'msg="server (answers|configuration)', line)
    ]
    return [re.search(r'msg="?(\w+)', line)[1] for line in lines]


# Serving


def test_a_server_is_polled_every_second_and_shown(tmp_path):
    """By default, whatever the scrapes; its own log has one line for the start and one for the state."""
    with (
        Server(recorded()) as upstream,
        Command(tmp_path, "serve", "--target.url", upstream.url, *ANYWHERE) as command,
    ):
        until(lambda: len(upstream.polls) >= 3, "three polls")
        assert command.metric("vllm_pressure_up") == 1.0
        assert command.metric("vllm_pressure_engines") == 1.0
        assert command.metric("vllm_pressure_exporter_polls_total") >= 2
        assert command.metric("vllm_pressure_exporter_poll_interval_seconds") == 1.0
        for path in ("/-/healthy", "/-/ready", "/", "/api/v1/status"):
            assert command.get(path)
        code, seconds = command.stop()
    assert (
        upstream.polls[2].at - upstream.polls[0].at > 1.0
    )  # two, unless a busy machine was late with the first
    assert code == 0
    assert seconds < PROMPT
    assert words(command) == ["serving", "target", "stopping"]
    assert command.out == ""


def test_the_values_are_those_of_the_recorded_body(tmp_path, upstream):
    """From the server's bytes to the exporter's text."""
    upstream.body = real_recordings.polls(real_recordings.EXHAUSTION)[100].body
    with serving(tmp_path, upstream) as command:
        until(lambda: command.metric("vllm_pressure_up"), "the first poll")
        expected = real_recordings.value(upstream.body, "num_requests_running")
        labels = '{engine="0",model_name="tiny-llama"}'
        assert command.metric(f"vllm_pressure_requests_running{labels}") == expected
        state = json.loads(command.get("/api/v1/status"))
        assert state["targets"][0]["engines"]["0"]["signals"]["requests_running"] == expected


def test_a_server_that_misbehaves_is_survived(tmp_path):
    """Refused, good, 500, a page, no answer at all, good: each state once in the log, and no other line."""
    with Server(recorded()) as upstream:
        upstream.close()
        check_survival(tmp_path, upstream)


def check_survival(tmp_path, upstream):
    """What a server does by turns is in log and metrics; it is closed at first."""
    with serving(tmp_path, upstream) as command:
        seen = []

        def reaches(state):
            seen.append(state)
            until(lambda: states(command) == seen, f"{seen}, got {states(command)}")
            up = 1.0 if state == "up" else 0.0
            until(lambda: command.metric("vllm_pressure_up") == up, f"up {up}")
            assert command.get("/-/healthy")
            assert command.get("/-/ready")

        reaches("connection_refused")
        upstream.open()
        reaches("up")
        upstream.mode = status("500 No")
        reaches("http_500")
        upstream.mode = HTML
        reaches("unreadable_body")
        upstream.mode = silent
        reaches("timeout")
        upstream.mode = good
        reaches("up")
        for reason in ("connection_refused", "http_500", "unreadable_body", "timeout"):
            errors = command.metric(f'vllm_pressure_exporter_poll_errors_total{{reason="{reason}"}}')
            assert errors >= 1
        assert command.stop()[0] == 0
    assert [word for word in words(command) if word != "target"] == ["serving", "stopping"]


def test_log_lines_are_json_where_that_is_asked_for(tmp_path, upstream):
    """Each of them, with the same fields."""
    with serving(tmp_path, upstream, "--log.format", "json") as command:
        until(lambda: states(command) == [] and '"target up' in command.err, "the first poll")
        command.stop()
    lines = [json.loads(line) for line in command.err.splitlines()]
    assert all(line.keys() == {"ts", "level", "logger", "msg"} for line in lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["ts"])


def test_without_configuration_the_local_vllm_is_watched(tmp_path):
    """The address at which vLLM serves by default."""
    with Command(tmp_path, *ANYWHERE) as command:
        command.base()
        assert "target=http://127.0.0.1:8000/metrics" in command.err
        assert command.stop()[0] == 0


def test_a_port_that_is_taken_is_said_and_ends_it(tmp_path):
    """In one line, with exit status 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Command(tmp_path, "--web.listen-address", address) as command:
            assert command.end() == 1
    assert command.err == f"vllm-preemption-exporter: cannot listen on {address}: address already in use\n"


def test_what_runs_all_day_does_not_load_requests():
    """Nor, for the command line alone, any HTTP at all."""
    code = (
        "import sys, exporter.cli; assert 'aiohttp' not in sys.modules, 'aiohttp';"
        "import exporter.runtime.sidecar, exporter.commands.record;"
        "assert 'requests' not in sys.modules, 'requests'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Secrets


def test_no_secret_is_in_log_metrics_or_status(tmp_path, upstream):
    """Though all of them were sent: to a server that takes them and to one that does not."""
    token = tmp_path / "token"
    token.write_text(f"{HIDDEN}-token\n")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"targets: [{{url: '{upstream.url}?key={HIDDEN}-query', headers: {{X-Key: {HIDDEN}-header}},"
        f" bearer_token_file: {token}}}]\n"
    )
    arguments = ("--config.file", str(config), *ANYWHERE, *FAST, "--log.level", "debug")
    with Command(tmp_path, *arguments) as command:
        until(lambda: command.metric("vllm_pressure_up"), "a good poll")
        upstream.mode = status("401 No")
        until(lambda: command.metric("vllm_pressure_up") == 0.0, "a refused poll")
        shown = "".join(command.get(path) for path in ("/metrics", "/api/v1/status", "/"))
        command.stop()
    headers = upstream.polls[0].headers
    assert f"{HIDDEN}-query" in upstream.polls[0].path
    assert headers["X-Key"] == f"{HIDDEN}-header"
    assert headers["Authorization"] == f"Bearer {HIDDEN}-token"
    assert HIDDEN not in shown + command.err + command.out


def test_a_token_of_the_environment_is_sent_and_not_shown(tmp_path, upstream):
    """Where only the exporter and the server can see it."""
    with serving(tmp_path, upstream, environ={"VLLM_PRESSURE_TARGET_BEARER_TOKEN": HIDDEN}) as command:
        until(lambda: command.metric("vllm_pressure_up"), "a good poll")
        shown = command.get("/metrics") + command.get("/api/v1/status")
        command.stop()
    assert upstream.polls[0].headers["Authorization"] == f"Bearer {HIDDEN}"
    assert HIDDEN not in shown + command.err


# The end


def check_prompt_end(command, number=signal.SIGTERM) -> None:
    """The command ends with 0 within two seconds, and says no more than that it does."""
    before = len(words(command))
    code, seconds = command.stop(number)
    assert code == 0
    assert seconds < PROMPT
    assert words(command)[before:] == ["stopping"]
    assert f'msg="stopping signal={number.name}"' in command.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_between_polls(tmp_path, upstream, number):
    """Kubernetes sends the one, a terminal the other."""
    with serving(tmp_path, upstream) as command:
        until(lambda: states(command), "the first poll")
        check_prompt_end(command, number)


def test_a_signal_ends_it_in_the_middle_of_a_poll(tmp_path, upstream):
    """Though the poll has ten more seconds."""
    upstream.mode = silent
    with serving(tmp_path, upstream, "--poll.timeout", "10s") as command:
        until(lambda: upstream.polls, "the first poll")
        check_prompt_end(command)


def test_a_signal_ends_it_while_scrapes_are_under_way(tmp_path, upstream):
    """One client has sent half of a request, another does not read its answers, a third lies idle."""
    with serving(tmp_path, upstream) as command:
        until(lambda: states(command), "the first poll")
        address = ("127.0.0.1", int(command.base().rpartition(":")[2]))
        with (
            socket.create_connection(address) as half,
            socket.create_connection(address) as deaf,
            socket.create_connection(address) as idle,
        ):
            half.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
            idle.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(100)
            # Their answers fill all buffers many times over; much more sent ahead would end the connection.
            deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 1500)
            time.sleep(0.2)
            check_prompt_end(command)


def test_a_signal_ends_it_while_a_name_server_does_not_answer(tmp_path):
    """A look-up in a thread cannot be stopped: nobody waits for it, and it says nothing when it is late."""
    script = (
        "import socket, sys, time\n"
        "from exporter.cli import main\n"
        "real = socket.getaddrinfo\n"
        "def lookup(host, *more, **named):\n"
        "    if host != 'vllm.invalid': return real(host, *more, **named)\n"
        "    print('asked', flush=True)\n"
        "    time.sleep(30)\n"
        "    raise socket.gaierror(socket.EAI_AGAIN, 'made up')\n"
        "socket.getaddrinfo = lookup\n"
        "sys.exit(main())\n"
    )
    arguments = ("--target.url", "http://vllm.invalid:8000", *ANYWHERE, *FAST)
    with Command(tmp_path, *arguments, script=script) as command:
        until(lambda: states(command), "the first poll")
        assert states(command) == ["timeout"]
        assert command.out == "asked\n"
        check_prompt_end(command)


def test_a_look_up_that_comes_too_late_says_nothing(capfd):
    """Its caller gave up long ago; a thread that complained would do so at every poll."""

    async def scenario():
        running = asyncio.get_running_loop()
        ended = asyncio.Event()

        def slow():
            time.sleep(0.1)
            running.call_soon_threadsafe(ended.set)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await running.run_in_executor(None, slow)
        await ended.wait()
        return await running.run_in_executor(None, lambda: "the next one")

    assert process.run(scenario()) == "the next one"
    assert capfd.readouterr() == ("", "")


def test_an_error_in_a_thread_is_its_callers():
    """As with any executor."""

    async def scenario():
        await asyncio.get_running_loop().run_in_executor(None, os.listdir, "/nowhere")

    with pytest.raises(FileNotFoundError):
        process.run(scenario())


@contextmanager
def hanging(path):
    """A file that is there and never comes to an end; a function that waits until somebody reads it."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    held = []

    def read() -> bool:
        with suppress(OSError):  # nobody has opened it yet
            held.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return bool(held)

    yield lambda: until(read, "a reader")
    for one in held:
        os.close(one)


@contextmanager
def asking_for_a_reload(command):
    """A client that has asked and waits for the answer."""
    with socket.create_connection(("127.0.0.1", int(command.base().rpartition(":")[2]))) as client:
        client.sendall(b"POST /-/reload HTTP/1.1\r\nHost: x\r\n\r\n")
        yield client


@pytest.mark.parametrize("asked", ["by a signal", "by a request"])
def test_a_signal_ends_it_while_a_reload_hangs(tmp_path, upstream, asked):
    """The configuration lies on a mount that does not answer, say."""
    config = tmp_path / "config.yaml"
    config.write_text("")
    more = ("--config.file", str(config), "--web.enable-lifecycle")
    with serving(tmp_path, upstream, *more) as command, ExitStack() as stack:
        until(lambda: states(command), "the first poll")
        read = stack.enter_context(hanging(config))
        if asked == "by a signal":
            command.send(signal.SIGHUP)
            read()
            check_prompt_end(command)
        else:
            client = stack.enter_context(asking_for_a_reload(command))
            read()
            check_prompt_end(command)
            assert b"the exporter is stopping" in client.recv(4096)


def test_a_signal_ends_it_while_a_reload_looks_for_targets_in_vain(tmp_path):
    """The configuration is good; a file that it names does not answer."""
    config, found = tmp_path / "config.yaml", tmp_path / "targets.yaml"
    config.write_text("targets: [{url: 'http://127.0.0.1:9'}]")
    arguments = ("--config.file", str(config), "--web.enable-lifecycle", *ANYWHERE, *FAST)
    with Command(tmp_path, *arguments) as command, hanging(found) as read:
        until(lambda: states(command), "the first poll")
        config.write_text(f"targets_file_sd: [{{files: ['{found}']}}]")
        with asking_for_a_reload(command):
            read()
            check_prompt_end(command)


@pytest.mark.parametrize("which", ["--config.file", "--web.config.file"])
def test_a_signal_ends_it_while_it_reads_its_first_configuration(tmp_path, which):
    """In vain."""
    path = tmp_path / "config.yaml"
    with hanging(path) as read, Command(tmp_path, which, str(path), *ANYWHERE) as command:
        read()

        def ended() -> bool:
            # One that comes just before the call that hangs interrupts nothing.
            command.send(signal.SIGTERM)
            return command.process.poll() is not None

        until(ended, "its end")
        assert command.end() == 0
    assert command.err == ""


def while_it_starts(number: signal.Signals) -> str:
    """A program that is sent a signal while it still loads its modules."""
    return (
        "import os, sys\n"
        "from exporter.cli import main\n"
        "class Sent:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'exporter.runtime.sidecar': os.kill(os.getpid(), {number.value})\n"
        "sys.meta_path.insert(0, Sent())\n"
        "sys.exit(main())\n"
    )


def test_a_signal_ends_it_while_it_starts(tmp_path):
    """Well: a container that is stopped as soon as it was started has not failed."""
    with Command(tmp_path, *ANYWHERE, script=while_it_starts(signal.SIGTERM)) as command:
        assert command.end() == 0
    assert command.err == ""


def test_a_reload_does_not_end_it_while_it_starts(tmp_path):
    """There is nothing to read anew yet."""
    with Command(tmp_path, *ANYWHERE, script=while_it_starts(signal.SIGHUP)) as command:
        assert command.base()
        assert command.stop()[0] == 0


def test_more_signals_change_nothing_of_its_end(tmp_path):
    """It ends by itself, with status 0."""
    script = (
        "import atexit, os, signal, sys\n"
        "from exporter.cli import main\n"
        "def again():\n"
        "    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): os.kill(os.getpid(), number)\n"
        "atexit.register(again)\n"
        "sys.exit(main())\n"
    )
    with Command(tmp_path, *ANYWHERE, script=script) as command:
        assert command.base()
        assert command.stop()[0] == 0
    assert "Traceback" not in command.err


# The sidecar in this process


def config(url: str, timeout: float = 10.0) -> Config:
    """A sidecar on any free port."""
    return replace(
        Config(),
        targets=(TargetConfig(url=url),),
        web=WebConfig(listen_address="127.0.0.1:0"),
        poll=PollConfig(timeout=timeout),
    )


def test_it_can_be_stopped_before_it_was_started():
    """As when the address is taken."""

    async def scenario():
        await Sidecar(config("http://127.0.0.1:9/metrics")).stop()

    asyncio.run(scenario())


def test_it_can_be_stopped_before_the_first_poll_has_ended(upstream, caplog):
    """Nothing is left open: neither task nor connection."""
    upstream.mode = silent

    async def scenario():
        sidecar = Sidecar(config(upstream.url))
        await sidecar.start()
        await asyncio.to_thread(until, lambda: upstream.polls, "the first poll")
        async with asyncio.timeout(PROMPT):
            await sidecar.stop()
        assert sidecar.reading is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
        gc.collect()
    assert not caplog.records


def test_the_listener_closes_last(upstream):
    """What was known stays readable while all else ends."""
    answers = []

    async def scenario():
        sidecar = Sidecar(config(upstream.url))
        base = await sidecar.start()
        await asyncio.to_thread(until, lambda: upstream.polls, "the first poll")
        (watched,) = sidecar.watched
        close = watched._client.close

        async def closing():
            assert all(task.done() for task in watched._tasks)
            async with aiohttp.ClientSession() as client, client.get(base + "/metrics") as answer:
                answers.append(answer.status)
            await close()

        watched._client.close = closing
        await sidecar.stop()
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientConnectionError):
                await client.get(base + "/metrics")

    asyncio.run(scenario())
    assert answers == [200]


def test_the_status_of_a_running_sidecar_is_down_while_vllm_is(tmp_path):
    """And an unknown address of its own server is 404, not a fault."""
    with Command(tmp_path, "--target.url", "http://127.0.0.1:9", *ANYWHERE, *FAST) as command:
        until(lambda: states(command), "the first poll")
        (target,) = json.loads(command.get("/api/v1/status"))["targets"]
        assert (target["up"], target["error"], target["engines"]) == (False, "connection_refused", {})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            command.get("/nowhere")
        assert command.stop()[0] == 0
