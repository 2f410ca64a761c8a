"""The fleet as the web server shows it: as JSON, as the status page, as metrics."""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any

from prometheus_client import ProcessCollector

from exporter import __version__
from exporter.publish.metrics.scrape import Tables
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS
from exporter.publish.page.renderer import own_lines
from exporter.publish.page.view import TargetView, View
from exporter.publish.status import status_object
from exporter.runtime.clocks import Clocks
from exporter.runtime.fleet import Fleet, Watched

__all__ = ["FleetViews"]


class FleetViews:
    """Builds each view from the latest readings, on request."""

    def __init__(self, fleet: Fleet, own: ExporterMetrics, process: ProcessCollector, clocks: Clocks) -> None:
        self._fleet = fleet
        self._own = own
        self._process = process
        self._clocks = clocks

    def status(self, name: str | None = None) -> Mapping[str, Any] | Coroutine[Any, Any, bytes]:
        """The state for the API: an object, or the making of a text if there are many targets.

        Args:
            name: of the one target wanted, None for all.
        """
        if self._fleet.several:
            return self._status_text(name)
        return _document([self._status_of(watched) for watched in self._fleet])

    def status_of_one(self, name: str | None = None) -> Mapping[str, Any]:
        """The state with one target in it.

        Raises:
            LookupError: no target has this name, or there are several and none was named.
        """
        for watched in self._fleet:
            if not self._fleet.several or watched.target.name == name:
                return _document([self._status_of(watched)])
        raise LookupError(f"expected ?target=HOST:PORT, one of {len(self._fleet)} targets")

    def page(self) -> View:
        """The state for the status page."""
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
        now, wall = self._clocks.monotonic(), self._clocks.wall()
        polls = PollCounts.total(watched.counts for watched in self._fleet)
        return View(now, wall, targets, own_lines(polls, self._process.collect(), wall))

    def tables(self) -> Tables:
        """The collectors for a scrape."""
        watched = list(self._fleet)
        counts = [one.counts for one in watched]
        return (METRICS, [one.collector for one in watched]), (EXPORTER_METRICS, [self._own, *counts])

    async def _status_text(self, name: str | None) -> bytes:
        """The state as JSON, made target by target: polls run in between."""
        targets = []
        for watched in self._fleet:
            if name in (None, watched.target.name):
                targets.append(json.dumps(self._status_of(watched)))
                await asyncio.sleep(0)
        return f'{{"version": {json.dumps(__version__)}, "targets": [{", ".join(targets)}]}}'.encode()

    def _status_of(self, watched: Watched) -> Mapping[str, Any]:
        target, among = watched.target, {}
        if self._fleet.several:
            among = {"target": target.name, "labels": dict(target.labels), "source": target.source}
        now = self._clocks.monotonic()
        return status_object(watched.url, watched.reading, now, watched.pipeline.loads(), among=among)


def _document(targets: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {"version": __version__, "targets": targets}
