"""The process that serves: its targets, one web server, reloads, and an orderly end."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import prometheus_client
from prometheus_client import ProcessCollector

from exporter import __version__
from exporter.analysis.pipeline import TargetReading
from exporter.config import Config
from exporter.publish.alerts.push import Notifier
from exporter.publish.json_text import json_text
from exporter.publish.metrics.scrape import Scrape, Tables
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS
from exporter.publish.page.renderer import Page, own_lines
from exporter.publish.page.view import TargetView, View
from exporter.publish.status import status_object
from exporter.publish.web.app import WebServer, make_app
from exporter.publish.web.forecasts import PATH as FORECASTS
from exporter.publish.web.forecasts import Forecasts
from exporter.runtime import logs, reload
from exporter.runtime.fleet import SECTIONS as FLEET_SECTIONS
from exporter.runtime.fleet import Fleet, Watched
from exporter.runtime.forecaster import Forecaster
from exporter.runtime.process import SYSTEM, freeze_settled, raise_file_limit, stop_signal

__all__ = ["FleetViews", "Sidecar", "run"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetViews:
    """The fleet as the web server shows it, built from the latest readings on request."""

    _fleet: Fleet
    _own: ExporterMetrics
    _process: ProcessCollector

    def status(self, name: str | None = None) -> Mapping[str, Any] | Coroutine[Any, Any, bytes]:
        """Return the state of all targets or of one: an object, or the making of a text if there are many."""
        if self._fleet.several:
            return self._status_text(name)
        return _document([self._status_of(watched) for watched in self._fleet])

    def status_of_one(self, name: str | None = None) -> Mapping[str, Any]:
        """Return the state of one target; raises LookupError for an unknown name or none among several."""
        for watched in self._fleet:
            if not self._fleet.several or watched.target.name == name:
                return _document([self._status_of(watched)])
        raise LookupError(f"expected ?target=HOST:PORT, one of {len(self._fleet)} targets")

    def page(self) -> View:
        """Return the state for the status page."""
        several = self._fleet.several
        targets = tuple(
            TargetView(
                watched.url,
                watched.reading,
                watched.timeline,
                watched.target.name if several else "",
                watched.target.labels if several else (),
            )
            for watched in self._fleet
        )
        now, wall = SYSTEM.monotonic(), SYSTEM.wall()
        polls = PollCounts.total(watched.counts for watched in self._fleet)
        return View(now, wall, targets, own_lines(polls, self._process.collect(), wall))

    def tables(self) -> Tables:
        """Return the collectors for a scrape."""
        watched = list(self._fleet)
        counts = [one.counts for one in watched]
        return (METRICS, [one.collector for one in watched]), (EXPORTER_METRICS, [self._own, *counts])

    async def _status_text(self, name: str | None) -> bytes:
        """Make the state as JSON, target by target: polls run in between."""
        targets = []
        for watched in self._fleet:
            if name in (None, watched.target.name):
                targets.append(json_text(self._status_of(watched)))
                await asyncio.sleep(0)
        return f'{{"version": {json_text(__version__)}, "targets": [{", ".join(targets)}]}}'.encode()

    def _status_of(self, watched: Watched) -> Mapping[str, Any]:
        target, among = watched.target, {}
        if self._fleet.several:
            among = {"target": target.name, "labels": dict(target.labels), "source": target.source}
        now, loads = SYSTEM.monotonic(), watched.pipeline.loads()
        return status_object(watched.url, watched.reading, now, loads, among=among)


def _document(targets: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {"version": __version__, "targets": targets}


class Sidecar:
    """Everything that runs in one process, for one target or many."""

    def __init__(self, config: Config, load: Callable[[], Config] | None = None) -> None:
        """Put the parts together, without opening anything; without `load` nothing is ever reloaded."""
        self._own = ExporterMetrics()
        self._own.reloaded(SYSTEM.wall())
        self._notifier = self._new_notifier(config)
        self._fleet = Fleet(config, self._own, self._notifier, SYSTEM)
        self._tasks: list[asyncio.Task[None]] = []
        self._pushing: asyncio.Task[None] | None = None
        process = ProcessCollector(registry=None)
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.views = FleetViews(self._fleet, self._own, process)  # the state as it is shown
        self._forecasts = Forecasts(self.views.status_of_one, config.whatif, SYSTEM.monotonic)
        self._forecaster = Forecaster(self._fleet, self._forecasts)
        # Hands another configuration to the parts.
        self.reloader = reload.Reloader(config, load, self._users(), self._note_reload)
        scrape, page = Scrape(self.views.tables, process), Page(self.views.page, SYSTEM.monotonic)
        app = make_app(scrape, self.views.status, page, self._forecaster.ask)
        app.router.add_get(FORECASTS, self._forecasts.answer)
        app.router.add_post(reload.PATH, self.reloader.answer)
        app.router.add_put(reload.PATH, self.reloader.answer)
        self._server = WebServer(app, config.web.host, config.web.port, config.web.config.file)

    @property
    def reading(self) -> TargetReading | None:
        """The last reading of the first target."""
        return next((watched.reading for watched in self._fleet), None)

    @property
    def watched(self) -> list[Watched]:
        """The targets."""
        return list(self._fleet)

    async def start(self) -> str:
        """Serve and begin to poll; returns the base URL, raises OSError if it cannot listen."""
        url = await self._server.start()
        raise_file_limit(self.reloader.config)
        self._pushing = asyncio.create_task(self._notifier.run())
        self._tasks = [asyncio.create_task(job) for job in self._jobs()]
        self._fleet.start()
        several = self._fleet.several
        target = f"{len(self._fleet)} targets" if several else next(iter(self._fleet)).url
        log.info("serving url=%s target=%s version=%s", url, target, __version__)
        return url

    def _jobs(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return freeze_settled(self._fleet), self.reloader.run(), self._forecaster.run()

    async def stop(self) -> None:
        """Stop polling, then close the listener: the last state stays readable to the end."""
        self._notifier.close()
        await self.reloader.stop()
        await self._fleet.stop()
        for task in (self._pushing, *self._tasks):
            await _cancel(task)
        await self._forecasts.stop()
        await self._server.stop()

    def _users(self) -> tuple[reload.User, ...]:
        """Which part uses which section of the configuration; the order is that of a reload."""
        return (
            reload.User(("web",), self._reload_web),
            reload.User(("log",), self._reload_log),
            reload.User(("alertmanager",), self._reload_notifier),
            reload.User(("whatif",), self._reload_forecasts),
            reload.User((*FLEET_SECTIONS, "alertmanager"), self._reload_fleet),
        )

    async def _reload_web(self, _config: Config) -> None:
        log.warning("changes to web options take effect after a restart")

    async def _reload_log(self, config: Config) -> None:
        logs.set_up(config.log.level, config.log.format)

    async def _reload_notifier(self, config: Config) -> None:
        self._notifier.close()
        await _cancel(self._pushing)
        self._notifier = self._new_notifier(config)
        self._pushing = asyncio.create_task(self._notifier.run())

    async def _reload_forecasts(self, config: Config) -> None:
        self._forecasts.config = config.whatif

    async def _reload_fleet(self, config: Config) -> None:
        raise_file_limit(config)
        await self._fleet.reload(config, self._notifier)

    def _note_reload(self, succeeded: bool) -> None:
        self._own.reloaded(SYSTEM.wall() if succeeded else None)
        if succeeded:
            log.info("configuration reloaded targets=%d", len(self._fleet))

    def _new_notifier(self, config: Config) -> Notifier:
        return Notifier(config.alertmanager, self._own.notified, SYSTEM.wall)


async def _cancel(task: asyncio.Task[Any] | None) -> None:
    """End a task, and raise the error that it may have ended with before."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])  # awaiting it would confuse our own cancellation with its
        if not task.cancelled():
            task.result()


async def run(config: Config, load: Callable[[], Config] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the configuration. Raises OSError if it cannot listen."""
    sidecar = Sidecar(config, load)  # it may read files: until it is made a signal ends the process at once
    stopped = stop_signal()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, sidecar.reloader.due.set)
    try:
        await sidecar.start()
        log.info("stopping signal=%s", await stopped)
    finally:
        await sidecar.stop()
