"""Measures how many targets one process watches: CPU, memory, lateness and scrapes at 1 to 500 targets, 1 Hz.

A separate process serves the targets with little work: prepared bytes, a minimal protocol. It records the
time of each request, so lateness is measured from outside. ``BENCH_TARGETS=100,500`` measures fewer sizes,
``BENCH_SECONDS=10`` for a shorter time than 20 seconds each.
"""

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from bench import Row
from bench.reader import storm
from bench.serve import started

SIZES = tuple(map(int, os.environ.get("BENCH_TARGETS", "1,10,50,100,200,500").split(",")))
SECONDS = min(20.0, float(os.environ.get("BENCH_SECONDS", "20")))
WARM_UP = 6.0  # imports, the first polls and probes
SCRAPE_EVERY = 5.0
# The pause between scrapes for the quantiles, after the CPU was measured. With a shorter one the scrapes
# would use the whole core.
SCRAPE_HARD = 0.5
# The bars: one core, one interval of lateness, and the 99th percentile of scrapes.
INTERVAL = 1.0
SLOWEST_SCRAPE_MS = {100: 300.0, 500: 1000.0}


class _Served(asyncio.Protocol):
    """One connection to one target."""

    def __init__(self, answers: Iterator[bytes], times: list[float]) -> None:
        self._answers = answers
        self._times = times
        self._left = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *requests, self._left = (self._left + data).split(b"\r\n\r\n")
        for request in requests:
            if request.startswith(b"GET /metrics"):
                self._times.append(time.monotonic())
                self._transport.write(next(self._answers))
            else:
                self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


async def _serve(number: int) -> None:
    """Serve a number of targets until the standard input has the time to judge from, then print the gaps."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n"
    answers = [head % len(body) + body for body in storm()]
    loop = asyncio.get_running_loop()
    times: list[list[float]] = [[] for _ in range(number)]
    ports = []
    for index in range(number):
        # Each starts elsewhere in the storm and continues from there, as counters do.
        own = itertools.cycle(answers[index % len(answers) :] + answers[: index % len(answers)])
        server = await loop.create_server(
            lambda own=own, index=index: _Served(own, times[index]), "127.0.0.1", 0
        )
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    since = float(await loop.run_in_executor(None, sys.stdin.readline))
    seen = [[t for t in of_one if t >= since] for of_one in times]
    gaps = [after - before for of_one in seen for before, after in itertools.pairwise(of_one)]
    print(json.dumps({"polls": sum(map(len, seen)), "gaps": gaps}), flush=True)


@contextmanager
def targets(number: int) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start a process that serves targets; yields it and their ports."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.scale", str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


async def _scrape(base: str, every: float, seconds: float) -> list[float]:
    """Scrape for some time; returns the seconds of each scrape."""
    took = []
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession(headers={"Accept-Encoding": "gzip"}, auto_decompress=False) as session:
        while (left := end - time.monotonic()) > 0:
            start = time.perf_counter()
            async with session.get(f"{base}/metrics") as answer:
                assert answer.status == 200
                await answer.read()
            took.append(time.perf_counter() - start)
            await asyncio.sleep(min(every, left))
    return took


def _measured(number: int) -> tuple[list[Row], float]:
    """Measure one size; returns its rows and the share of a core that it used."""
    with tempfile.TemporaryDirectory() as folder, targets(number) as (generator, ports):
        listed = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
        Path(folder, "targets.json").write_text(json.dumps(listed))
        config = Path(folder, "config.yaml")
        config.write_text("targets_file_sd: [{files: [targets.json]}]\n")
        arguments = ("serve", "--config.file", str(config), "--web.listen-address", "127.0.0.1:0")
        with started("-m", "exporter", *arguments) as ours:
            time.sleep(WARM_UP)
            before, start = ours.cpu_seconds(), time.monotonic()
            asyncio.run(_scrape(ours.url, SCRAPE_EVERY, 0.6 * SECONDS))
            cpu = (ours.cpu_seconds() - before) / (time.monotonic() - start)
            took = asyncio.run(_scrape(ours.url, SCRAPE_HARD, 0.4 * SECONDS))
            rss = ours.memory()[0]
            generator.stdin.write(b"%f\n" % start)
            generator.stdin.flush()
            seen = json.loads(generator.stdout.readline())
    late = max(seen["gaps"], default=float("nan")) - INTERVAL
    took.sort()
    slowest = took[min(len(took) - 1, int(0.99 * len(took)))]
    name = f"{number} targets: " if number > 1 else "1 target: "
    bar = 100.0 if number == max(SIZES) else None
    return [
        Row(f"{name}share of a core at 1 Hz", 100 * cpu, "%", bar, "at most"),
        Row(f"{name}resident memory", rss, "MiB"),
        Row(f"{name}worst lateness of a poll", 1000 * late, "ms", 1000 * INTERVAL, "at most"),
        Row(f"{name}a scrape, median", 1000 * statistics.median(took), "ms"),
        Row(f"{name}a scrape, p99", 1000 * slowest, "ms", SLOWEST_SCRAPE_MS.get(number), "at most"),
    ], cpu


def run() -> list[Row]:
    """Measure all sizes, one after the other."""
    rows, shares = [], {}
    for number in SIZES:
        found, shares[number] = _measured(number)
        rows += found
    if len(shares) > 1:
        fewest, most = min(shares), max(shares)
        slope = (shares[most] - shares[fewest]) / (most - fewest)
        rows.append(Row("each further target", 100 * slope, "%"))
        rows.append(Row("targets per core", (1 - shares[fewest]) / slope, ""))
    return rows


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
