"""How signals end a process, before, while and after an event loop runs."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator

__all__ = ["ignore_signals", "signals_at_start", "stop_signal"]


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
    handlers = {signal.SIGTERM: _exit, signal.SIGHUP: _do_nothing}
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


def _exit(_number: int, _frame: object) -> None:
    os._exit(0)


def _do_nothing(_number: int, _frame: object) -> None:
    pass
