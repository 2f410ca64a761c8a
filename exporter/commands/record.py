"""``record``: save a server's responses to a file, with the poller of ``serve``."""

import argparse
import asyncio
import contextlib
import logging
import secrets
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from exporter.analysis.pipeline import Pipeline
from exporter.commands._options import ACCESS_LOG, POLLING, add_for, add_url, only_target
from exporter.commands._outcome import CommandError, ExitStatus, reason
from exporter.commands._progress import StatusLine
from exporter.config import Config, add_flags
from exporter.runtime import process
from exporter.runtime.pace import Pace
from exporter.runtime.poller import PollOutcome, Watcher
from exporter.vllm import prober
from exporter.vllm.anonymise import anonymise, anonymise_probes
from exporter.vllm.client import MetricsClient
from exporter.vllm.recording import Header, Poll, Writer

__all__ = ["add_arguments", "run"]

T = TypeVar("T")

_EXISTS: Final = "{} exists; choose another file or --force"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [URL] -o FILE [OPTION ...]"
    parser.epilog = ACCESS_LOG
    add_url(parser)
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="file to write, .jsonl or .jsonl.gz"
    )
    add_for(parser)
    parser.add_argument(
        "--anonymise",
        action="store_true",
        help="keep only vLLM's own words and numbers; hash all other label values",
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_flags(parser, POLLING)


def run(options: argparse.Namespace, config: Config) -> int:
    """Record until SIGINT or SIGTERM, or for some seconds. What was written stays if the file fails."""
    only_target(config, "record")
    path: Path = options.output
    progress = StatusLine()
    if progress.terminal:
        logging.getLogger().setLevel(logging.ERROR)  # the status line has all of it
    if path.exists() and not options.force:  # before the server is polled
        raise CommandError(_EXISTS.format(path))
    try:
        polls, failed = process.run(_record(options, config, progress))
    except FileExistsError:
        raise CommandError(_EXISTS.format(path)) from None
    except OSError as problem:  # the file's: those of the server are recorded
        progress.end()
        raise CommandError(f"cannot write {path}: {reason(problem, with_file=False)}") from problem
    progress.end()
    print(f"{path}: {polls} polls, {failed} failed", file=sys.stderr)
    return ExitStatus.OK if polls > failed else ExitStatus.FAILED


@dataclass
class _Recorder:
    """Writes each poll and counts all (`polls`), and those without a body (`failed`).

    `broken` fails with the file's error once it cannot be written.
    """

    _writer: Writer
    _progress: Callable[[str], None]
    _salt: bytes | None
    broken: asyncio.Future[None]
    _origin: float | None = None
    polls: int = 0
    failed: int = 0

    def note(self, outcome: PollOutcome) -> None:
        """Write the response of one poll."""
        if self.broken.done():
            return
        answer, reading, body = outcome.answer, outcome.reading, outcome.answer.body
        self._origin = reading.t if self._origin is None else self._origin
        t = round(reading.t - self._origin, 3)
        if body is not None and self._salt is not None:
            body = anonymise(body, salt=self._salt)
        try:
            self._writer.write(Poll(t, body, answer.error, answer.content_type))
        except OSError as problem:
            self.broken.set_exception(problem)
            return
        self.polls += 1
        self.failed += body is None
        engines = f"{len(reading.engines)} engine{'s' if len(reading.engines) != 1 else ''}"
        last = reading.error or f"{len(body or b'')} bytes, {engines}"
        self._progress(f"{t:8.1f}s  {self.polls} polls, {self.failed} failed  last: {last}")


async def _record(
    options: argparse.Namespace, config: Config, progress: Callable[[str], None]
) -> tuple[int, int]:
    """Record; returns the number of polls, and of those that failed."""
    path, target = options.output, config.targets[0]
    stopped = process.stop_signal()
    client, patient = MetricsClient(target, config.poll), prober.patient_client(target, config.poll)
    try:
        probes = await _run_until(prober.header_of(client, patient), stopped) or {}
        name, arguments = path.name.partition(".jsonl")[0], config.engine.args or {}
        if options.anonymise:
            probes = anonymise_probes(probes)
        header = Header(name, config.poll.interval, dict(target.facts), probes, arguments)
        with contextlib.closing(Writer(path, header, force=options.force)) as writer:
            salt = secrets.token_bytes(8) if options.anonymise else None
            recorder = _Recorder(writer, progress, salt, asyncio.get_running_loop().create_future())
            pipeline = Pipeline(config.analysis, target.facts, config.poll.interval)
            watcher = Watcher(client, pipeline, Pace(config.poll.interval), recorder.note)
            await _run_until(watcher.run(), stopped, recorder.broken, seconds=options.seconds)
            if recorder.broken.done():
                recorder.broken.result()
    finally:
        await client.close()
        await patient.close()
    return recorder.polls, recorder.failed


async def _run_until(
    work: Coroutine[Any, Any, T], *ends: asyncio.Future[Any], seconds: float | None = None
) -> T | None:
    """Return the result of `work`; None when one of `ends` is done first, or the time is over."""
    task = asyncio.create_task(work)
    await asyncio.wait({task, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None
