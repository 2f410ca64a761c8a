"""Measures the cost of one target with 1 to 16 data-parallel engines: a poll here, and ``serve`` at 1 Hz.

The bodies come from a recorded server of one engine; its series are repeated for each engine.
"""

import asyncio
import functools
import time

from bench import Row
from bench.reader import micro, recorded
from bench.serve import SECONDS, WARM_UP, started
from bench.served import serving
from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig

ENGINES = (1, 2, 4, 8, 16)
MOST = max(ENGINES)


@functools.cache
def bodies(engines: int) -> list[bytes]:
    """Return the recording, for a number of engines."""
    return [_multiplied(body, engines) for body in recorded()]


def _multiplied(body: bytes, engines: int) -> bytes:
    lines = []
    for line in body.splitlines(keepends=True):
        copies = engines if b'engine="0"' in line and not line.startswith(b"#") else 1
        lines += [line.replace(b'engine="0"', b'engine="%d"' % engine) for engine in range(copies)]
    return b"".join(lines)


def _polls(engines: int) -> list[float]:
    """Return the seconds of each poll through the recording, from the body to the advice."""
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
    seconds = []
    for number, body in enumerate(bodies(engines)):
        start = time.perf_counter()
        reading = pipeline.feed(float(number), body)
        seconds.append(time.perf_counter() - start)
        assert len(reading.engines) == engines
    return seconds


async def _served(engines: int) -> tuple[float, float]:
    """Return the share of a core, and resident memory in MiB, of a process that watches such a server."""
    async with serving(bodies(engines)) as vllm:
        serve = ("-m", "exporter", "serve", "--target.url", vllm.url, "--web.listen-address", "127.0.0.1:0")
        with started(*serve) as process:
            await asyncio.sleep(WARM_UP)
            before, start = process.cpu_seconds(), time.monotonic()
            await asyncio.sleep(SECONDS / 2)
            return (process.cpu_seconds() - before) / (time.monotonic() - start), process.memory()[0]


def run() -> list[Row]:
    """Measure every number of engines, then the process with the fewest and the most."""
    rows, medians = [], {}
    for engines in ENGINES:
        size = len(bodies(engines)[0]) / 1000
        rows.append(Row.of(f"a poll, {_count(engines)}, body of {size:.0f} kB", micro(_polls(engines)), "us"))
        medians[engines] = rows[-1].figure
    rows.append(Row("each further engine", (medians[MOST] - medians[1]) / (MOST - 1), "us"))
    for engines in (1, MOST):
        share, memory = asyncio.run(_served(engines))
        name = f"serve, {_count(engines)}"
        rows += [
            Row(f"{name}: share of a core at 1 Hz", 100 * share, "%"),
            Row(f"{name}: resident memory", memory, "MiB"),
        ]
    return rows


def _count(engines: int) -> str:
    return f"{engines} engine{'s' if engines > 1 else ''}"
