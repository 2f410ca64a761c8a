"""A web server on one port of this machine, for servers that stand in for vLLM."""

import socket
from collections.abc import Callable, Mapping

from aiohttp import web

__all__ = ["Site"]


class Site:
    """Answers GET requests on one port; can be closed and opened again on the same port."""

    def __init__(
        self, responses: Mapping[str, Callable[[], web.Response]], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """Prepare: functions that return the response, by path; port 0 is any free one."""
        self._responses = responses
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None

    async def open(self) -> str:
        """Listen, unless it does already, and return the base URL; raises OSError if it cannot."""
        if self._runner is None:
            self._runner = await self._listen()
        return f"http://{self._host}:{self._port}"

    async def _listen(self) -> web.AppRunner:
        app = web.Application()
        for path in self._responses:
            app.router.add_get(path, self._respond)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            listener = socket.create_server((self._host, self._port))
        except OSError:
            await runner.cleanup()
            raise
        self._port = listener.getsockname()[1]
        await web.SockSite(runner, listener).start()
        return runner

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _respond(self, request: web.Request) -> web.Response:
        return self._responses[request.path]()
