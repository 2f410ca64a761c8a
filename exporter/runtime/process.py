"""The process: its clocks, its event loop, how signals end it, and its limits."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from exporter.config import Config
    from exporter.runtime.fleet import Fleet

__all__ = [
    "SYSTEM", "Clocks", "freeze_settled", "ignore_signals", "raise_file_limit", "run", "signals_at_start",
    "stop_signal",
]  # fmt: skip

T = TypeVar("T")
# The connections of one target (for polls and for its configuration), and those of the exporter itself.
_FILES_PER_TARGET: Final = 2
_FILES_BESIDES: Final = 300
# With fewer targets than these the garbage collector's pauses are negligible.
_MANY: Final = 50
_SETTLED_SECONDS: Final = 2.0


class Clocks(NamedTuple):
    """Functions that return the time: monotonic seconds, and unix seconds."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


SYSTEM: Final = Clocks(time.monotonic, time.time)


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call in a thread that the end of the process does not wait for.

    asyncio looks names up in threads. A name server that does not answer blocks one for half a minute, and
    the usual executor would keep a stopped sidecar alive that long. aiohttp never looks the same name up
    twice at a time, so there are few threads.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            # A running future cannot be cancelled. Otherwise setting a result for a caller that gave up would
            # raise, and each late look-up would print a traceback.
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as problem:  # noqa: BLE001 (every error is the caller's)
                future.set_exception(problem)
            else:
                future.set_result(result)

        threading.Thread(target=call, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the threads alone."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a loop of its own and return its result."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(_DaemonThreads())
        return runner.run(work)


def stop_signal() -> asyncio.Future[str]:
    """Take SIGTERM and SIGINT over from the system, which would end the process.

    Returns:
        A future with the name of the first of them to arrive.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[str] = loop.create_future()

    def note(name: str) -> None:
        if not arrived.done():
            arrived.set_result(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note, number.name)
    return arrived


@contextlib.contextmanager
def signals_at_start() -> Iterator[None]:
    """Until a loop handles signals, SIGTERM exits with status 0 and SIGHUP does nothing.

    Loading all modules takes a while, in which a container may be stopped again or asked to reload a
    configuration that it has not read yet. Nothing is open by then, so nothing needs to be closed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Callable[..., None]] = {
        signal.SIGTERM: lambda *_: os._exit(0),
        signal.SIGHUP: lambda *_: None,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, before[number])


def ignore_signals() -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP, in a process that is about to end anyway."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def raise_file_limit(config: "Config") -> None:
    """Allow as many open files as several targets need; a limit of 1024 is usual."""
    wanted = _FILES_PER_TARGET * config.poll.max_targets + _FILES_BESIDES
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if config.is_single or now == resource.RLIM_INFINITY or now >= wanted:
        return
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def freeze_settled(fleet: "Fleet") -> None:
    """Keep long-lived objects out of the garbage collector's sight, until cancelled.

    Hundreds of targets are a quarter of a million remembered objects, and scanning them all pauses every poll
    by 0.2 s. Once no target came or went for a while they are scanned one last time and then set aside, until
    that changes.
    """
    changes, settled = -1, False
    try:
        while True:
            await asyncio.sleep(_SETTLED_SECONDS)
            if fleet.changes != changes:
                changes, settled = fleet.changes, False
                gc.unfreeze()
            elif not settled and len(fleet) >= _MANY:
                settled = True
                gc.collect()
                gc.freeze()
    finally:
        gc.unfreeze()
