"""The real command as a process of its own, and a small server for it to watch, good or hostile."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from support import real_recordings

PATIENCE = 15.0  # seconds for what takes well under one, unless the machine is starved
HTML = b"<!DOCTYPE html><html><body>Welcome to nginx!</body></html>"
# Short enough for tests; a poll of the small server takes far less than a tenth of it.
FAST = ("--poll.interval", "200ms", "--poll.timeout", "700ms")
ANYWHERE = ("--web.listen-address", "127.0.0.1:0")


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait for a condition and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.02)
    return value


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Upstream:
    """A server like vLLM's; what it answers to `/metrics` can be changed at any time.

    Attributes:
        mode: ``good`` (the body), ``html``, ``hang`` (no answer), or a status such as ``500``.
        body: the body of a good answer.
        requests: time, path and headers of every request.
    """

    def __init__(self, body: bytes | None = None) -> None:
        self.mode = "good"
        self.body = real_recordings.polls(real_recordings.CALM)[-1].body if body is None else body
        self.port = free_port()
        self.requests: list[tuple[float, str, dict[str, str]]] = []
        self._released = threading.Event()
        self._server: ThreadingHTTPServer | None = None

    @property
    def polls(self) -> list[tuple[float, str, dict[str, str]]]:
        """The requests for its metrics."""
        return [request for request in self.requests if request[1].startswith("/metrics")]

    @property
    def url(self) -> str:
        """Where its metrics are."""
        return f"http://127.0.0.1:{self.port}/metrics"

    def open(self) -> None:
        """Listen, always on the same port."""
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                upstream.requests.append((time.monotonic(), self.path, dict(self.headers)))
                upstream.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # a client that went away
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop to listen: connections are refused."""
        self._released.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request by the mode."""
        if self.mode == "hang":
            self._released.wait(PATIENCE)
            request.close_connection = True
            return
        metrics = request.path.startswith("/metrics")
        status = int(self.mode) if self.mode.isdigit() else 200 if metrics else 404
        body = b"" if status != 200 else HTML if self.mode == "html" else self.body
        request.send_response(status)
        request.send_header("Content-Type", "text/plain; version=0.0.4")
        request.send_header("Content-Length", str(len(body)))
        if not metrics:
            request.send_header("Connection", "close")
        request.end_headers()
        with contextlib.suppress(OSError):
            request.wfile.write(body)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Command:
    """``python -m exporter ...`` as a process; killed at the end of the block, whatever happens."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environ: dict[str, str] | None = None,
        script: str | None = None,
    ) -> None:
        """Prepare.

        Args:
            folder: an own one for its output.
            arguments: of the command.
            environ: added to an environment without any variable of the exporter.
            script: Python code to run in place of ``-m exporter``.
        """
        self._start = ["-m", "exporter"] if script is None else ["-c", script]
        self._arguments = arguments
        clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_PRESSURE_")}
        self._environ = clean | {"PYTHONUNBUFFERED": "1"} | (environ or {})
        self._out, self._err = folder / "stdout", folder / "stderr"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", *self._start, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environ,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def out(self) -> str:
        """What it printed so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What it logged or complained of so far."""
        return self._err.read_text()

    def base(self) -> str:
        """The base URL of its web server, once it serves."""
        return until(lambda: re.search(r"serving url=(\S+)", self.err), f"serving\n{self.err}")[1]

    def get(self, path: str) -> str:
        """What its web server answers."""
        with urllib.request.urlopen(self.base() + path, timeout=PATIENCE) as answer:
            return answer.read().decode()

    def metric(self, series: str) -> float | None:
        """The value of one of its series by the series' whole text."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return None if found is None else float(found[1])

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end; the exit status."""
        return self.process.wait(PATIENCE)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal and wait; the exit status and the seconds it took."""
        start = time.monotonic()
        self.send(number)
        return self.end(), time.monotonic() - start
