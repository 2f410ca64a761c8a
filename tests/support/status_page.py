"""The real web server with the status page of a test's readings.

with Shown(max_num_seqs=64) as shown:
    shown.play(stage.play(60, running=14, waiting=6, kv=0.98, preemptions=1.5))
    text = shown.get("/")
"""

import asyncio
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.conditions import Evidence
from exporter.analysis.fixes import Advice, FixAdvice, RejectedFix
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.verdicts import Judgement
from exporter.publish.page.renderer import Page
from exporter.publish.page.timeline import Timeline
from exporter.publish.page.view import TargetView, View
from exporter.publish.web.app import WebServer, make_app
from support.metrics_text import scrape_of

URL = "http://vllm:8000/metrics"
WALL = 1_750_000_000.0  # 15:06:40 UTC at the clock's zero
PATIENCE = 60.0


def wearing(reading: TargetReading, verdict: str) -> TargetReading:
    """Return the reading with another verdict of its engines, and that verdict's whole catalogue entry."""
    entry = catalogue.load().verdicts[verdict]
    severity = Severity.CRITICAL if verdict == "preemption_thrash" else entry.severity
    evidence = (Evidence("preemptions_per_second", 1.5), Evidence("kv_usage_max_ratio", 0.98, 0.9))
    fixes = tuple(FixAdvice(name, flag=catalogue.load().fixes[name].flag_with(None)) for name in entry.fixes)
    advised = Advice(fixes, tuple(RejectedFix(*pair) for pair in entry.not_help.items()))
    engines = {
        key: replace(
            engine,
            judgement=Judgement(verdict, severity, evidence, reading.t - 60),
            advice=advised,
        )
        for key, engine in reading.engines.items()
    }
    return replace(reading, engines=engines)


def several(targets: Mapping[str, Sequence[TargetReading]]) -> View:
    """Return the view of several targets by name, a moment after the last of their readings."""
    now = max(readings[-1].t for readings in targets.values() if readings) + 0.2
    views = []
    for name, readings in targets.items():
        timeline = Timeline()
        for reading in readings:
            timeline.add(reading)
        last = readings[-1] if readings else None
        views.append(TargetView(f"http://{name}/metrics", last, timeline, name, (("pod", name),)))
    return View(now, WALL + now, views, {})


class Shown:
    """A web server in a thread, until the end of the block.

    Attributes:
        reading: the last one.
        late: seconds since that reading.
        base: its URL.
    """

    def __init__(self, url: str = URL, own: dict[str, str] | None = None) -> None:
        self.reading: TargetReading | None = None
        self.late = 0.2
        self.base = ""
        self.timeline = Timeline()
        self.page = Page(self.view, lambda: self._shows)
        self._url, self._own = url, own or {}
        self._several: View | None = None
        self._shows = 0.0  # each show is far later than the one before: the cache keeps no response that long
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server = WebServer(make_app(scrape_of(), dict, self.page), "127.0.0.1", 0)

    def view(self) -> View:
        """Return the view that the page renders."""
        if self._several is not None:
            return self._several
        now = self.late if self.reading is None else self.reading.t + self.late
        return View(now, WALL + now, (TargetView(self._url, self.reading, self.timeline),), self._own)

    def show(self, reading: TargetReading | None, *, late: float = 0.2) -> None:
        """Show a reading as the last one, without adding it to the charts."""
        self._between_answers(self._set, reading, late)

    def show_several(self, view: View) -> None:
        """Show several targets instead of the one."""
        self._between_answers(self._set_several, view)

    def play(self, readings: Iterable[TargetReading]) -> None:
        """Add readings one by one, as a poller does."""
        self._between_answers(self._add, list(readings))

    def _between_answers(self, change: Callable[..., None], *arguments: Any) -> None:
        """Change what is shown on the server's own loop.

        A change in the middle of a rendering would make an old page look as if it had taken 1,000 s to
        render: the cache would then serve it until the end of the test.
        """

        async def apply() -> None:
            change(*arguments)
            self._shows += 1000.0

        asyncio.run_coroutine_threadsafe(apply(), self._loop).result(PATIENCE)

    def _set(self, reading: TargetReading | None, late: float) -> None:
        self.reading, self.late = reading, late

    def _set_several(self, view: View) -> None:
        self._several = view

    def _add(self, readings: Sequence[TargetReading]) -> None:
        for reading in readings:
            self.timeline.add(reading)
        self._set(readings[-1], 0.2)

    def get(self, path: str) -> str:
        """Return the server's response."""
        with urllib.request.urlopen(self.base + path, timeout=PATIENCE) as answer:
            return answer.read().decode()

    def stop(self) -> None:
        """Stop the server."""
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(PATIENCE)

    def __enter__(self) -> Self:
        self._thread.start()
        self.base = asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()
