"""The process that serves: its targets, one web server, reloading, and an orderly end."""

import asyncio
import contextlib
import gc
import json
import logging
import resource
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import prometheus_client
from aiohttp import web
from prometheus_client import ProcessCollector

from exporter import __version__
from exporter.analysis.pipeline import TargetReading
from exporter.config import Config, ConfigError
from exporter.publish.alerts.push import Notifier
from exporter.publish.metrics.scrape import Scrape, Tables
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS
from exporter.publish.page.markup import TargetView, View
from exporter.publish.page.renderer import Page, own_lines
from exporter.publish.status import status_object
from exporter.publish.web.app import WebServer, make_app
from exporter.publish.web.forecasts import PATH as FORECASTS
from exporter.publish.web.forecasts import Forecasts
from exporter.runtime import logs
from exporter.runtime.fleet import Clocks, Fleet, Watched
from exporter.runtime.signals import stop_signal

__all__ = ["Sidecar", "run"]

log = logging.getLogger(__name__)

RELOAD: Final = "/-/reload"
_CLOCKS: Final = Clocks(time.monotonic, time.time)
# One target's connections: its polls, its questions beside them; and the scrapes of the exporter itself.
_FILES_PER_TARGET: Final = 2
_FILES_BESIDE: Final = 300
# With fewer targets than these the garbage collector's pauses are nothing to speak of.
_MANY: Final = 50
_SETTLED_SECONDS: Final = 2.0


class Sidecar:
    """Everything that runs in one process, for one target or many."""

    def __init__(self, config: Config, load: Callable[[], Config] | None = None) -> None:
        """Put the parts together, without opening anything.

        Args:
            config: what to do.
            load: reads the configuration anew; without it nothing is ever reloaded.
        """
        self._config = config
        self._load = load
        self._reloading = asyncio.Lock()
        self._reload: asyncio.Task[tuple[str, ...]] | None = None
        self._own = ExporterMetrics()
        self._own.reloaded(time.time())
        self._notifier = self._new_notifier(config)
        self._fleet = Fleet(config, self._own, self._notifier, _CLOCKS)
        self._process = ProcessCollector(registry=None)
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        app = make_app(
            Scrape(self._tables, self._process), self._answer_status, Page(self._view, time.monotonic)
        )
        self._forecasts = Forecasts(self._status_of_one, config.whatif)
        app.router.add_get(FORECASTS, self._forecasts.answer)
        app.router.add_post(RELOAD, self._answer_reload)
        app.router.add_put(RELOAD, self._answer_reload)
        self._server = WebServer(app, config.web.host, config.web.port, config.web.config.file)
        self._telling: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None

    @property
    def reading(self) -> TargetReading | None:
        """The last reading of the first target."""
        return next((watched.reading for watched in self._fleet), None)

    @property
    def watched(self) -> list[Watched]:
        """The targets."""
        return list(self._fleet)

    async def start(self) -> str:
        """Serve and begin to poll; returns the base URL.

        Raises:
            OSError: the address cannot be listened on.
        """
        url = await self._server.start()
        self._make_room()
        self._telling = asyncio.create_task(self._notifier.run())
        self._settling = asyncio.create_task(_keep_settled(self._fleet))
        self._fleet.start()
        log.info("serving url=%s target=%s version=%s", url, self._named(), __version__)
        return url

    async def stop(self) -> None:
        """Stop polling, then close the listener: what was known stays readable to the end."""
        self._notifier.close()
        self._load = None
        if self._reload is not None:
            self._reload.cancel()  # it may be reading where reading hangs
            await asyncio.wait([self._reload])
        await self._fleet.stop()
        await _ended(self._telling)
        await _ended(self._settling)
        await self._forecasts.stop()
        await self._server.stop()

    async def reload(self) -> tuple[str, ...]:
        """Read the configuration anew and go on with it; one that is not good changes nothing.

        Returns:
            What is wrong with it, nothing when it is used.
        """
        async with self._reloading:
            if self._load is None:
                return ("there is nothing to reload",)
            self._reload = asyncio.create_task(self._read_anew(self._load))
            await asyncio.wait([self._reload])
            return ("the exporter is stopping",) if self._reload.cancelled() else self._reload.result()

    async def _read_anew(self, load: Callable[[], Config]) -> tuple[str, ...]:
        try:
            config = await asyncio.get_running_loop().run_in_executor(None, load)
        except ConfigError as problem:
            self._own.reloaded(None)
            log.error(  # noqa: TRY400 (the problems say it all)
                "configuration is not good, the old one is kept problems=%r", "; ".join(problem.problems)
            )
            return problem.problems
        await self._use(config)
        self._own.reloaded(time.time())
        log.info("configuration reloaded targets=%d", len(self._fleet))
        return ()

    async def _use(self, config: Config) -> None:
        before, self._config = self._config, config
        if config.web != before.web:
            log.warning("web options are those of the start until the exporter is started anew")
        if config.log != before.log:
            logs.set_up(config.log.level, config.log.format)
        if config.alertmanager != before.alertmanager:
            self._notifier.close()
            await _ended(self._telling)
            self._notifier = self._new_notifier(config)
            self._telling = asyncio.create_task(self._notifier.run())
        self._make_room()
        await self._fleet.reload(config, self._notifier)

    def _new_notifier(self, config: Config) -> Notifier:
        return Notifier(config.alertmanager, self._own.notified, time.time)

    def _make_room(self) -> None:
        """Let this process have as many files open as its targets need; a limit of 1024 is usual."""
        if self._config.is_single:
            return
        wanted = _FILES_PER_TARGET * self._config.poll.max_targets + _FILES_BESIDE
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if now == resource.RLIM_INFINITY or now >= wanted:
            return
        if most != resource.RLIM_INFINITY:
            wanted = min(wanted, most)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))

    def _named(self) -> str:
        first = next(iter(self._fleet), None)
        return first.url if first is not None and not self._fleet.several else f"{len(self._fleet)} targets"

    def status(self) -> Mapping[str, Any]:
        """The state for the API."""
        return {"version": __version__, "targets": [self._status(watched) for watched in self._fleet]}

    def _status(self, watched: Watched) -> Mapping[str, Any]:
        target, among = watched.target, {}
        if self._fleet.several:
            among = {"target": target.name, "labels": dict(target.labels), "source": target.source}
        return status_object(
            watched.url, watched.reading, time.monotonic(), watched.pipeline.loads(), among=among
        )

    def _status_of_one(self, name: str | None = None) -> Mapping[str, Any]:
        """The state with one target in it.

        Raises:
            LookupError: there is none of this name, or several and none was named.
        """
        if not self._fleet.several:
            return self.status()
        found = [watched for watched in self._fleet if watched.target.name == name]
        if not found:
            raise LookupError(f"expected ?target=HOST:PORT, one of {len(self._fleet)} targets")
        return {"version": __version__, "targets": [self._status(found[0])]}

    def _answer_status(self, name: str | None = None) -> Mapping[str, Any] | Coroutine[Any, Any, bytes]:
        return self._status_text(name) if self._fleet.several else self.status()

    async def _status_text(self, name: str | None) -> bytes:
        """The state as JSON, made target by target: polls have their turn in between."""
        told = []
        for watched in self._fleet:
            if name not in (None, watched.target.name):
                continue
            told.append(json.dumps(self._status(watched)))
            await asyncio.sleep(0)
        return f'{{"version": {json.dumps(__version__)}, "targets": [{", ".join(told)}]}}'.encode()

    async def _answer_reload(self, _request: web.Request) -> web.Response:
        if not self._config.web.enable_lifecycle:
            return web.Response(status=403, text="Lifecycle API is not enabled (--web.enable-lifecycle).\n")
        problems = await self.reload()
        if problems:
            told = "".join(f"  {line}\n" for line in problems)
            return web.Response(status=500, text=f"failed to reload the configuration:\n{told}")
        return web.Response()

    def _view(self) -> View:
        now, wall = time.monotonic(), time.time()
        several = self._fleet.several
        targets = tuple(
            TargetView(
                one.url,
                one.reading,
                one.timeline,
                one.target.name if several else "",
                one.target.labels if several else (),
            )
            for one in self._fleet
        )
        return View(
            now,
            wall,
            targets,
            own_lines(PollCounts.total(one.counts for one in self._fleet), self._process.collect(), wall),
        )

    def _tables(self) -> Tables:
        watched = list(self._fleet)
        counts = [one.counts for one in watched]
        return (METRICS, [one.collector for one in watched]), (EXPORTER_METRICS, [self._own, *counts])


