"""Runs the real Prometheus and Alertmanager on loopback, and collects their pages."""

import json
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import yaml

from support import real_recordings
from support.process import PATIENCE, until

EXAMPLE = Path(__file__).parents[2] / "deploy" / "alertmanager" / "alertmanager.yml"


class Program:
    """A program that serves HTTP during the block.

    Attributes:
        url: its base URL, once it runs; the system chooses the port.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        """Prepare.

        Args:
            folder: for its data and output.
            names: of the program; the first installed one is used.
        """
        path = next(filter(None, map(shutil.which, names)), None)
        assert path, f"{' or '.join(names)} is missing; `.ci/programs` installs it"
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.folder, self.url = path, folder, ""
        self.process: subprocess.Popen[bytes] | None = None

    def arguments(self) -> Sequence[str]:
        """Return its arguments, without its address."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [self.path, *self.arguments(), "--web.listen-address=127.0.0.1:0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )
        try:
            until(self._ready, f"{self.path} is ready; its log is {self.folder / 'log'}")
        except AssertionError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str) -> Any:
        """Return its JSON response."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def _ready(self) -> bool:
        log = (self.folder / "log").read_text()
        assert self.process.poll() is None, log
        if not (address := re.search(r'msg="Listening on" .*?address=(127\.0\.0\.1:\d+)', log)):
            return False
        self.url = f"http://{address[1]}"
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=PATIENCE):
                return True
        except OSError:
            return False


class Alertmanager(Program):
    """Runs with the example's configuration: its routes and inhibitions, with short waits."""

    def __init__(self, folder: Path, pagers: "Pagers", name: str) -> None:
        super().__init__(folder, "prometheus-alertmanager", "alertmanager")
        config = yaml.safe_load(EXAMPLE.read_text())
        for route in (config["route"], *config["route"]["routes"]):
            route |= {"group_wait": "1s", "group_interval": "2s", "repeat_interval": "1h"}
        for receiver in config["receivers"]:
            for hook in receiver.get("webhook_configs", ()):
                hook["url"] = pagers.url(f"{name}/{receiver['name']}")
        (folder / "config.yml").write_text(yaml.safe_dump(config))

    def arguments(self) -> Sequence[str]:
        """Return arguments for a single instance without a cluster."""
        return (
            f"--config.file={self.folder / 'config.yml'}",
            f"--storage.path={self.folder / 'data'}",
            "--cluster.listen-address=",
        )

    def alerts(self) -> list[dict[str, Any]]:
        """Return all active alerts, including inhibited ones."""
        return self.get("/api/v2/alerts")

    def post(self, *alerts: Mapping[str, Any]) -> None:
        """Post alerts, as any client may."""
        request = urllib.request.Request(
            f"{self.url}/api/v2/alerts", json.dumps(alerts).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE):
            pass


class Prometheus(Program):
    """Scrapes one exporter and evaluates rules."""

    def __init__(
        self, folder: Path, exporter: str, rules: str, alertmanagers: Sequence[Alertmanager], interval: str
    ) -> None:
        """Prepare.

        Args:
            folder: for its data and output.
            exporter: its ``host:port``.
            rules: text of the rule file.
            alertmanagers: each receives all alerts.
            interval: between scrapes, and between evaluations unless the rules have one.
        """
        super().__init__(folder, "prometheus")
        (folder / "rules.yml").write_text(rules)
        config = {
            "global": {
                "scrape_interval": interval,
                "evaluation_interval": interval,
                "external_labels": {"cluster": "eu"},
            },
            "rule_files": [str(folder / "rules.yml")],
            "alerting": {
                "alertmanagers": [
                    {"static_configs": [{"targets": [one.url.removeprefix("http://")]}]}
                    for one in alertmanagers
                ]
            },
            "scrape_configs": [
                {
                    "job_name": "vllm-preemption-exporter",
                    "static_configs": [
                        {"targets": [exporter], "labels": {"namespace": "prod", "pod": "vllm-0"}}
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def arguments(self) -> Sequence[str]:
        """Return arguments with its own store."""
        return (
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            "--rules.alert.resend-delay=2s",
        )


@dataclass(frozen=True)
class Page:
    """One notification.

    Attributes:
        t: its time, by the monotonic clock.
        to: ``NAME/RECEIVER``.
        group: the key of its group.
        body: the whole document.
    """

    t: float
    to: str
    group: str
    body: Mapping[str, Any]

    @property
    def status(self) -> str:
        """Return ``firing`` or ``resolved``."""
        return self.body["status"]

    @property
    def alerts(self) -> list[dict[str, Any]]:
        """Return its alerts."""
        return self.body["alerts"]

    @property
    def sources(self) -> set[str]:
        """Return the sources of its firing alerts: ``sidecar`` or ``rules``."""
        return {
            alert["labels"].get("source", "rules") for alert in self.alerts if alert["status"] == "firing"
        }


class Pagers:
    """Collects the notifications of all receivers of all Alertmanagers."""

    def __init__(self) -> None:
        self.pages: list[Page] = []
        pagers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pagers.pages.append(Page(time.monotonic(), self.path[1:], body["groupKey"], body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url(self, name: str) -> str:
        """Return the URL of a receiver."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/{name}"

    def to(self, name: str) -> list[Page]:
        """Return the pages of a receiver, in order."""
        return [page for page in self.pages if page.to == name]

    def story(self, name: str) -> list[str]:
        """Return each change of status of a receiver's only incident, as an incident tool shows it."""
        groups = {page.group for page in self.to(name)}
        assert len(groups) <= 1, f"expected one incident, got {sorted(groups)}"
        return [status for status, _ in groupby(page.status for page in self.to(name))]


class Storm:
    """Serves a recorded storm once as if it were live; after its end the last body stays.

    Attributes:
        port: never changes.
    """

    def __init__(self, name: str) -> None:
        """Prepare; the storm starts with the first request."""
        good = [poll for poll in real_recordings.polls(name) if poll.body is not None]
        self._times = [poll.t for poll in good]
        self._bodies = [poll.body for poll in good]
        self._began: float | None = None
        storm = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                found = self.path == "/metrics"
                body = storm.body() if found else b""
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # a client that disconnected
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/metrics"

    def body(self) -> bytes:
        """Return the current body."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        passed = [body for t, body in zip(self._times, self._bodies, strict=True) if t <= now - self._began]
        return passed[-1]

    def close(self) -> None:
        """Stop: connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
