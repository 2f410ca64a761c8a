"""Connections of the web server, bounded in number, in time and in what they may send ahead.

aiohttp limits a request's lines, not the time that they take to come: a client that sends half a request
waits for ever. Here every connection has a deadline at all times, and when too many are open the one that
has been idle for longest makes room for the next.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

__all__ = ["HANDSHAKE_SECONDS", "Connections"]

log = logging.getLogger(__name__)

# Some Prometheus servers, a page per person on call: two hundred are far more than ever look at one sidecar.
MOST_CONNECTIONS: Final = 200
# A request must be here whole in this time, and a TLS connection must be made.
REQUEST_SECONDS: Final = 10.0
HANDSHAKE_SECONDS: Final = 10.0
# An answer must be taken in this time.
ANSWER_SECONDS: Final = 30.0
# Longer than scrapes are apart, so that they find their connection open.
IDLE_SECONDS: Final = 130.0
# Sent ahead of what has been answered; no request here has a body.
MOST_UNREAD: Final = 1 << 16
_SWEEP_SECONDS: Final = 1.0

Protocols = Callable[[], asyncio.Protocol]


class Connections:
    """Makes the protocol of each connection, and ends those that hold the server up."""

    def __init__(
        self,
        protocols: Protocols,
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
        most: int = MOST_CONNECTIONS,
    ) -> None:
        """Begin with none.

        Args:
            protocols: makes what serves one connection.
            clock: monotonic seconds.
            most: so many at once.
        """
        self._protocols = protocols
        self._clock = clock
        self._most = most
        self._making: dict[_Connection, float] = {}
        self._open: dict[asyncio.Protocol, _Connection] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._full = False

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a connection that was just accepted."""
        now = self._clock()
        # A failed TLS handshake is told to nobody.
        late = now - HANDSHAKE_SECONDS - 1.0
        self._making = {one: since for one, since in self._making.items() if since > late}
        if len(self._making) + len(self._open) >= self._most and not self._make_room():
            return _Refused()
        made = _Connection(self, self._protocols(), self._clock)
        self._making[made] = now
        return made

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Notes when a request has come whole, and when its answer is made."""
        connection = self._open.get(request.protocol)
        if connection is None:
            return await handler(request)
        connection.busy = True
        connection.unread = 0
        try:
            return await handler(request)
        finally:
            connection.busy = False
            connection.served = True
            connection.since = self._clock()

    def finish(self) -> None:
        """Let every connection end after the answer that is under way."""
        for connection in list(self._open.values()):
            connection.finish()

    def close(self) -> None:
        """Look after no connection any more."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def opened(self, connection: "_Connection") -> None:
        """Take note of a connection."""
        self._making.pop(connection, None)
        self._open[connection.protocol] = connection
        if self._sweeper is None:
            self._sweep()

    def lost(self, connection: "_Connection") -> None:
        """Forget a connection."""
        self._open.pop(connection.protocol, None)

    def _make_room(self) -> bool:
        idle = [one for one in self._open.values() if not one.busy]
        if not self._full:
            log.warning("too many connections, ending idle ones most=%d", self._most)
        self._full = True
        if not idle:
            return False
        victim = min(idle, key=lambda one: one.since)
        self.lost(victim)
        victim.end()
        return True

    def _sweep(self) -> None:
        now = self._clock()
        for connection in list(self._open.values()):
            if connection.late(now):
                connection.end()
        self._full = self._full and len(self._open) >= self._most // 2
        self._sweeper = (
            asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep) if self._open else None
        )


class _Connection(asyncio.Protocol):
    """Passes everything on to the protocol that serves the connection, and remembers since when it waits."""

    def __init__(self, owner: Connections, protocol: asyncio.Protocol, clock: Callable[[], float]) -> None:
        self.protocol = protocol
        self.busy = False
        self.served = False
        self.unread = 0
        self.since = clock()
        self._owner = owner
        self._clock = clock
        self._transport: asyncio.Transport | None = None

    def late(self, now: float) -> bool:
        """Whether whoever is at the other end has taken too long."""
        if self.busy or self._transport is None:
            return False
        waited = now - self.since
        if self._transport.get_write_buffer_size():
            return waited > ANSWER_SECONDS
        return waited > (REQUEST_SECONDS if self.unread or not self.served else IDLE_SECONDS)

    def finish(self) -> None:
        """End the connection, after the answer that is under way."""
        if self.busy and isinstance(self.protocol, web.RequestHandler):
            self.protocol.close()
        elif self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """Cut the connection off."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 (a stream server makes no other)
        self._transport = transport
        self.since = self._clock()
        self._owner.opened(self)
        self.protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self.unread and not self.busy:
            self.since = self._clock()
        self.unread += len(data)
        if self.unread > MOST_UNREAD:
            self.end()
        else:
            self.protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self.protocol.eof_received()

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()

    def connection_lost(self, problem: Exception | None) -> None:
        self._owner.lost(self)
        self.protocol.connection_lost(problem)


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            transport.abort()
