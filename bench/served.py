"""Serves recorded bodies in this process: every scrape gets the next one."""

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

__all__ = ["Served", "serving"]


class Served:
    """A server of recorded bodies.

    Attributes:
        url: of its metrics.
        polls: the number of requests.
    """

    def __init__(self, bodies: Sequence[bytes]) -> None:
        self.url = ""
        self.polls = 0
        self._bodies = itertools.cycle(bodies)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Return the next body."""
        self.polls += 1
        return web.Response(body=next(self._bodies), headers={"Content-Type": "text/plain; version=0.0.4"})


@asynccontextmanager
async def serving(bodies: Sequence[bytes]) -> AsyncIterator[Served]:
    """Serve bodies in a circle, on loopback."""
    served = Served(bodies)
    app = web.Application()
    app.router.add_get("/metrics", served.metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    try:
        yield served
    finally:
        await runner.cleanup()
