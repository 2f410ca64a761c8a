"""``demo``: a simulated vLLM, or a recorded one served as if it were live, and the exporter that polls it."""

import argparse
import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from exporter.analysis.catalogue import Severity
from exporter.analysis.pipeline import TargetReading
from exporter.commands._options import add_for
from exporter.commands._outcome import ExitStatus
from exporter.commands._timeline import describe_poll
from exporter.config import Config, TargetConfig, WebConfig, add_flags
from exporter.publish.status import verdicts
from exporter.runtime import process
from exporter.runtime.sidecar import Sidecar
from exporter.standin.metrics_page import VERSIONS
from exporter.standin.recording_loop import BUNDLED_FACTS, RecordedServer
from exporter.standin.scenarios import RECORDED, SCENARIOS, Scenario
from exporter.standin.server import FakeServer

__all__ = ["add_arguments", "run", "show"]

_ADDRESSES: Final = """\
  vLLM's metrics   {url}
  the exporter     {base}/
  for Prometheus   {base}/metrics
  as JSON          {base}/api/v1/status
  what each fix would do   {base}/api/v1/whatif"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [--scenario NAME] [OPTION ...]"
    parser.add_argument(
        "--scenario",
        choices=(*SCENARIOS, RECORDED),
        default="day",
        metavar="NAME",
        help=f"{', '.join(SCENARIOS)}, or {RECORDED}: a real vLLM with too small a KV cache",
    )
    add_for(parser)
    add_flags(parser, ("web.listen_address", "poll.interval", "log.level"))


def run(options: argparse.Namespace, config: Config) -> int:
    """Run the demo until SIGINT or SIGTERM, or for some seconds."""
    logging.getLogger().setLevel(logging.WARNING)  # the terminal is for the demo's own lines
    write = partial(print, flush=True)
    process.run(show(config, write, scenario=options.scenario, seconds=options.seconds))
    return ExitStatus.OK


async def show(
    config: Config, write: Callable[[str], None], *, scenario: str = "day", seconds: float | None
) -> None:
    """Start the stand-in and an exporter that polls it, and write a line per second.

    Args:
        config: its targets are ignored. Where the default port is taken, any free one is used.
        write: prints text.
        scenario: a name of `SCENARIOS`, or `RECORDED`.
        seconds: the length of the demo, None for until a signal.
    """
    stopped = process.stop_signal()
    story = SCENARIOS.get(scenario)
    server, target, about = _stand_in(scenario, story)
    url = f"{await server.start()}/metrics"
    targets = (replace(target, url=url),)
    sidecar: Sidecar | None = None
    try:
        sidecar, base = await _start(replace(config, targets=targets, targets_dns=(), targets_file_sd=()))
        for line in (*about[:-1], _ADDRESSES.format(url=url, base=base), f"{about[-1]} Ctrl-C ends it.\n"):
            write(line)
        await _follow(sidecar, story, write, stopped, seconds)
    finally:
        if sidecar is not None:
            await sidecar.stop()
        await server.stop()


def _stand_in(
    name: str, story: Scenario | None
) -> tuple[FakeServer | RecordedServer, TargetConfig, tuple[str, ...]]:
    """Return the server of a scenario, its target in the configuration, and lines that describe it."""
    if story is None:
        recorded = RecordedServer()
        about = (
            f"A recorded vLLM 0.28 with too small a KV cache: {recorded.loop.seconds:.0f} s in a loop.",
            "Watch running fall and waiting rise before the preemption counter moves.",
        )
        return recorded, TargetConfig(facts=BUNDLED_FACTS), about
    server = FakeServer(name, host="127.0.0.1", port=0, version=VERSIONS[-1], model="simulated-8b", seed=1)
    acts = (f"  {act.seconds:4.0f} s  {act.name}: {act.about}" for act in story.acts if len(story.acts) > 1)
    return (
        server,
        TargetConfig(),  # the server exposes its settings
        (
            f"A simulated vLLM, without a GPU or a model: {story.about}.",
            *acts,
            "Watch the verdict at the end of each line and on the page follow the story.",
        ),
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
    story: Scenario | None,
    write: Callable[[str], None],
    stopped: asyncio.Future[str],
    seconds: float | None,
) -> None:
    """Write a line per second, and one at the start of each act, until a signal or the end of the time."""
    start = process.SYSTEM.monotonic()
    end = math.inf if seconds is None else start + seconds
    due, current = start, ""
    while not stopped.done() and due < end:
        due = min(due + 1.0, end)
        await asyncio.wait({stopped}, timeout=max(0.0, due - process.SYSTEM.monotonic()))
        if sidecar.reading is None or stopped.done():
            continue
        passed = process.SYSTEM.monotonic() - start
        act = story.act_at(passed) if story is not None else None
        if act is not None and act.name != current:
            current = act.name
            write(f"--- {act.name}: {act.about}")
        write(f"{describe_poll(passed, sidecar.reading)}  {_verdict(sidecar.reading)}")


def _verdict(reading: TargetReading) -> str:
    """Return the worst verdict and all findings."""
    severity, verdict = max(verdicts(reading))
    words = [verdict if severity is Severity.NONE else f"{verdict} ({severity.value})"]
    words += [finding for engine in reading.engines.values() for finding in engine.findings]
    words += [finding for model in reading.models.values() for finding in model.findings]
    return ", ".join(dict.fromkeys(words))
