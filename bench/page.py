"""Measures the cost of ten open status pages, and the bytes of opening one.

A client requests what page.js requests: the page, its files and the history once, then the page at its own
interval. ``BENCH_SECONDS=10`` measures for less than a minute.
"""

import asyncio
import gzip
import re
import time

import aiohttp

from bench import Row
from bench.reader import storm
from bench.serve import SECONDS, WARM_UP, Process, started
from bench.served import serving

PAGES = 10
PACKED = {"Accept-Encoding": "gzip"}


async def _look(base: str, after: float, end: float) -> tuple[int, int]:
    """Open one page; returns the bytes of that and the number of updates."""
    async with aiohttp.ClientSession(base, auto_decompress=False, headers=PACKED) as client:

        async def get(path: str) -> bytes:
            async with client.get(path) as answer:
                assert answer.status == 200, path
                return await answer.read()

        await asyncio.sleep(after)
        first = await get("/")
        text = gzip.decompress(first).decode()
        version = re.search(r"page\.css\?v=(\w+)", text)[1]
        parts = [await get(f"/{name}?v={version}") for name in ("page.css", "page.js", "page.svg")]
        parts.append(await get("/api/v1/history?engine=0"))
        every = float(re.search(r'data-every="([\d.]+)"', text)[1])
        updates = 0
        while time.monotonic() + every < end:
            await asyncio.sleep(every)
            await get("/")
            updates += 1
        return sum(map(len, (first, *parts))), updates


async def _spent(process: Process, pages: int, seconds: float) -> tuple[float, list[tuple[int, int]]]:
    """Return the share of a core over some seconds with open pages, and each page's numbers."""
    before, start = process.cpu_seconds(), time.monotonic()
    looks = await asyncio.gather(
        *(_look(process.url, 2.0 * number / pages, start + seconds) for number in range(pages))
    )
    await asyncio.sleep(start + seconds - time.monotonic())
    return (process.cpu_seconds() - before) / (time.monotonic() - start), list(looks)


async def _measure() -> list[Row]:
    async with serving(storm()) as vllm:
        serve = ("-m", "exporter", "serve", "--target.url", vllm.url, "--web.listen-address", "127.0.0.1:0")
        with started(*serve) as process:
            await asyncio.sleep(WARM_UP)
            alone, _ = await _spent(process, 0, SECONDS / 2)
            watched, looks = await _spent(process, PAGES, SECONDS)
            again, _ = await _spent(process, 0, SECONDS / 2)
    updates = sum(times for _, times in looks)
    assert updates >= PAGES * (SECONDS / 2 - 3), f"expected an update every two seconds, got {updates} in all"
    return [
        Row(
            f"share of a core for {PAGES} open pages",
            100 * (watched - (alone + again) / 2),
            "%",
            2.0,
            "at most",
        ),
        Row("bytes to open a page", looks[0][0] / 1024, "KiB", 150.0, "at most"),
    ]


def run() -> list[Row]:
    """Measure the same process with and without open pages."""
    return asyncio.run(_measure())
