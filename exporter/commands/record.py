"""``record``: keep what a server answers, with the same poller as ``serve``."""

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from exporter.analysis.pipeline import Pipeline
from exporter.config import Config
from exporter.runtime.poller import Pace, PollOutcome, Watcher
from exporter.runtime.signals import stop_signal
from exporter.vllm import prober
from exporter.vllm.client import MetricsClient
from exporter.vllm.recording import Header, Poll, Writer, anonymise

__all__ = ["run"]


class _Recorder:
    """Writes each outcome and keeps count.

    Attributes:
        broken: fails with the error of the file once it cannot be written any more.
    """

    def __init__(self, writer: Writer, progress: Callable[[str], None], salt: bytes | None) -> None:
        self._writer = writer
        self._progress = progress
        self._salt = salt
        self._origin: float | None = None
        self.polls = 0
        self.failed = 0
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(self, outcome: PollOutcome) -> None:
        if self.broken.done():
            return
        answer, t = outcome.answer, outcome.reading.t
        self._origin = t if self._origin is None else self._origin
        t = round(t - self._origin, 3)
        body = answer.body
        if body is not None and self._salt is not None:
            body = anonymise(body, salt=self._salt)
        try:
            self._writer.write(Poll(t, body, answer.error, answer.content_type))
        except OSError as problem:
            self.broken.set_exception(problem)
            return
        self.polls += 1
        self.failed += body is None
        engines = len(outcome.reading.engines)
        state = (
            outcome.reading.error
            or f"{len(body or b'')} bytes, {engines} engine{'s' if engines != 1 else ''}"
        )
        self._progress(f"{t:8.1f}s  {self.polls} polls, {self.failed} failed  last: {state}")


async def run(
    config: Config,
    path: Path,
    progress: Callable[[str], None],
    *,
    seconds: float | None,
    anonymised: bool,
    force: bool,
) -> tuple[int, int]:
    """Record until SIGINT or SIGTERM, or for some seconds.

    Args:
        config: whose target and pace count.
        path: of the file; gzipped when it ends in ``.gz``.
        progress: gets a line after every poll.
        seconds: how long, None for until it is stopped.
        anonymised: whether names of models and adapters are replaced by hashes.
        force: whether an existing file is overwritten.

    Returns:
        Polls recorded, and how many of them failed.

    Raises:
        FileExistsError: there is such a file, and `force` was not given.
        OSError: the file cannot be written (any more); what was written before stays.
    """
    if not force:
        _check_free(path)  # before anybody is asked anything
    stopped = stop_signal()
    target = config.targets[0]
    client = MetricsClient(target, config.poll)
    try:
        told = await _unless(stopped, prober.header_of(client)) or {}
        header = Header(path.name.partition(".jsonl")[0], config.poll.interval, dict(target.facts), told)
        with contextlib.closing(Writer(path, header, force=force)) as writer:
            recorder = _Recorder(writer, progress, secrets.token_bytes(8) if anonymised else None)
            pipeline = Pipeline(config.analysis, target.facts, config.poll.interval)
            watcher = Watcher(client, pipeline, Pace(config.poll.interval), recorder.note)
            polling = asyncio.create_task(watcher.run())
            await _first({stopped, recorder.broken}, seconds)
            await _cancelled(polling)
            if recorder.broken.done():
                recorder.broken.result()
    finally:
        await client.close()
    return recorder.polls, recorder.failed


def _check_free(path: Path) -> None:
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


async def _unless(
    stopped: asyncio.Future[str], work: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any] | None:
    """The result of some work, None when the command is stopped before."""
    task = asyncio.create_task(work)
    await _first({stopped, task})
    if task.done():
        return task.result()
    await _cancelled(task)
    return None


async def _first(futures: set[asyncio.Future[Any]], seconds: float | None = None) -> None:
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
