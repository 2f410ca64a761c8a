"""``demo``: a simulated vLLM, or a recorded one served as if it were live, and the exporter on it."""

import asyncio
import math
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Final, Protocol

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from exporter.analysis.catalogue import Severity
from exporter.analysis.pipeline import TargetReading
from exporter.commands.replay import as_text
from exporter.config import Config, Fact, TargetConfig, WebConfig
from exporter.runtime.sidecar import Sidecar
from exporter.runtime.signals import stop_signal
from exporter.standin.metrics_page import VERSIONS
from exporter.standin.scenarios import RECORDED, SCENARIOS
from exporter.standin.server import FakeServer
from exporter.vllm.recording import Poll, read

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


async def run(
    config: Config, say: Callable[[str], None], *, scenario: str = "day", seconds: float | None
) -> None:
    """Run the demo until SIGINT or SIGTERM, or for some seconds.

    Args:
        config: whose listen address and pace count. Where the default port is taken any free one is used.
        say: gets a line of text for the terminal.
        scenario: a name of `SCENARIOS`, or `RECORDED`.
        seconds: how long, None for until it is stopped.

    Raises:
        OSError: the address cannot be listened on.
    """
    stopped = stop_signal()
    story: _Story = _Recorded() if scenario == RECORDED else _Simulated(scenario)
    url = await story.start()
    sidecar: Sidecar | None = None
    try:
        sidecar, base = await _start(replace(config, targets=(TargetConfig(url=url, facts=story.facts),)))
        for line in (*story.about, *_addresses(url, base), f"{story.watch} Ctrl-C ends it.\n"):
            say(line)
        await _show(sidecar, story, say, stopped, seconds)
    finally:
        if sidecar is not None:
            await sidecar.stop()
        await story.stop()


class _Story(Protocol):
    """What the exporter watches in the demo.

    Attributes:
        facts: what is known of the server that it does not tell itself.
        about, watch: what it is, and what to look at.
    """

    facts: Mapping[str, Fact]
    about: tuple[str, ...]
    watch: str

    async def start(self) -> str:
        """Serve, and return the URL of the metrics."""

    async def stop(self) -> None:
        """End it."""

    def news(self, seconds: float) -> str | None:
        """What begins now, if anything does."""


class _Recorded:
    """The bundled recording, again and again."""

    def __init__(self) -> None:
        self._loop = Loop(bundled())
        self._runner: web.AppRunner | None = None
        self.facts: Mapping[str, Fact] = {"max_num_seqs": _MAX_NUM_SEQS, "max_model_len": _MAX_MODEL_LEN}
        seconds = f"{self._loop.seconds:.0f} s"
        self.about: tuple[str, ...] = (
            f"A recorded vLLM 0.28 with too small a KV cache, {seconds}, again and again:",
        )
        self.watch = "Watch running fall and waiting rise before the counter of preemptions moves."

    async def start(self) -> str:
        self._runner, url = await _serve(self._loop)
        return url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def news(self, seconds: float) -> str | None:  # noqa: ARG002 (nothing changes)
        return None


class _Simulated:
    """A scenario of the simulator."""

    def __init__(self, name: str) -> None:
        self._scenario = SCENARIOS[name]
        self._server = FakeServer(
            name, host="127.0.0.1", port=0, version=VERSIONS[-1], model="simulated-8b", seed=1
        )
        self._act: str | None = None
        self.facts: Mapping[str, Fact] = {}  # the server tells them itself
        acts = self._scenario.acts
        self.about: tuple[str, ...] = (
            f"A simulated vLLM, no GPU and no model behind it: {self._scenario.about}.",
            *(f"  {act.seconds:4.0f} s  {act.name}: {act.about}" for act in acts if len(acts) > 1),
        )
        self.watch = "Watch the verdict at the end of each line follow the story, and the page with it."

    async def start(self) -> str:
        return f"{await self._server.start()}/metrics"

    async def stop(self) -> None:
        await self._server.stop()

    def news(self, seconds: float) -> str | None:
        act = self._scenario.act_at(seconds)
        if act.name == self._act:
            return None
        self._act = act.name
        return f"--- {act.name}: {act.about}"


def _addresses(url: str, base: str) -> tuple[str, ...]:
    return (
        f"  vLLM's metrics   {url}",
        f"  the exporter     {base}/",
        f"  for Prometheus   {base}/metrics",
        f"  as JSON          {base}/api/v1/status",
        f"  what each fix would do   {base}/api/v1/whatif",
    )


async def _show(
    sidecar: Sidecar,
    story: _Story,
    say: Callable[[str], None],
    stopped: asyncio.Future[str],
    seconds: float | None,
) -> None:
    """A status line per second, until the signal or the end of the time."""
    start = time.monotonic()
    end = math.inf if seconds is None else start + seconds
    due = start
    while not stopped.done() and due < end:
        due = min(due + 1.0, end)
        await asyncio.wait({stopped}, timeout=max(0.0, due - time.monotonic()))
        if sidecar.reading is not None and not stopped.done():
            passed = time.monotonic() - start
            news = story.news(passed)
            if news is not None:
                say(news)
            say(f"{as_text(passed, sidecar.reading)}  {_said(sidecar.reading)}")


def _said(reading: TargetReading) -> str:
    """The worst verdict, and findings that somebody should look at."""
    judged = [(reading.judgement.severity, reading.judgement.verdict)]
    judged += [(each.judgement.severity, each.judgement.verdict) for each in reading.engines.values()]
    severity, verdict = max(judged)
    words = [verdict if severity is Severity.NONE else f"{verdict} ({severity.value})"]
    found = [each.findings for each in reading.engines.values()]
    found += [each.findings for each in reading.models.values()]
    words += dict.fromkeys(word for each in found for word in each)
    return ", ".join(words)


async def _start(config: Config) -> tuple[Sidecar, str]:
    sidecar = Sidecar(config)
    try:
        return sidecar, await sidecar.start()
    except OSError:
        if config.web != WebConfig():
            raise
    sidecar = Sidecar(replace(config, web=WebConfig(listen_address="127.0.0.1:0")))
    return sidecar, await sidecar.start()
