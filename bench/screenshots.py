"""``python -m bench.screenshots``: takes the status page's picture for ``docs/pictures``.

It shows the page after ten minutes of a simulated vLLM whose load outgrows its KV cache. Needs Chromium.
``make screenshots`` takes it, and the dashboards' pictures (``dashboards/render``).
"""

import asyncio
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright
from prometheus_client import CollectorRegistry

from bench.png import shrink
from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig
from exporter.publish.metrics.scrape import Scrape
from exporter.publish.page.renderer import Page
from exporter.publish.page.timeline import Timeline
from exporter.publish.page.view import TargetView, View
from exporter.publish.web.app import WebServer, make_app
from exporter.standin.scenarios import SCENARIOS, Act, Scenario
from exporter.standin.server import Play

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
MOST_BYTES = 150_000
SERVER = SCENARIOS["storm"].acts[0].server
STORY = Scenario(
    "ten minutes that end badly",
    (
        Act("calm", "room for this load", 190, (1.1, 1.3), server=SERVER, down=0),
        Act("restart", "somebody restarts the server", 150, (1.2, 1.9), server=SERVER, down=14),
        Act("rising", "KV usage climbs", 110, (1.9, 4.2)),
        Act("storm", "more than the cache holds", 175, (4.9, 5.0)),
    ),
    {},
)
SECONDS = 600
WALL = 1_767_236_400.0  # 03:00:00 UTC
OWN = {
    "Polls": "600, 14 failed, 0 skipped",
    "Poll duration": "8.1 ms on average",
    "Last response": "47 KiB",
    "Poll interval": "1 s",
    "CPU": "0.4 % of a core since the start",
    "Memory": "44 MiB",
}


def last_view() -> View:
    """Return the view at the end of the story."""
    play = Play(STORY, "0.32.0", "demo-70b", seed=3, origin=WALL)
    pipeline = Pipeline(AnalysisConfig(), play.facts() | {"gpu_memory_gib": 80, "kv_cache_gib": 21}, 1.0)
    timeline = Timeline()
    for second in range(SECONDS):
        body = play.body(float(second))
        reading = pipeline.feed(float(second), body, None if body else "connection_refused")
        timeline.add(reading)
    target = TargetView("http://127.0.0.1:8000/metrics", reading, timeline)
    return View(SECONDS - 0.6, WALL + SECONDS - 0.6, (target,), OWN)


@contextmanager
def served(view: View) -> Iterator[str]:
    """Serve the page of a view; yields its address."""
    loop = asyncio.new_event_loop()
    page = Page(lambda: view, lambda: 0.0)
    server = WebServer(make_app(Scrape(tuple, CollectorRegistry()), dict, page), "127.0.0.1", 0)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)


def main() -> int:
    """Take the picture; returns 1 if it is too large for a repository."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / "status-page.png"
    with served(last_view()) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(f"{address}/")
        page.wait_for_selector(".chart > svg .curve", state="attached")
        path.write_bytes(shrink(page.screenshot()))
        browser.close()
    size = path.stat().st_size
    print(f"{path}: {size / 1024:.0f} KiB")
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
