"""Another configuration without a restart: read again at SIGHUP or by HTTP, and handed to its users."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from aiohttp import web

from exporter.config import Config, ConfigError

__all__ = ["PATH", "Reloader", "User"]

log = logging.getLogger(__name__)

PATH: Final = "/-/reload"


class User(NamedTuple):
    """Fields of `Config`, and a function that gets the new configuration when one of them has changed."""

    sections: tuple[str, ...]
    use: Callable[[Config], Awaitable[None]]


class Reloader:
    """Reads the configuration again; an invalid one changes nothing."""

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config] | None,
        users: Sequence[User],
        on_reload: Callable[[bool], None],
    ) -> None:
        """Prepare; without `load` nothing is ever reloaded, `on_reload` gets the success of each reload."""
        self.config = config  # the one in use
        # Which part uses which section, in the order in which they get a new configuration.
        self.users = users
        # Set to request a reload from `run`; requests that arrive during a reload cause one more.
        self.due = asyncio.Event()
        self._load = load
        self._on_reload = on_reload
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[tuple[str, ...]] | None = None

    async def reload(self) -> tuple[str, ...]:
        """Read the configuration and go on with it; return its problems, none if it is in use now."""
        async with self._lock:
            if self._load is None:
                return ("there is nothing to reload",)
            self._task = asyncio.create_task(self._read(self._load))
            await asyncio.wait([self._task])
            return ("the exporter is stopping",) if self._task.cancelled() else self._task.result()

    async def answer(self, _request: web.Request) -> web.Response:
        """Answer one request for a reload."""
        if not self.config.web.enable_lifecycle:
            return web.Response(status=403, text="Lifecycle API is not enabled (--web.enable-lifecycle).\n")
        problems = await self.reload()
        if problems:
            lines = "".join(f"  {problem}\n" for problem in problems)
            return web.Response(status=500, text=f"failed to reload the configuration:\n{lines}")
        return web.Response()

    async def run(self) -> None:
        """Reload whenever that is due, until cancelled."""
        while True:
            await self.due.wait()
            self.due.clear()
            await self.reload()

    async def stop(self) -> None:
        """Reload no more; a reload under way is cancelled, for it may hang while it reads."""
        self._load = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _read(self, load: Callable[[], Config]) -> tuple[str, ...]:
        try:
            config = await asyncio.get_running_loop().run_in_executor(None, load)
        except ConfigError as problem:
            self._on_reload(False)
            problems = "; ".join(problem.problems)
            log.error("invalid configuration, keeping the previous one problems=%r", problems)  # noqa: TRY400
            return problem.problems
        before, self.config = self.config, config
        for user in self.users:
            if any(getattr(config, section) != getattr(before, section) for section in user.sections):
                await user.use(config)
        self._on_reload(True)
        return ()
