"""The sidecar: one watcher, one web server, and an orderly end."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector

from exporter import __version__
from exporter.config import Config
from exporter.pipeline import Pipeline, TargetReading
from exporter.publish.metrics import ReadingCollector
from exporter.publish.own import OwnMetrics
from exporter.publish.web import WebServer, make_app
from exporter.report import status_object
from exporter.vllm.client import MetricsClient
from exporter.vllm.probes import Prober
from exporter.watch import Pace, PollOutcome, Watcher

__all__ = ["Sidecar", "run", "signalled"]

log = logging.getLogger(__name__)


class Sidecar:
    """Everything that runs for one target."""

    def __init__(self, config: Config) -> None:
        """Put the parts together, without opening anything."""
        target = config.targets[0]
        self.reading: TargetReading | None = None
        self._url = shown_url(target.url)
        self._own = OwnMetrics()
        self._client = MetricsClient(target, config.poll)
        self._prober = Prober.of(target, config.poll)
        self._pipeline = Pipeline(config.analysis, target.facts, config.poll.interval, config.engine.args)
        self._watcher = Watcher(self._client, self._pipeline, Pace(config.poll.interval), self._note)
        self._server = WebServer(make_app(self._registry(), self.status), config.web.host, config.web.port)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Serve and begin to poll; returns the base URL.

        Raises:
            OSError: the address cannot be listened on.
        """
        url = await self._server.start()
        self._tasks = [asyncio.create_task(work.run()) for work in (self._watcher, self._prober)]
        log.info("serving url=%s target=%s version=%s", url, self._url, __version__)
        return url

    async def stop(self) -> None:
        """Stop polling, then close the listener: what was known stays readable to the end."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._client.close()
        await self._prober.close()
        await self._server.stop()

    def status(self) -> Mapping[str, Any]:
        """The state for the API."""
        target = status_object(self._url, self.reading, time.monotonic())
        return {"version": __version__, "targets": [target]}

    def _note(self, outcome: PollOutcome) -> None:
        self.reading = outcome.reading
        self._own.poll(outcome)
        if outcome.reading.up:
            self._prober.seen(self._pipeline.restarts)
        self._pipeline.probed = self._prober.probed

    def _registry(self) -> CollectorRegistry:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(
            ReadingCollector(lambda: self.reading, time.monotonic, time.time, self._own.collect_error)
        )
        registry.register(self._own)
        ProcessCollector(registry=registry)
        return registry


def shown_url(url: str) -> str:
    """A target's URL as it may be shown: a query may hold a token."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def signalled() -> asyncio.Future[str]:
    """The name of the SIGTERM or SIGINT to come; from now on they end nothing by themselves."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[str] = loop.create_future()

    def note(name: str) -> None:
        if not came.done():
            came.set_result(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note, number.name)
    return came


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        OSError: the address cannot be listened on.
    """
    stopped = signalled()
    sidecar = Sidecar(config)
    try:
        await sidecar.start()
        log.info("stopping signal=%s", await stopped)
    finally:
        await sidecar.stop()
