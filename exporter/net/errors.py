"""What can go wrong with an HTTP request, as one of a few named errors with a detail that is safe to show."""

import os
import ssl
from collections.abc import Mapping
from typing import Final

import aiohttp

__all__ = ["REASONS", "RefusedError", "explain", "system_error"]

REASONS: Final[Mapping[str, str]] = {
    "connection_refused": "nothing listens there",
    "connection_reset": "the server closed the connection before its answer was complete",
    "timeout": "no complete answer in time",
    "dns": "the host name cannot be resolved",
    "tls": "the TLS connection cannot be made",
    "redirect": "redirected to where this client does not follow",
    "body_too_large": "the body is larger than allowed",
    "bad_encoding": "the body cannot be decoded",
    "unreachable": "the server cannot be reached",
    "protocol": "the answer is not HTTP as expected",
}
"""Every error of a request, with its plain meaning; apart from these only ``http_<status>``."""

# The first row that matches any exception of the chain wins, so the specific ones come first.
_BY_TYPE: Final[tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...]] = (
    (aiohttp.ClientConnectorDNSError, "dns"),
    (ssl.SSLError, "tls"),
    (aiohttp.ClientPayloadError, "bad_encoding"),
    (TimeoutError, "timeout"),
    (ConnectionRefusedError, "connection_refused"),
    (
        (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, aiohttp.ServerDisconnectedError),
        "connection_reset",
    ),
)
_LONGEST_CHAIN: Final = 8


class RefusedError(Exception):
    """A request that this program itself refuses to make or to accept; the message is safe to show."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason  # a key of `REASONS`, or ``http_<status>``


def explain(problem: BaseException) -> tuple[str, str]:
    """Return a reason (a key of `REASONS`, or ``http_<status>``), and a line without its words."""
    if isinstance(problem, RefusedError):
        return problem.reason, str(problem)
    chain = _chain(problem)
    reason = _reason(chain)
    detail = REASONS[reason]
    # The last one is the true cause: aiohttp's own lack the attributes of those they derive from.
    tls = next((link for link in reversed(chain) if isinstance(link, ssl.SSLError)), None)
    number = next((link.errno for link in chain if isinstance(link, OSError) and link.errno), None)
    if tls is not None:
        cause = getattr(tls, "verify_message", None) or getattr(tls, "reason", None) or type(tls).__name__
        detail = f"{detail}: {cause}"
    elif reason == "unreachable" and number is not None:
        detail = f"{detail}: {system_error(number)}"
    elif reason == "protocol":
        detail = f"{detail} ({type(problem).__name__})"
    return reason, detail


def system_error(number: int | None) -> str:
    """The system's words for an errno, in lower case."""
    return os.strerror(number).lower() if number else "unknown error"


def _chain(problem: BaseException) -> list[BaseException]:
    """List an exception and its causes, the outermost first."""
    chain = [problem]
    while chain[-1].__cause__ is not None and len(chain) < _LONGEST_CHAIN:
        chain.append(chain[-1].__cause__)
    return chain


def _reason(chain: list[BaseException]) -> str:
    """Pick the key of `REASONS` for an exception and its causes."""
    first = chain[0]
    # aiohttp reports a reset within the body, and a malformed first chunk, in the message only.
    if isinstance(first, aiohttp.ClientPayloadError) and ConnectionResetError.__name__ in str(first):
        return "connection_reset"
    if isinstance(first, aiohttp.ClientResponseError) and "chunk" in first.message.partition("\n")[0]:
        return "bad_encoding"
    for types, reason in _BY_TYPE:
        if any(isinstance(link, types) for link in chain):
            return reason
    if isinstance(first, OSError | aiohttp.ClientConnectionError):
        return "unreachable"
    return "protocol"
