"""Measures the cost of polling for the server: CPU of its process, and lateness of its tokens.

The server is a process like vLLM's API server: it renders as many series with prometheus-client, and a
ticker on the same event loop represents the stream of tokens. It is polled once per second, every five
seconds, and not at all, in turns. ``BENCH_SECONDS=10`` measures each for a shorter time.
"""

import asyncio
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bench import Row
from bench.serve import Process
from exporter.config import PollConfig, TargetConfig
from exporter.vllm.client import MetricsClient

BODY = Path(__file__).parent.parent / "tests" / "expositions" / "0.26.0.txt.gz"
SECONDS = min(20.0, float(os.environ.get("BENCH_SECONDS", "20")))
TICK = 0.01  # one token for each of several requests
RATES = {"none": 0.0, "0.2 Hz": 5.0, "1 Hz": 1.0}


class _Families:
    """The families of a recorded body, rendered again at each scrape."""

    def __init__(self) -> None:
        self._families = list(text_string_to_metric_families(gzip.decompress(BODY.read_bytes()).decode()))

    def collect(self) -> list[Metric]:
        """Yield all families."""
        return self._families


async def _serve() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families())
    late: list[float] = []

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain"})

    async def lateness(_request: web.Request) -> web.Response:
        delays, late[:] = sorted(late), []
        return web.json_response(delays)

    async def ticker() -> None:
        due = time.perf_counter()
        for number in itertools.count(1):
            await asyncio.sleep(due + number * TICK - time.perf_counter())
            late.append(time.perf_counter() - due - number * TICK)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/late", lateness)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await ticker()


async def _polled(process: Process, port: int, every: float) -> tuple[float, list[float]]:
    """Return the share of a core and the lateness of ticks at a poll interval."""
    client = MetricsClient(TargetConfig(url=f"http://127.0.0.1:{port}/metrics"), PollConfig())
    await client.get_json("/late")
    before, start = process.cpu_seconds(), time.monotonic()
    end = start + SECONDS
    while time.monotonic() < end:
        if every:
            assert (await client.fetch()).error is None
        await asyncio.sleep(min(every or 1.0, max(0.0, end - time.monotonic())))
    cpu = (process.cpu_seconds() - before) / (time.monotonic() - start)
    late = (await client.get_json("/late")).value
    await client.close()
    return cpu, late


def run() -> list[Row]:
    """Measure each poll interval twice, in turns."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.server_cost"], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    try:
        port = json.loads(process.stdout.readline())
        cpu: dict[str, list[float]] = {name: [] for name in RATES}
        late: dict[str, list[float]] = {name: [] for name in RATES}
        for name, every in [*RATES.items(), *reversed(RATES.items())]:
            share, ticks = asyncio.run(_polled(Process(process.pid, ""), port, every))
            cpu[name].append(share)
            late[name] += ticks
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    rows = []
    for name in RATES:
        rows.append(Row(f"server's share of a core, polled {name}", 100 * statistics.mean(cpu[name]), "%"))
        ticks = sorted(late[name])
        rows.append(Row(f"token delay, polled {name}, median", 1000 * statistics.median(ticks), "ms"))
        rows.append(Row(f"token delay, polled {name}, p99", 1000 * ticks[int(0.99 * len(ticks))], "ms"))
        rows.append(Row(f"token delay, polled {name}, worst", 1000 * ticks[-1], "ms"))
    more = statistics.mean(cpu["1 Hz"]) - statistics.mean(cpu["none"])
    rows.append(Row("server's CPU time per poll", 1000 * more, "ms"))
    return rows


if __name__ == "__main__":
    asyncio.run(_serve())
