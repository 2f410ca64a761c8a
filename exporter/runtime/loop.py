"""An event loop that ends when its work has ended."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


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
