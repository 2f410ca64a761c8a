"""``record``: keep what a server answers, with the same poller as ``serve``."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from exporter.config import Config
from exporter.pipeline import Pipeline
from exporter.recording import Header, Poll, Writer, anonymise
from exporter.serve import until_signal
from exporter.vllm.client import MetricsClient
from exporter.watch import Pace, PollOutcome, Watcher

__all__ = ["run"]


class _Recorder:
    """Writes each outcome and keeps count."""

    def __init__(self, writer: Writer, progress: Callable[[str], None], salt: bytes | None) -> None:
        self._writer = writer
        self._progress = progress
        self._salt = salt
        self._origin: float | None = None
        self.polls = 0
        self.failed = 0
        self.problem: OSError | None = None

    def note(self, outcome: PollOutcome) -> None:
        answer, t = outcome.answer, outcome.reading.t
        self._origin = t if self._origin is None else self._origin
        t = round(t - self._origin, 3)
        body = answer.body
        if body is not None and self._salt is not None:
            body = anonymise(body, salt=self._salt)
        try:
            self._writer.write(Poll(t, body, answer.error, answer.content_type))
        except OSError as problem:
            self.problem = problem
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
        OSError: the file cannot be written (any more); what was written before stays.
    """
    target = config.targets[0]
    header = Header(path.name.partition(".jsonl")[0], config.poll.interval, dict(target.facts), {})
    with contextlib.closing(Writer(path, header, force=force)) as writer:
        recorder = _Recorder(writer, progress, secrets.token_bytes(8) if anonymised else None)
        client = MetricsClient(target, config.poll)
        pipeline = Pipeline(config.analysis, target.facts, config.poll.interval)
        watcher = Watcher(client, pipeline, Pace(config.poll.interval), recorder.note)
        polling = asyncio.create_task(watcher.run())
        stopped = asyncio.create_task(until_signal())
        deadline = None if seconds is None else time.monotonic() + seconds
        while not stopped.done() and recorder.problem is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            await asyncio.wait({stopped}, timeout=min(0.2, left) if left is not None else 0.2)
        for task in (polling, stopped):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await client.close()
        if recorder.problem is not None:
            raise recorder.problem
    return recorder.polls, recorder.failed
