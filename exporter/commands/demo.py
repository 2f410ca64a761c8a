"""``demo``: a simulated vLLM, or a recorded one served as if it were live, and the exporter that polls it."""

import argparse
import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from aiohttp import web

from exporter.analysis.catalogue import Severity
from exporter.analysis.pipeline import TargetReading
from exporter.commands._options import add_for
from exporter.commands._outcome import OK
from exporter.commands._timeline import describe_poll
from exporter.config import Config, Fact, TargetConfig, WebConfig, add_flags
from exporter.runtime import loop
from exporter.runtime.sidecar import Sidecar
from exporter.runtime.signals import stop_signal
from exporter.standin.metrics_page import VERSIONS
from exporter.standin.recording_loop import RecordingLoop, bundled_polls
from exporter.standin.scenarios import RECORDED, SCENARIOS
from exporter.standin.server import FakeServer
from exporter.standin.site import Site

__all__ = ["add_arguments", "run", "show"]

# Settings of the recorded server, which its metrics do not expose.
_RECORDED_FACTS: Final = {"max_num_seqs": 32, "max_model_len": 2048}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [--scenario NAME] [OPTION ...]"
    parser.add_argument(
        "--scenario",
        choices=(*SCENARIOS, RECORDED),
        default="day",
        metavar="NAME",
        help=f"{', '.join(SCENARIOS)}, or {RECORDED}: a real vLLM with too small a KV cache (default: day)",
    )
    add_for(parser)
    add_flags(parser)


def run(options: argparse.Namespace, config: Config) -> int:
    """Run the demo until SIGINT or SIGTERM, or for some seconds.

    Raises:
        OSError: the configured address cannot be listened on.
    """
    logging.getLogger().setLevel(logging.WARNING)  # the terminal is for the demo's own lines
    write = partial(print, flush=True)
    loop.run(show(config, write, scenario=options.scenario, seconds=options.seconds))
    return OK


async def show(
    config: Config, write: Callable[[str], None], *, scenario: str = "day", seconds: float | None
) -> None:
    """Start the stand-in and an exporter that polls it, and write a line per second.

    Args:
        config: its targets are ignored. Where the default port is taken, any free one is used.
        write: prints a line.
        scenario: a name of `SCENARIOS`, or `RECORDED`.
        seconds: the length of the demo, None for until a signal.

    Raises:
        OSError: the configured address cannot be listened on.
    """
    stopped = stop_signal()
    story: _Story = _Recorded() if scenario == RECORDED else _Simulated(scenario)
    url = await story.start()
    sidecar: Sidecar | None = None
    try:
        targets = (TargetConfig(url=url, facts=story.facts),)
        config = replace(config, targets=targets, targets_dns=(), targets_file_sd=())
        sidecar, base = await _start(config)
        for line in (*story.about, *_addresses(url, base), f"{story.watch} Ctrl-C ends it.\n"):
            write(line)
        await _follow(sidecar, story, write, stopped, seconds)
    finally:
        if sidecar is not None:
            await sidecar.stop()
        await story.stop()


class _Story(Protocol):
    """The server that the exporter polls in the demo.

    Attributes:
        facts: settings of the server that it does not expose itself.
        about, watch: lines that describe it, and the sentence that says what to watch for.
    """

    facts: Mapping[str, Fact]
    about: tuple[str, ...]
    watch: str

    async def start(self) -> str:
        """Serve, and return the URL of the metrics."""

    async def stop(self) -> None:
        """Stop serving."""

    def news(self, seconds: float) -> str | None:
        """Return a line about the act that starts now, if one does."""


class _Recorded:
    """The bundled recording in a loop."""

    def __init__(self) -> None:
        self._loop = RecordingLoop(bundled_polls())
        self._site = Site()
        self.facts: Mapping[str, Fact] = _RECORDED_FACTS
        self.about: tuple[str, ...] = (
            f"A recorded vLLM 0.28 with too small a KV cache: {self._loop.seconds:.0f} s in a loop.",
        )
        self.watch = "Watch running fall and waiting rise before the preemption counter moves."

    async def start(self) -> str:
        start = time.monotonic()

        async def metrics(_request: web.Request) -> web.Response:
            body = self._loop.at(time.monotonic() - start)
            return web.Response(body=body, headers={"Content-Type": "text/plain"})

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        await self._site.open(app)
        return f"{self._site.url}/metrics"

    async def stop(self) -> None:
        await self._site.close()

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
        self.facts: Mapping[str, Fact] = {}  # the server exposes them
        acts = self._scenario.acts
        self.about: tuple[str, ...] = (
            f"A simulated vLLM, without a GPU or a model: {self._scenario.about}.",
            *(f"  {act.seconds:4.0f} s  {act.name}: {act.about}" for act in acts if len(acts) > 1),
        )
        self.watch = "Watch the verdict at the end of each line and on the page follow the story."

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


async def _start(config: Config) -> tuple[Sidecar, str]:
    """Start the exporter; returns it and its base URL."""
    sidecar = Sidecar(config)
    try:
        return sidecar, await sidecar.start()
    except OSError:
        if config.web != WebConfig():
            raise
    sidecar = Sidecar(replace(config, web=WebConfig(listen_address="127.0.0.1:0")))
    return sidecar, await sidecar.start()


async def _follow(
    sidecar: Sidecar,
    story: _Story,
    write: Callable[[str], None],
    stopped: asyncio.Future[str],
    seconds: float | None,
) -> None:
    """Write a status line per second, until a signal or the end of the time."""
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
                write(news)
            write(f"{describe_poll(passed, sidecar.reading)}  {_verdict(sidecar.reading)}")


def _verdict(reading: TargetReading) -> str:
    """Return the worst verdict and all findings."""
    judgements = [(reading.judgement.severity, reading.judgement.verdict)]
    judgements += [(each.judgement.severity, each.judgement.verdict) for each in reading.engines.values()]
    severity, verdict = max(judgements)
    words = [verdict if severity is Severity.NONE else f"{verdict} ({severity.value})"]
    findings = [engine.findings for engine in reading.engines.values()]
    findings += [model.findings for model in reading.models.values()]
    words += dict.fromkeys(finding for several in findings for finding in several)
    return ", ".join(words)
