"""``python -m dashboards.render [NAME ...]``: takes pictures of the dashboards for ``docs/pictures``.

A real Prometheus holds half an hour of a fleet with one server in a preemption storm
(``tests/support/dashboard_scenes.py``); Grafana's own front-end packages draw it in a headless Chromium. The
first run installs the packages.
"""

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web
from playwright.async_api import Browser, TimeoutError, async_playwright  # noqa: A004
from yarl import URL

from bench.png import shrink
from bench.screenshots import MOST_BYTES, PICTURES

HERE: Final = Path(__file__).parent
DASHBOARDS: Final = HERE.parent
ROOT: Final = DASHBOARDS.parent
sys.path[:0] = [str(ROOT / "tests")]

from support.dashboard_files import every_panel  # noqa: E402
from support.dashboard_prometheus import prometheus_of  # noqa: E402
from support.dashboard_scenes import SCRAPE, SECONDS, STORM, fleet  # noqa: E402

# 02:59:20 UTC: all pictures show the same time, and no label is at their edge.
END: Final = 1_767_236_360
BEGIN: Final = END - (SECONDS - SCRAPE) - 4  # the last scrape is some seconds ago
SHOWN: Final = 29 * 60  # seconds; earlier there are no rates yet
WIDTH: Final = 1400
# Taller than any dashboard: Grafana draws again what grows.
TALL: Final = 6000
ROW_MARGIN: Final = 8
PATIENCE: Final = 90_000  # ms; usually it takes five seconds
PROGRAMS: Final = {
    "node": "Node.js 18 or newer (Debian: nodejs)",
    "npm": "npm, which comes with Node.js (Debian: npm)",
    "chromium": "Chromium (Debian: chromium)",
    "prometheus": "Prometheus (Debian: prometheus)",
    "promtool": "promtool, which comes with Prometheus (Debian: prometheus)",
}


class FailedError(Exception):
    """No pictures can be taken; the text says what to do."""


@dataclass(frozen=True)
class Look:
    """The part of a dashboard that a picture shows.

    Attributes:
        until: the first row that the picture leaves out; all rows are drawn and checked.
        chosen: values of its variables; the others are All.
    """

    until: str
    chosen: Mapping[str, str] = field(default_factory=dict)


LOOKS: Final = {
    "engine": Look("User impact: who feels it?", STORM),
    "fleet": Look("Capacity left"),
    "exporter": Look("Targets and configuration"),
}


def main() -> int:
    """Take the pictures; return 1 if a picture cannot be taken or lacks something."""
    names = sys.argv[1:] or list(LOOKS)
    try:
        _check(names)
        _install()
        _build()
        print("generating half an hour of the fleet's metrics", flush=True)
        with tempfile.TemporaryDirectory() as folder, prometheus_of(fleet(), BEGIN, Path(folder)) as base:
            wrong = asyncio.run(_pictures(names, base))
    except FailedError as failure:
        print(f"dashboards.render: {failure}", file=sys.stderr)
        return 1
    for problem in wrong:
        print(f"dashboards.render: {problem}", file=sys.stderr)
    return 1 if wrong else 0


def _check(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in LOOKS]
    if unknown:
        raise FailedError(f"no such dashboard: {', '.join(unknown)}; there are {', '.join(LOOKS)}")
    missing = [needed for program, needed in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        raise FailedError("not installed: " + "; ".join(missing))


# The page.


def _install() -> None:
    """Install the locked packages into ``node_modules``, once per version of the lock file."""
    lock = (HERE / "package-lock.json").read_bytes()
    stamp = HERE / "node_modules" / ".locked"
    if stamp.is_file() and stamp.read_bytes() == lock:
        return
    print("installing Grafana's packages from npm (about 450 MB, once)", flush=True)
    _run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    stamp.write_bytes(lock)


def _build() -> None:
    print("building the page", flush=True)
    _run("node", "build.mjs")


def _run(*command: str) -> None:
    words = [shutil.which(command[0]), *command[1:]]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=False)  # noqa: S603 # ours
    if done.returncode:
        raise FailedError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


@contextlib.asynccontextmanager
async def _served(prometheus: str) -> AsyncIterator[str]:
    """Serve the page, the dashboards and Prometheus' API under one URL on loopback; yields it."""
    async with aiohttp.ClientSession() as session:

        async def dashboard(request: web.Request) -> web.FileResponse:
            return web.FileResponse(DASHBOARDS / f"{request.match_info['name']}.json")

        async def forwarded(request: web.Request) -> web.Response:
            async with session.get(URL(prometheus + request.raw_path, encoded=True)) as answer:
                return web.json_response(body=await answer.read(), status=answer.status)

        application = web.Application()
        application.router.add_get("/dashboards/{name}.json", dashboard)
        application.router.add_get("/api/{path:.*}", forwarded)
        application.router.add_static("/", HERE / "dist")
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


# The pictures.


async def _pictures(names: Sequence[str], prometheus: str) -> list[str]:
    """Take the pictures one after the other; return their problems."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    async with _served(prometheus) as address, async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],
        )
        for name in names:
            wrong += [f"{name}: {problem}" for problem in await _picture(browser, address, name)]
        await browser.close()
    return wrong


async def _picture(browser: Browser, address: str, name: str) -> list[str]:
    """Take one picture and save it; return its problems."""
    look = LOOKS[name]
    page = await browser.new_page(viewport={"width": WIDTH, "height": TALL}, timezone_id="UTC")
    await page.goto(f"{address}/index.html?{_query(name, look)}")
    try:
        await page.wait_for_function("window.report?.settled()", timeout=PATIENCE)
    except TimeoutError as error:
        waiting = await page.evaluate("window.report?.pending().join(', ')")
        raise FailedError(f"{name}: no answer after {PATIENCE / 1000:g} s: {waiting}") from error
    report = await page.evaluate("report.summary()")
    if report["problems"]:  # drawing failed
        return list(report["problems"])
    below = await page.get_by_text(look.until, exact=True).bounding_box()
    height = round(below["y"]) - ROW_MARGIN
    png = await page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
    await page.close()
    path = PICTURES / f"dashboard-{name}.png"
    path.write_bytes(shrink(png))
    size = path.stat().st_size
    print(
        f"{path.relative_to(ROOT)}: {size / 1024:.0f} KiB, {WIDTH} x {height}; {_counts(report)}", flush=True
    )
    return [*_wrong(name, report), *([f"{size} bytes, limit {MOST_BYTES}"] if size > MOST_BYTES else [])]


def _counts(report: Mapping[str, Any]) -> str:
    queries = report["asked"]
    counts = {
        "panels": len(report["panels"]),
        "queries": len(queries),
        "series": sum(query["series"] for query in queries),
        "errors": sum("error" in query for query in queries),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def _query(name: str, look: Look) -> str:
    view = {
        "dashboard": f"/dashboards/{name}.json",
        "from": _moment(END - SHOWN),
        "to": _moment(END),
        "scrape": SCRAPE,
    }
    return urllib.parse.urlencode(view | {f"var-{label}": value for label, value in look.chosen.items()})


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _wrong(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield panels without data or drawing, and failed queries."""
    for one in report["asked"]:
        if "error" in one:
            yield f"{one['owner']}: query {one['refId']}: {one['error']}: {one['expr']}"
    shown = {panel["title"]: panel for panel in report["panels"]}
    for title in (panel["title"] for panel in every_panel(name)):
        if title not in shown or not shown[title]["drawn"]:
            yield f"{title}: not drawn"
        elif shown[title]["empty"]:
            yield f"{title}: no data"


if __name__ == "__main__":
    sys.exit(main())
