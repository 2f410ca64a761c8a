"""Connections of the web server, bounded in number, in time and in unread bytes.

aiohttp limits the size of a request, not its duration: a client that sends half a request stays connected.
Here every connection has a deadline from the moment it is accepted. TLS begins afterwards, so that a failed
handshake is noticed at once and an endless one can be ended. If too many connections are open, the one that
has been idle longest is closed for the next. Few answers are made and sent at a time, because each that is
not read takes memory; while others wait for their turn, clients that read nothing are cut off.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aiohttp import web

if TYPE_CHECKING:
    import ssl

__all__ = ["Connections"]

log = logging.getLogger(__name__)

# Some Prometheus servers and a page per person on call: two hundred are far more than one sidecar gets.
MOST_CONNECTIONS: Final = 200
# Time limit of a request, and before it of a TLS handshake.
REQUEST_SECONDS: Final = 10.0
# Time limit for reading an answer.
ANSWER_SECONDS: Final = 30.0
# Longer than the usual time between scrapes, so that they find their connection open.
IDLE_SECONDS: Final = 130.0
# Bytes sent before the previous request is answered; no request here has a body.
MOST_UNREAD: Final = 1 << 16
_SWEEP_SECONDS: Final = 1.0
# Answers that are made and sent at a time. That of a server with 256 engines takes 3 MiB until it is read.
MOST_ANSWERS: Final = 8
# While others wait for their turn, a client may read nothing for so long.
STALLED_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.1
_PROBES: Final = "/-/"  # small answers, never late: Kubernetes ends a container for one


class Connections:
    """Makes the protocol of each connection, and ends those that block the server."""

    def __init__(
        self,
        protocols: Callable[[], asyncio.Protocol],
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
        most: int = MOST_CONNECTIONS,
    ) -> None:
        """Begin with none; `protocols` makes the protocol that serves one connection."""
        self.context: ssl.SSLContext | None = None  # TLS settings of new connections, None for plain ones
        self._protocols = protocols
        self._clock = clock
        self._most = most
        self._open: dict[asyncio.Protocol, _Connection] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._full = False
        self._closed = False
        self._turns = asyncio.Semaphore(MOST_ANSWERS)
        self._sending: set[_Connection] = set()
        self._looker: asyncio.TimerHandle | None = None

    def __call__(self) -> asyncio.Protocol:
        """Make the protocol of a connection that was just accepted."""
        return _Connection(self, self._protocols(), self._clock)

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Record when a request is complete, and when its answer is made."""
        connection = self._open.get(request.protocol)
        if connection is None:
            return await handler(request)
        connection.busy = True
        connection.unread = 0
        if connection.last:
            connection.finish()
        try:
            return await handler(request)
        finally:
            connection.answered(self._clock())

    @web.middleware
    async def turns(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Make and send few answers at a time; belongs behind the check of passwords, which takes long."""
        connection = self._open.get(request.protocol)
        if connection is None or request.path.startswith(_PROBES):
            return await handler(request)
        if self._turns.locked() and self._looker is None:
            self._look()
        async with self._turns:
            response = await handler(request)
            connection.answered(self._clock())
            self._sending.add(connection)
            try:
                with suppress(ConnectionError):
                    await response.prepare(request)
                    await response.write_eof()
                if isinstance(response, web.Response):
                    response.body = None  # aiohttp keeps the last answer of each connection
                await connection.flushed.wait()
            finally:
                self._sending.discard(connection)
        return response

    def _look(self) -> None:
        """Cut off clients that read nothing of their answer, for as long as others wait."""
        now = self._clock()
        for connection in list(self._sending):
            if connection.stalled(now):
                self._sending.discard(connection)
                connection.end()
        loop = asyncio.get_running_loop()
        waits = self._turns.locked() and not self._closed
        self._looker = loop.call_later(_LOOK_SECONDS, self._look) if waits else None

    def finish(self) -> None:
        """End every connection after the answer that is under way."""
        for connection in list(self._open.values()):
            connection.finish()

    async def close(self) -> None:
        """Accept no more connections; handshakes under way are ended."""
        self._closed = True
        for connection in list(self._open.values()):
            if not connection.made:
                connection.end()
        if self._handshakes:
            await asyncio.wait(self._handshakes)
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def opened(self, connection: "_Connection") -> bool:
        """Register a connection; returns False if there are too many."""
        if self._closed or (len(self._open) >= self._most and not self._make_room()):
            return False
        self._open[connection.protocol] = connection
        if self._sweeper is None:
            self._sweep()
        return True

    def secure(self, connection: "_Connection", plain: asyncio.Transport, context: "ssl.SSLContext") -> None:
        """Start TLS on a connection that was accepted."""
        plain.pause_reading()  # until TLS listens
        task = asyncio.create_task(self._handshake(connection, plain, context))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _handshake(
        self, connection: "_Connection", plain: asyncio.Transport, context: "ssl.SSLContext"
    ) -> None:
        secured = None
        try:
            if not plain.is_closing():
                secured = await asyncio.get_running_loop().start_tls(
                    plain, connection, context, server_side=True, ssl_handshake_timeout=REQUEST_SECONDS
                )
        except OSError:
            pass  # no TLS, a rejected version or certificate, or disconnected: the client gets the error
        if secured is None:
            self.forget(connection)
        else:
            connection.begin(secured)

    def forget(self, connection: "_Connection") -> None:
        """Forget a connection that has ended."""
        self._open.pop(connection.protocol, None)

    def _make_room(self) -> bool:
        """End a connection; half of the places are for clients that were answered before."""
        idle = [one for one in self._open.values() if not one.busy]
        if not self._full:
            log.warning("too many connections, ending idle ones most=%d", self._most)
        self._full = True
        if not idle:
            return False
        new = [one for one in idle if not one.served]
        victim = min(new if 2 * len(new) >= self._most else idle, key=lambda one: one.since)
        self.forget(victim)
        victim.end()
        return True

    def _sweep(self) -> None:
        now = self._clock()
        for connection in list(self._open.values()):
            if connection.late(now):
                connection.end()
        self._full = self._full and len(self._open) >= self._most // 2
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(_SWEEP_SECONDS, self._sweep) if self._open else None


class _Connection(asyncio.Protocol):
    """Passes everything on to the protocol that serves the connection, and measures how long it waits."""

    def __init__(self, owner: Connections, protocol: asyncio.Protocol, clock: Callable[[], float]) -> None:
        self.protocol = protocol
        self.made = False  # whether the protocol has the connection; with TLS after the handshake
        self.last = False  # whether it ends after its next answer
        self.busy = False
        self.served = False
        self.unread = 0
        self.since = clock()
        self.flushed = asyncio.Event()  # whether the client has taken nearly all that was written
        self.flushed.set()
        self._left = 0  # bytes of its answer that the client has not taken, when it last took some
        self._took = 0.0
        self._owner = owner
        self._clock = clock
        self._early = b""
        self._transport: asyncio.Transport | None = None

    def late(self, now: float) -> bool:
        """Whether the client has exceeded a time limit."""
        if self.busy or self._transport is None:
            return False
        waited = now - self.since
        if self._transport.get_write_buffer_size():
            return waited > ANSWER_SECONDS
        return waited > (REQUEST_SECONDS if self.unread or not self.served else IDLE_SECONDS)

    def answered(self, now: float) -> None:
        """Note that the answer is made: from now on the client's time counts."""
        if self.busy:
            self.busy, self.served, self.since = False, True, now

    def stalled(self, now: float) -> bool:
        """Whether the client has taken nothing of its answer for some time."""
        left = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if left < self._left or self._took < self.since:
            self._took = now
        self._left = left
        return left > 0 and now - self._took > STALLED_SECONDS

    def finish(self) -> None:
        """End the connection after the answer under way; after its first one during a handshake."""
        if not self.made:
            self.last = True
        elif self.busy and isinstance(self.protocol, web.RequestHandler):
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
        if not self._owner.opened(self):
            transport.abort()
        elif self._owner.context is None:
            self.begin(transport)
        else:
            self._owner.secure(self, transport, self._owner.context)

    def begin(self, transport: asyncio.Transport) -> None:
        """Serve the connection over this transport."""
        self._transport = transport
        self.since = self._clock()
        self.made = True
        self.protocol.connection_made(transport)
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if not self.made:  # bytes that arrived with the end of the TLS handshake
            self._early += data
            return
        if not self.unread and not self.busy:
            self.since = self._clock()
        self.unread += len(data)
        if self.unread > MOST_UNREAD:
            self.end()
        else:
            self.protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self.protocol.eof_received() if self.made else None

    def pause_writing(self) -> None:
        self.flushed.clear()
        if self.made:
            self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.flushed.set()
        if self.made:
            self.protocol.resume_writing()

    def connection_lost(self, problem: Exception | None) -> None:
        self.flushed.set()
        self._owner.forget(self)
        if self.made:
            self.protocol.connection_lost(problem)
