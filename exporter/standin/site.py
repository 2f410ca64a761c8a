"""A web server on one port of this machine, for servers that stand in for vLLM."""

import socket

from aiohttp import web

__all__ = ["Site"]


class Site:
    """Serves an application on one port; can be closed and opened again on the same port."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Prepare; port 0 is any free one."""
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None

    @property
    def is_open(self) -> bool:
        """Whether it listens."""
        return self._runner is not None

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://{self._host}:{self._port}"

    async def open(self, app: web.Application) -> None:
        """Listen.

        Raises:
            OSError: the port cannot be listened on.
        """
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            listener = socket.create_server((self._host, self._port))
        except OSError:
            await runner.cleanup()
            raise
        self._port = listener.getsockname()[1]
        await web.SockSite(runner, listener).start()
        self._runner = runner

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
