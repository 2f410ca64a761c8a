"""Runs the real command as a process."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

PATIENCE = 60.0  # seconds; a starved machine needs twelve to start a command that takes one
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


def shell(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a line in the shell, in which "$@" is the exporter's command with these arguments."""
    command = [sys.executable, "-m", "exporter", *map(str, arguments)]
    return subprocess.run(
        ["sh", "-c", script, "sh", *command], capture_output=True, text=True, check=False, timeout=180
    )


@contextmanager
def refusing_port() -> Iterator[int]:
    """Give a port that refuses connections during the block; a server of the test may listen on it.

    It is bound all the time: nobody else on the machine is given the same one.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


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
            folder: for its output.
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
        """Return its standard output so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """Return its standard error so far."""
        return self._err.read_text()

    def base(self) -> str:
        """Return the base URL of its web server, once it serves."""
        return until(lambda: re.search(r"serving url=(\S+)", self.err), f"serving\n{self.err}")[1]

    def get(self, path: str) -> str:
        """Return the response of its web server."""
        with urllib.request.urlopen(self.base() + path, timeout=PATIENCE) as answer:
            return answer.read().decode()

    def metric(self, series: str) -> float | None:
        """Return the value of a series, by the series' whole text."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return None if found is None else float(found[1])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end; returns the exit status."""
        return self.process.wait(PATIENCE)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal and wait; returns the status and the seconds, less its waits for a core."""
        start, waited = time.monotonic(), self._waited_for_a_core()
        self.send(number)
        gone = os.WEXITED | os.WNOWAIT | os.WNOHANG  # its figures can be read until somebody waits for it
        until(lambda: os.waitid(os.P_PID, self.process.pid, gone), "its end")
        seconds = time.monotonic() - start - (self._waited_for_a_core() - waited)
        return self.end(), seconds

    def _waited_for_a_core(self) -> float:
        """Return the seconds in which its main thread could have run, but others did."""
        try:
            return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / 1e9
        except OSError:  # not every kernel counts them
            return 0.0