async def _keep_settled(fleet: Fleet) -> None:
    """Spare the garbage collector the sight of what stays.

    What is remembered of hundreds of targets is a quarter of a million objects, and a look at all of them is
    a pause of 0.2 s for every poll. Once no target came or went for a while they are looked at one last time
    and then set aside, until that changes.
    """
    seen, settled = -1, False
    try:
        while True:
            await asyncio.sleep(_SETTLED_SECONDS)
            if fleet.changes != seen:
                seen, settled = fleet.changes, False
                gc.unfreeze()
            elif not settled and len(fleet) >= _MANY:
                settled = True
                gc.collect()
                gc.freeze()
    finally:
        gc.unfreeze()


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])  # to await it would take our own being cancelled for its
        if not task.cancelled():
            task.result()


async def run(config: Config, load: Callable[[], Config] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the configuration.

    Args:
        config: what to do.
        load: reads the configuration anew.

    Raises:
        OSError: the address cannot be listened on.
    """
    sidecar = Sidecar(config, load)  # it may read files: until it is made a signal ends the process at once
    stopped = stop_signal()
    reloads = _Reloads(sidecar)
    try:
        await sidecar.start()
        reloads.begin()
        log.info("stopping signal=%s", await stopped)
    finally:
        reloads.close()
        await sidecar.stop()


class _Reloads:
    """Reloads at each SIGHUP; those that come while one is under way, or before the start, are one more."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._due.set)

    def begin(self) -> None:
        """Obey, from now on."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            await self._sidecar.reload()

    def close(self) -> None:
        """Reload no more."""
        if self._task is not None:
            self._task.cancel()
