"""A status page in a real Chromium: open it, wait for it, check it."""

import contextlib
import functools
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from playwright.sync_api import Browser, Page

from exporter.analysis import catalogue
from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.config import AnalysisConfig
from exporter.vllm.recording import read
from support.scenes import Stage
from support.status_page import wearing

_CASES = Path(__file__).parent.parent / "cases"
CACHE = {"kv_cache_size_tokens": 100_000, "block_size": 16, "cache_dtype": "auto"}
PHONE = {
    "viewport": {"width": 360, "height": 740},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}
PATIENCE = 60_000  # milliseconds; as for every wait, far more than a starved machine needs
HIDDEN_PAUSE = 30_000  # milliseconds between two requests of a hidden tab
_AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
# Records the page's pauses between requests: a new pause means that the last response was processed.
_RECORD_PAUSES = """
  const set = window.setTimeout;
  window.pauses = [];
  window.setTimeout = (action, pause, ...more) => {
    if (action.name === "turn") window.pauses.push(pause);
    return set(action, pause, ...more);
  };
"""


@contextlib.contextmanager
def opened(
    browser: Browser,
    base: str,
    path: str = "/",
    *,
    wanted: str = ".chart > svg .curve",
    clock: bool = False,
    **how: Any,
) -> Iterator[Page]:
    """Open a page and wait until it is drawn with its history.

    At the end the console must be empty, and no request may have left the host. With `clock` the test can
    advance the page's time, which also passes normally.
    """
    context = browser.new_context(**how)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    if clock:
        page.clock.install()
    page.add_init_script(_RECORD_PAUSES)
    seen = SimpleNamespace(console=[], requests=[], lost=False)
    page.on("console", lambda message: seen.console.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda problem: seen.console.append(f"error: {problem}"))
    page.on("request", lambda request: seen.requests.append(request.url))
    try:
        page.goto(base + path)
        page.wait_for_selector(wanted, state="attached")
        if how.get("java_script_enabled", True):
            wait_for_pauses(page, 1)
        page.seen = seen
        yield page
        assert all(url.startswith(f"{base}/") for url in seen.requests), seen.requests
        if not seen.lost:  # Chromium itself logs failed requests
            assert not seen.console
    finally:
        context.close()


def wait_for_pauses(page: Page, count: int, least: int = 0) -> None:
    """Wait until the page has made a number of pauses of at least some milliseconds."""
    page.wait_for_function(
        "([count, least]) => pauses.filter((pause) => pause >= least).length >= count", arg=[count, least]
    )


def hide(page: Page, hidden: bool) -> None:
    """Hide the page's tab behind others, or bring it back to the front."""
    page.evaluate(
        """hidden => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def lose(page: Page) -> None:
    """Let every request of the page fail."""
    page.seen.lost = True
    page.route("**/*", lambda route: route.abort())


def complaints(page: Page) -> list[str]:
    """Return the faults that the accessibility checker finds, in short."""
    page.evaluate(_AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
        for one in found["violations"]
    ]


def open_details(page: Page) -> None:
    """Open everything that can be opened."""
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")


def overhang(page: Page) -> int:
    """Return how many pixels wider than the window the page is."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def storm() -> Stage:
    """Play a calm that turns into a storm, after a restart."""
    stage = Stage(cache=CACHE, max_num_seqs=64, max_model_len=4096)
    stage.play(60, running=20, kv=0.5, tokens=600, finished=1)
    stage.restart()
    stage.play(120, running=20, kv=0.5, tokens=600, finished=1)
    stage.play(60, running=14, waiting=6, kv=0.98, tokens=250, finished=0.3, preemptions=1.5)
    return stage


@functools.cache
def by_verdict() -> dict[str, tuple[TargetReading, ...]]:
    """Return the polls up to the first one with each verdict.

    They come from a field case where one has the verdict; otherwise a calm engine is given it.
    """
    found: dict[str, tuple[TargetReading, ...]] = {}
    for path in sorted(_CASES.glob("*.jsonl.gz")):
        header, *polls = read(path)
        pipeline = Pipeline(AnalysisConfig(), header.config, header.interval)
        readings = []
        for poll in polls:
            readings.append(pipeline.feed(poll.t - polls[0].t, poll.body, poll.error))
            judged = [readings[-1].judgement, *(one.judgement for one in readings[-1].engines.values())]
            for judgement in judged:
                found.setdefault(judgement.verdict, tuple(readings))
    calm = Stage(cache=CACHE).play(30, running=4, kv=0.4, tokens=100, finished=1)
    names = catalogue.load().verdicts
    return {name: found.get(name) or (*calm, wearing(calm[-1], name)) for name in names}
