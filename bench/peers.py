"""Compares the sidecar with its peers: all poll a recorded server that gets into a storm, once per second.

The peers are Debian's Prometheus in agent mode, vmagent, and a loop of requests and prometheus-client's
parser. All poll the same server for the same minute, so that a busy machine slows all. One poll is measured
separately, in turns with the bare GET of the same body, through the whole recording once: repeated, the
recording would be a server that restarts all the time. Programs that are not installed have no row.
``BENCH_SECONDS=10`` measures for a shorter time.
"""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from bench import Row
from bench.reader import micro, ratios, recorded
from bench.serve import BARE, Process, started
from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig, PollConfig, TargetConfig
from exporter.vllm.client import MetricsClient

SECONDS = float(os.environ.get("BENCH_SECONDS", "60"))
WARM_UP = 8.0  # Go's heap settles
SLICES = 10

LOOP = """\
import sys, time, requests
from prometheus_client.parser import text_string_to_metric_families
print("serving url=none", file=sys.stderr, flush=True)
session, due = requests.Session(), time.monotonic()
while True:
    for family in text_string_to_metric_families(session.get(sys.argv[1], timeout=3).text):
        for sample in family.samples:
            pass
    due += 1.0
    time.sleep(max(0.0, due - time.monotonic()))
"""
SCRAPE = """\
scrape_configs:
  - {job_name: vllm, scrape_interval: 1s, scrape_timeout: 1s, static_configs: [{targets: ['%s']}]}
"""


async def _serve() -> None:
    """Serve the recording, one body after another, then the last one; accept remote writes."""
    bodies = itertools.cycle(recorded())
    body = b""

    async def metrics(_request: web.Request) -> web.Response:
        nonlocal body
        body = next(bodies)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def again(_request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def write(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=204)

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.get("/metrics", metrics), web.get("/again", again), web.post("/write", write)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps(runner.addresses[0][1]), flush=True)
    await asyncio.Event().wait()


@contextmanager
def served() -> Iterator[int]:
    """Start a process that serves; yields its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.peers"], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def running(program: str, *arguments: str) -> Iterator[Process]:
    """Start a peer."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([program, *arguments], stdout=log, stderr=log)
        try:
            time.sleep(2.0)
            log.seek(0)
            assert process.poll() is None, log.read().decode()[-2000:]
            yield Process(process.pid, "")
        finally:
            process.kill()
            process.wait()


def agent(folder: Path, port: int) -> tuple[str, ...] | None:
    """Start Debian's Prometheus as an agent."""
    program = shutil.which("prometheus")
    if program is None:
        return None
    config = folder / "agent.yml"
    config.write_text(
        SCRAPE % f"127.0.0.1:{port}" + f"remote_write: [{{url: 'http://127.0.0.1:{port}/write'}}]\n"
    )
    return (
        program, "--enable-feature=agent", f"--config.file={config}",
        f"--storage.agent.path={folder / 'agent'}", "--web.listen-address=127.0.0.1:0", "--log.level=error",
    )  # fmt: skip


def vmagent(folder: Path, port: int) -> tuple[str, ...] | None:
    """Start VictoriaMetrics' agent."""
    program = shutil.which("vmagent")
    if program is None:
        return None
    config = folder / "vmagent.yml"
    config.write_text(SCRAPE % f"127.0.0.1:{port}")
    return (
        program, f"-promscrape.config={config}", f"-remoteWrite.url=http://127.0.0.1:{port}/write",
        f"-remoteWrite.tmpDataPath={folder / 'vmagent'}", "-httpListenAddr=127.0.0.1:0", "-loggerLevel=ERROR",
    )  # fmt: skip


def _side_by_side(port: int) -> list[Row]:
    url = f"http://127.0.0.1:{port}/metrics"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        serve = ("-m", "exporter", "serve", "--target.url", url, "--web.listen-address", "127.0.0.1:0")
        processes = {
            "this exporter": stack.enter_context(started(*serve)),
            "a bare aiohttp process": stack.enter_context(started("-c", BARE, url)),
            "requests and prometheus-client": stack.enter_context(started("-c", LOOP, url)),
        }
        for what, command in (("Debian's Prometheus agent", agent), ("vmagent", vmagent)):
            arguments = command(folder, port)
            if arguments is None:
                print(f"{what} is not installed: no row", file=sys.stderr)
            else:
                processes[what] = stack.enter_context(running(*arguments))
        time.sleep(WARM_UP)
        shares: dict[str, list[float]] = {what: [] for what in processes}
        for _ in range(SLICES):
            start, before = time.monotonic(), {what: one.cpu_seconds() for what, one in processes.items()}
            time.sleep(SECONDS / SLICES)
            seconds = time.monotonic() - start
            for what, one in processes.items():
                shares[what].append((one.cpu_seconds() - before[what]) / seconds)
        memory = {what: one.memory()[0] for what, one in processes.items()}
    return _compared(shares, memory)


def _compared(shares: dict[str, list[float]], memory: dict[str, float]) -> list[Row]:
    """Return the costs of each program, and ours / theirs over all slices, with their spread."""
    rows = []
    for what, share in shares.items():
        rows.append(Row.of(f"CPU seconds per hour, {what}", [3600 * one for one in share], "s"))
        rows.append(Row(f"resident memory, {what}", memory[what], "MiB"))
    ours = shares["this exporter"]
    for what, bar in (
        ("Debian's Prometheus agent", 0.25), ("vmagent", 1.5), ("requests and prometheus-client", None),
    ):  # fmt: skip
        if what in shares:
            slices = Row.of("", ratios(ours, shares[what]), "x")
            whole = sum(ours) / sum(shares[what])
            rows.append(Row(f"CPU over {what}", whole, "x", bar, "at most", slices.low, slices.high))
    return rows


async def _polls(port: int) -> list[Row]:
    """Measure one poll from the request to the advice, in turns with the bare GET."""
    client = MetricsClient(TargetConfig(url=f"http://127.0.0.1:{port}/metrics"), PollConfig())
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
    whole, fetched, bare = [], [], []
    async with aiohttp.ClientSession() as session:
        for number in range(len(recorded())):
            start = time.perf_counter()
            answer = await client.fetch()
            half = time.perf_counter()
            pipeline.feed(float(number), answer.body, answer.error)
            end = time.perf_counter()
            whole.append(end - start)
            fetched.append(half - start)
            assert answer.error is None, answer
            start = time.perf_counter()
            async with session.get(f"http://127.0.0.1:{port}/again") as response:
                same = await response.read()
            bare.append(time.perf_counter() - start)
            assert same == answer.body
    await client.close()
    return [
        Row.of("the bare GET with aiohttp", micro(bare), "us"),
        Row.of("our GET", micro(fetched), "us"),
        Row.of("one poll, from request to advice", micro(whole), "us"),
        Row.of("one poll over the bare GET, in turns", ratios(whole, bare), "x", 1.8, "at most"),
    ]


def run() -> list[Row]:
    """Measure one poll, then all programs side by side."""
    with served() as port:
        return asyncio.run(_polls(port)) + _side_by_side(port)


if __name__ == "__main__":
    asyncio.run(_serve())
