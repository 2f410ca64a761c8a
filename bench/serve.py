"""Measures CPU and memory of ``serve`` at one poll per second, in a separate process.

A bare process runs at the same time: the same libraries (aiohttp's client and server, prometheus-client), the
same polls of the same body, the same scrapes, and no work with the responses. ``BENCH_SECONDS=10`` measures
for less than a minute.
"""

import asyncio
import compileall
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

import exporter
from bench import Row
from bench.reader import storm
from bench.served import serving

SECONDS = float(os.environ.get("BENCH_SECONDS", "60"))
WARM_UP = 3.0  # do not count imports and the first polls
SCRAPE_EVERY = 5.0
MEBI = 1 << 20
PACKAGE = Path(exporter.__file__).parent

BARE = """\
import asyncio, sys, time, aiohttp, prometheus_client
from aiohttp import web

async def main(url):
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    async def metrics(request):
        return web.Response(body=prometheus_client.generate_latest(registry))
    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print("serving url=http://127.0.0.1:%d" % runner.addresses[0][1], file=sys.stderr, flush=True)
    async with aiohttp.ClientSession() as session:
        due = time.monotonic()
        while True:
            async with session.get(url) as answer:
                await answer.read()
            due += 1.0
            await asyncio.sleep(due - time.monotonic())

asyncio.run(main(sys.argv[1]))
"""


class Process:
    """A process under measurement."""

    def __init__(self, pid: int, url: str) -> None:
        self.url = url
        self._folder = Path(f"/proc/{pid}")

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads, by the scheduler's own clock."""
        return sum(int(path.read_text().split()[0]) for path in self._folder.glob("task/*/schedstat")) / 1e9

    def memory(self) -> tuple[float, float]:
        """Return resident and proportional memory in MiB; shared pages count in part in the latter."""
        rollup = (self._folder / "smaps_rollup").read_text()
        rss, pss = (
            int(re.search(rf"^{name}: +(\d+) kB", rollup, re.MULTILINE)[1]) for name in ("Rss", "Pss")
        )
        return rss * 1024 / MEBI, pss * 1024 / MEBI


@contextmanager
def started(*arguments: str) -> Iterator[Process]:
    """Start a Python process that logs ``serving url=...``; ended with the block."""
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen([sys.executable, *arguments], stderr=log, stdout=log)
        try:
            deadline = time.monotonic() + 20
            while not (found := re.search(rb"serving url=(\S+)", _content(log))):
                assert time.monotonic() < deadline, _content(log).decode()
                time.sleep(0.05)
            yield Process(process.pid, found[1].decode())
        finally:
            process.kill()
            process.wait()


def _content(log) -> bytes:
    log.seek(0)
    return log.read()


async def _measure() -> list[Row]:
    async with serving(storm()) as vllm:
        serve = ("-m", "exporter", "serve", "--target.url", vllm.url, "--web.listen-address", "127.0.0.1:0")
        with started(*serve) as ours, started("-c", BARE, vllm.url) as bare:
            await _scrape(WARM_UP, ours, bare)
            before, vllm.polls = [one.cpu_seconds() for one in (ours, bare)], 0
            start = time.monotonic()
            await _scrape(SECONDS, ours, bare)
            seconds = time.monotonic() - start
            cpu = [one.cpu_seconds() - spent for one, spent in zip((ours, bare), before, strict=True)]
            assert vllm.polls >= 2 * (int(seconds) - 1), (
                f"wanted two polls a second, got {vllm.polls} in {seconds:.0f} s"
            )
            (rss, pss), (bare_rss, bare_pss) = ours.memory(), bare.memory()
    return [
        Row(f"share of a core at 1 Hz, over {seconds:.0f} s", 100 * cpu[0] / seconds, "%", 0.5, "at most"),
        Row("share of a core, bare process", 100 * cpu[1] / seconds, "%"),
        Row("resident memory", rss, "MiB"),
        Row("resident memory over the bare process", rss - bare_rss, "MiB", 7.0, "at most"),
        Row("proportional memory over the bare process", pss - bare_pss, "MiB", 7.0, "at most"),
    ]


async def _scrape(seconds: float, *processes: Process) -> None:
    """Wait for some seconds, with a scrape of each process now and then."""
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while (left := end - time.monotonic()) > 0:
            for process in processes:
                async with session.get(process.url + "/metrics") as answer:
                    await answer.read()
            await asyncio.sleep(min(SCRAPE_EVERY, left))


def run() -> list[Row]:
    """Run both processes at the same time, so that a busy machine slows both.

    The exporter is compiled before, as an installed one is: compiling at the start would use memory.
    """
    compileall.compile_dir(PACKAGE, quiet=2)
    return asyncio.run(_measure())
