"""Checks user names and passwords against bcrypt hashes, one at a time and off the event loop."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from exporter.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Passwords", "load_bcrypt"]

# Passwords that wait to be hashed; further requests get a 503.
MOST_WAITING: Final = 32
# Of one address: the others have their turn.
MOST_WAITING_EACH: Final = 8
# Outcomes remembered, of right and of wrong passwords each.
MOST_REMEMBERED: Final = 128
# bcrypt uses no more of a password; its library rejects longer ones.
_MOST_BYTES: Final = 72


class Passwords:
    """Users and the hashes of their passwords."""

    def __init__(self) -> None:
        self.users: Mapping[str, str] = {}  # hashes by name; everybody may enter if there are none
        self._key = secrets.token_bytes(32)  # makes the remembered digests worthless elsewhere
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._turn = asyncio.Lock()
        self._waiting: Counter[str | None] = Counter()  # by address
        self._hashing: asyncio.Future[bool] | None = None
        self._waited: asyncio.Future[bool] | None = None
        self._closed = False

    async def accepts(self, header: str, remote: str | None = None) -> bool:
        """Return whether an Authorization header has the name and password of a user.

        Raises:
            HTTPServiceUnavailable: too many passwords are waiting.
        """
        name, password = _credentials(header)
        if password is None:
            return False
        # An unknown user costs as much time as a known one, so the time reveals nothing.
        hashed = self.users.get(name) or next(iter(self.users.values()))
        mark = hmac.digest(self._key, b"\0".join((name.encode(), hashed.encode(), password)), hashlib.sha256)
        if mark in self._right:
            self._right.move_to_end(mark)
            return True
        if mark in self._wrong:
            return False
        right = await self._hashes_to(password, hashed, remote) and name in self.users
        marks = self._right if right else self._wrong
        marks[mark] = None
        if len(marks) > MOST_REMEMBERED:
            marks.popitem(last=False)
        return right

    def close(self) -> None:
        """Check no more passwords: waiting requests get a 503."""
        self._closed = True
        if self._waited is not None:
            self._waited.cancel()

    async def ended(self) -> None:
        """Wait for the hash that is under way.

        The interpreter breaks threads off when the process ends. Code in C survives that; bcrypt's, which is
        Rust, ends in SIGABRT.
        """
        if self._hashing is not None:
            await asyncio.wait([self._hashing])

    async def _hashes_to(self, password: bytes, hashed: str, remote: str | None) -> bool:
        """Whether a password has a hash; in a thread, one at a time: each takes a core for a while."""
        if self._waiting.total() >= MOST_WAITING or self._waiting[remote] >= MOST_WAITING_EACH:
            raise _later()
        self._waiting[remote] += 1
        try:
            async with self._turn:
                if self._closed:
                    raise _later()
                running = asyncio.get_running_loop()
                self._hashing = running.run_in_executor(None, _check, password, hashed.encode())
                self._waited = asyncio.shield(self._hashing)
                await asyncio.wait([self._waited])
                if self._closed:
                    raise _later()
                return self._waited.result()
        finally:
            self._waiting[remote] -= 1
            if not self._waiting[remote]:
                del self._waiting[remote]


def load_bcrypt() -> Any:
    """Return the package bcrypt; raises ConfigError if it is not installed."""
    try:
        import bcrypt  # noqa: PLC0415 (an extra: most sidecars have no users)
    except ImportError:
        raise ConfigError(
            ["basic_auth_users: expected the package bcrypt: install vllm-preemption-exporter[auth]"]
        ) from None
    return bcrypt


def _later() -> web.HTTPException:
    return web.HTTPServiceUnavailable(headers={"Retry-After": "5"})


def _check(password: bytes, hashed: bytes) -> bool:
    try:
        return bool(load_bcrypt().checkpw(password[:_MOST_BYTES], hashed))
    except ValueError:  # a NUL within the password
        return False


def _credentials(header: str) -> tuple[str, bytes | None]:
    """Name and password of an Authorization header; no password if it is not basic authentication."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return "", None
    try:
        pair = base64.b64decode(encoded.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return "", None
    name, colon, password = pair.partition(":")
    return name, password.encode() if colon else None
