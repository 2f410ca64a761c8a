"""``demo``: a recorded vLLM, served as if it were live, and the exporter on it."""

import asyncio
import math
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Final

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from exporter.config import Config, TargetConfig, WebConfig
from exporter.recording import Poll, read
from exporter.replay import as_text
from exporter.serve import Sidecar, signalled

__all__ = ["Loop", "bundled", "run"]

_RECORDING: Final = "exhaustion.jsonl.gz"
_MAX_MODEL_LEN: Final = 2048
_MAX_NUM_SEQS: Final = 32


def bundled() -> Sequence[Poll]:
    """The polls of the bundled recording: a real vLLM 0.28 whose KV cache is too small for its load."""
    with resources.as_file(resources.files("exporter") / "data" / _RECORDING) as path:
        return [item for item in read(Path(path)) if isinstance(item, Poll)]


class Loop:
    """A recording without an end: its bodies again and again, with counters that go on rising."""

    def __init__(self, polls: Sequence[Poll]) -> None:
        """Prepare.

        Args:
            polls: in time order; those that failed are left out.
        """
        good = [(poll.t - polls[0].t, poll.body) for poll in polls if poll.body is not None]
        self._times = [t for t, _ in good]
        self._bodies = [body for _, body in good]
        self._gains = _gains(self._bodies[0], self._bodies[-1])
        self.seconds = self._times[-1]

    def at(self, seconds: float) -> bytes:
        """The body at a time since the beginning."""
        rounds, within = divmod(seconds, self.seconds)
        body = self._bodies[bisect_right(self._times, within) - 1]
        return self._raised(body, int(rounds)) if rounds else body

    def _raised(self, body: bytes, rounds: int) -> bytes:
        """Add to every counter what it gained in the rounds before."""
        lines = body.split(b"\n")
        for index, line in enumerate(lines):
            series, _, value = line.rpartition(b" ")
            gain = self._gains.get(series)
            if gain:
                lines[index] = b"%s %r" % (series, float(value) + rounds * gain)
        return b"\n".join(lines)


def _gains(first: bytes, last: bytes) -> Mapping[bytes, float]:
    """What each counting series gained from the first body to the last, by its text."""
    counting = {
        sample.name
        for family in text_string_to_metric_families(first.decode())
        if family.type in ("counter", "histogram", "summary")
        for sample in family.samples
    }
    before, after = _series(first, counting), _series(last, counting)
    return {series: value - before.get(series, 0.0) for series, value in after.items()}


def _series(body: bytes, names: set[str]) -> dict[bytes, float]:
    values = {}
    for line in body.split(b"\n"):
        series, _, value = line.rpartition(b" ")
        if series and series.partition(b"{")[0].decode() in names and not line.startswith(b"#"):
            values[series] = float(value)
    return values


async def _serve(loop: Loop) -> tuple[web.AppRunner, str]:
    start = time.monotonic()

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=loop.at(time.monotonic() - start), headers={"Content-Type": "text/plain"})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    return runner, f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"


async def run(config: Config, say: Callable[[str], None], *, seconds: float | None) -> None:
    """Run the demo until SIGINT or SIGTERM, or for some seconds.

    Args:
        config: whose listen address and pace count. Where the default port is taken any free one is used.
        say: gets a line of text for the terminal.
        seconds: how long, None for until it is stopped.

    Raises:
        OSError: the address cannot be listened on.
    """
    stopped = signalled()
    loop = Loop(bundled())
    server, url = await _serve(loop)
    sidecar: Sidecar | None = None
    try:
        facts = {"max_num_seqs": _MAX_NUM_SEQS, "max_model_len": _MAX_MODEL_LEN}
        sidecar, base = await _start(replace(config, targets=(TargetConfig(url=url, facts=facts),)))
        for line in _introduction(loop, url, base):
            say(line)
        await _show(sidecar, say, stopped, seconds)
    finally:
        if sidecar is not None:
            await sidecar.stop()
        await server.cleanup()


def _introduction(loop: Loop, url: str, base: str) -> tuple[str, ...]:
    return (
        f"A recorded vLLM 0.28 with too small a KV cache, {loop.seconds:.0f} s, again and again:",
        f"  vLLM's metrics   {url}",
        f"  the exporter     {base}/",
        f"  for Prometheus   {base}/metrics",
        f"  as JSON          {base}/api/v1/status",
        "Watch running fall and waiting rise before the counter of preemptions moves. Ctrl-C ends it.\n",
    )


async def _show(
    sidecar: Sidecar, say: Callable[[str], None], stopped: asyncio.Future[str], seconds: float | None
) -> None:
    """A status line per second, until the signal or the end of the time."""
    start = time.monotonic()
    end = math.inf if seconds is None else start + seconds
    due = start
    while not stopped.done() and due < end:
        due = min(due + 1.0, end)
        await asyncio.wait({stopped}, timeout=max(0.0, due - time.monotonic()))
        if sidecar.reading is not None and not stopped.done():
            say(as_text(time.monotonic() - start, sidecar.reading))


async def _start(config: Config) -> tuple[Sidecar, str]:
    sidecar = Sidecar(config)
    try:
        return sidecar, await sidecar.start()
    except OSError:
        if config.web != WebConfig():
            raise
    sidecar = Sidecar(replace(config, web=WebConfig(listen_address="127.0.0.1:0")))
    return sidecar, await sidecar.start()
