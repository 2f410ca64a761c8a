"""A server on loopback that answers as it is told: well, badly, or never; and what it has shown."""

import contextlib
import gzip
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

from support import bodies
from support.process import free_port

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1 << 20


class Hostile:
    """The server. Each good answer shows one preemption more, until `still` is set.

    Attributes:
        mode: what to do with a request: gets the server and the connection, and returns whether to keep it.
        first: the count in the first good answer; `shown`: in the last.
        still: whether the count stays.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.port = free_port()
        self.tls = tls
        self.mode: Callable[[Hostile, socket.socket], bool] = good
        self.first: int | None = None
        self.shown = 41
        self.still = False
        self.requests = 0
        self.start_time = 1000.0
        self._ended = threading.Event()
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._held: set[socket.socket] = set()

    @property
    def url(self) -> str:
        """Where its metrics are."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/metrics"

    @property
    def preempted(self) -> int:
        """What whoever saw all good answers has counted."""
        return self.shown - (self.shown if self.first is None else self.first)

    def body(self) -> bytes:
        """The next good body."""
        with self._lock:
            self.shown += not self.still
            self.first = self.shown if self.first is None else self.first
            engine = bodies.engine(
                running=3,
                waiting=0,
                kv=0.4,
                preemptions=self.shown,
                finished=1000 + 9 * self.shown,
                steps=self.shown,
            )
            return bodies.body(engine, start_time=self.start_time)

    def wait(self, seconds: float) -> bool:
        """Let time pass; whether to go on."""
        return not self._ended.wait(seconds)

    def open(self) -> None:
        """Listen, always on the same port."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """Stop to listen and end all connections: they are refused."""
        if self._listener is not None:
            # A blocked accept() holds the socket open until it is shut down.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for held in list(self._held):
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self._held.add(connection)
            try:
                if self.tls is not None:
                    with self.tls.wrap_socket(connection, server_side=True) as secured:
                        self._answer(secured)
                else:
                    self._answer(connection)
            finally:
                self._held.discard(connection)

    def _answer(self, connection: socket.socket) -> None:
        received = b""
        while True:
            while b"\r\n\r\n" not in received:
                piece = connection.recv(65_536)
                if not piece:
                    return
                received += piece
            head, _, received = received.partition(b"\r\n\r\n")
            if not head.startswith(b"GET /metrics"):  # what the server runs with is asked for too
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            self.requests += 1
            if not self.mode(self, connection):
                return


Mode = Callable[[Hostile, socket.socket], bool]


def good(server: Hostile, connection: socket.socket) -> bool:
    """As vLLM answers."""
    body = server.body()
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return True


def saying(answer: bytes | Callable[[Hostile], bytes], *, keep: bool = False) -> Mode:
    """The same bytes to every request."""

    def mode(server: Hostile, connection: socket.socket) -> bool:
        connection.sendall(answer(server) if callable(answer) else answer)
        return keep

    return mode


def status(line: str, *headers: str) -> Mode:
    """A status, with no body."""
    text = "".join(f"{one}\r\n" for one in (f"HTTP/1.1 {line}", *headers, "Content-Length: 0"))
    return saying(text.encode() + b"\r\n", keep=True)


def with_body(body: bytes | Callable[[Hostile], bytes], *headers: str) -> Mode:
    """A body, whole and well announced."""

    def answer(server: Hostile) -> bytes:
        made = body(server) if callable(body) else body
        more = "".join(f"{one}\r\n" for one in headers).encode()
        return HEAD + more + b"Content-Length: %d\r\n\r\n" % len(made) + made

    return saying(answer, keep=True)


def endless(start: bytes, piece: bytes, pause: float = 0.0) -> Mode:
    """Never comes to an end."""

    def mode(server: Hostile, connection: socket.socket) -> bool:
        connection.sendall(start)
        while server.wait(pause) if pause else True:
            connection.sendall(piece)
        return False

    return mode


def drip(answer: Callable[[Hostile], bytes], at_once: int, pause: float = 0.1) -> Mode:
    """The end of an answer one byte at a time."""

    def mode(server: Hostile, connection: socket.socket) -> bool:
        whole = answer(server)
        connection.sendall(whole[:at_once])
        for byte in whole[at_once:]:
            if not server.wait(pause):
                break
            connection.sendall(bytes([byte]))
        return False

    return mode


def silent(server: Hostile, _connection: socket.socket) -> bool:
    """Takes the request and says nothing: a black hole."""
    server.wait(10)
    return False


def reset(_server: Hostile, connection: socket.socket) -> bool:
    """Ends the connection without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def reset_within(server: Hostile, connection: socket.socket) -> bool:
    """Ends it in the middle of the body."""
    body = server.body()
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[: len(body) // 2])
    time.sleep(0.05)
    return reset(server, connection)


def bomb(size: int) -> bytes:
    """Zeros, packed a thousand times smaller."""
    return gzip.compress(bytes(size), 9)
