"""The direct push: alerts to every configured Alertmanager, without ever delaying a poll.

`Notifier.note` takes a reading and returns at once. Each peer has a task of its own that pushes the
newest state of each alert, and tries again with ever longer waits where that fails.
"""

import asyncio
import json
import logging
import random
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, Literal

import aiohttp
from multidict import CIMultiDict

from exporter import __version__
from exporter.analysis.pipeline import TargetReading
from exporter.config import AlertmanagerConfig, Secret
from exporter.net import tls
from exporter.publish.alerts.tracker import ActiveAlerts, Key, Notice

__all__ = ["OUTCOMES", "Notifier", "OfTarget", "Outcome", "body"]

log = logging.getLogger(__name__)

Outcome = Literal["sent", "failed", "rejected", "dropped"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("sent", "failed", "rejected", "dropped")
Count = Callable[[Outcome, int], None]
Sleep = Callable[[float], Awaitable[None]]

# Alerts per push, and alerts that wait for one peer: a target with very many engines stays within both.
MOST_PER_PUSH: Final = 64
MOST_WAITING: Final = 1024
# The wait after a failure doubles from the first to the longest of these.
FIRST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 30.0
_JITTER: Final = 0.2
_PATH: Final = "/api/v2/alerts"
_GOOD: Final = range(200, 300)
# What Alertmanager says of alerts it will never take; of a wrong path or token someone may still see to it.
_FINAL: Final = frozenset({400, 413, 415, 422})
_MAX_SECRET_FILE: Final = 65_536


class Notifier:
    """Pushes the alerts of one target, or of several: the Alertmanagers are told of all in one queue each."""

    def __init__(
        self,
        config: AlertmanagerConfig,
        count: Count,
        wall_clock: Callable[[], float],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Prepare, without opening anything.

        Args:
            config: whom to tell and how; without urls nothing is ever pushed.
            count: gets an outcome and how many alerts had it, once for each peer.
            wall_clock: unix seconds.
            sleep: waits for some seconds.
        """
        self._config = config
        self._alone: OfTarget | None = None
        self._wall_clock = wall_clock
        self._peers = [_Peer(url, config, count, wall_clock, sleep) for url in config.urls]
        self._closed = not config.urls
        if config.urls:
            for outcome in OUTCOMES:
                count(outcome, 0)

    def note(self, reading: TargetReading) -> None:
        """Take a reading of the only target; what is to be told is pushed by and by."""
        if self._alone is None:
            self._alone = self.target({})
        self._alone.note(reading)

    def target(self, labels: Mapping[str, str]) -> "OfTarget":
        """One of several targets: its alerts bear these labels too, which override the external ones."""
        config = replace(self._config, external_labels={**self._config.external_labels, **labels})
        return OfTarget(self, ActiveAlerts(config), self._wall_clock)

    @property
    def closed(self) -> bool:
        """Whether nothing is pushed, ever or any more."""
        return self._closed

    def put(self, notices: Sequence[Notice]) -> None:
        """Take what is to be told; it is pushed by and by."""
        for notice in notices:
            log.info(
                "alert resolved labels=%s" if notice.resolved else "alert pushed labels=%s",
                ",".join(f"{name}={value!r}" for name, value in notice.key),
            )
            for peer in self._peers:
                peer.put(notice)

    def close(self) -> None:
        """From now on raise nothing and resolve nothing: what is active is left to expire.

        A server that is stopped together with the exporter is no news, and its alerts have not ended well.
        """
        self._closed = True

    async def run(self) -> None:
        """Push until cancelled. Raises nothing but CancelledError."""
        await asyncio.gather(*(peer.run() for peer in self._peers))


class OfTarget:
    """The alerts of one target."""

    def __init__(self, notifier: Notifier, active: ActiveAlerts, wall_clock: Callable[[], float]) -> None:
        self._notifier = notifier
        self._active = active
        self._wall_clock = wall_clock

    def note(self, reading: TargetReading) -> None:
        """Take a reading; what is to be told is pushed by and by."""
        if not self._notifier.closed:
            self._notifier.put(self._active.observe(reading, self._wall_clock()))

    def end(self) -> None:
        """The target is watched no more: its alerts have ended."""
        if not self._notifier.closed:
            self._notifier.put(self._active.end(self._wall_clock()))


class _Peer:
    """One Alertmanager, and what it is still to be told."""

    def __init__(
        self,
        url: str,
        config: AlertmanagerConfig,
        count: Count,
        wall_clock: Callable[[], float],
        sleep: Sleep,
    ) -> None:
        self._url = url + config.path_prefix + _PATH
        self._config = config
        self._count = count
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._waiting: dict[Key, Notice] = {}
        self._due = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._failures = 0
        self._trouble = ""

    def put(self, notice: Notice) -> None:
        """Queue a notice in place of an older one of the same alert."""
        self._waiting.pop(notice.key, None)
        if len(self._waiting) >= MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
            self._count("dropped", 1)
        self._waiting[notice.key] = notice
        self._due.set()

    async def run(self) -> None:
        """Push whatever waits, until cancelled."""
        try:
            while True:
                await self._due.wait()
                batch = self._batch()
                if batch:
                    await self._push(batch)
                else:
                    self._due.clear()
        finally:
            await self._drop_session()

    def _batch(self) -> list[Notice]:
        """The notices to push next, the oldest first; those that came too late are dropped."""
        now = self._wall_clock()
        late = [notice.key for notice in self._waiting.values() if notice.useless_at <= now]
        for key in late:
            del self._waiting[key]
        if late:
            self._count("dropped", len(late))
        return list(self._waiting.values())[:MOST_PER_PUSH]

    async def _push(self, batch: Sequence[Notice]) -> None:
        outcome, trouble = await self._post(batch)
        self._count(outcome, len(batch))
        self._tell(trouble)
        if outcome == "failed":
            self._failures += 1
            await self._drop_session()  # certificates, names and tokens may be others by now
            await self._sleep(self._wait())
            return
        self._failures = 0
        for notice in batch:
            if self._waiting.get(notice.key) is notice:  # else it has a newer state already
                del self._waiting[notice.key]

    async def _post(self, batch: Sequence[Notice]) -> tuple[Outcome, str]:
        """One request: its outcome, and what is wrong in a word or two, which repeats nothing secret."""
        try:
            async with asyncio.timeout(self._config.timeout):
                status = await self._request(body(batch))
        except _UnusableError as problem:
            return "failed", str(problem)
        except Exception as problem:  # noqa: BLE001 (whatever it is, the alerts are told again)
            return "failed", _trouble(problem)
        if status in _GOOD:
            return "sent", ""
        return ("rejected" if status in _FINAL else "failed"), f"http_{status}"

    async def _request(self, payload: bytes) -> int:
        session = self._session or self._open()
        async with session.post(
            self._url,
            data=payload,
            headers=_headers(self._config),
            allow_redirects=False,
            server_hostname=self._config.tls.server_name,
        ) as response:
            return response.status

    def _open(self) -> aiohttp.ClientSession:
        try:
            secure = tls.context(self._config.tls) if self._url.startswith("https:") else True
        except tls.TlsFilesError as problem:
            raise _UnusableError(str(problem)) from problem
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1, ssl=secure),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # ours covers all of it
            trust_env=False,
        )
        return self._session

    async def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _wait(self) -> float:
        doubled = FIRST_WAIT_SECONDS * 2.0 ** min(self._failures - 1, 10)
        return min(LONGEST_WAIT_SECONDS, doubled) * (1 - _JITTER * random.random())  # noqa: S311 (no secret)

    def _tell(self, trouble: str) -> None:
        """Log what is wrong once, and once that it is over."""
        if trouble == self._trouble:
            return
        if trouble:
            log.warning("alerts are not taken alertmanager=%s error=%r", self._url, trouble)
        else:
            log.info("alerts are taken again alertmanager=%s", self._url)
        self._trouble = trouble


class _UnusableError(Exception):
    """Something of the configuration cannot be used; the message names it."""


def body(notices: Sequence[Notice]) -> bytes:
    """What is posted: a JSON list of alerts as Alertmanager's API v2 takes it."""
    return json.dumps([_alert(notice) for notice in notices]).encode()


def _alert(notice: Notice) -> dict[str, Any]:
    return {
        "labels": dict(notice.key),
        "annotations": dict(notice.annotations),
        "startsAt": _stamp(notice.starts_at),
        "endsAt": _stamp(notice.ends_at),
    }


def _stamp(seconds: float) -> str:
    """Unix seconds as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _headers(config: AlertmanagerConfig) -> CIMultiDict[str]:
    """The headers of one push; files with secrets are read anew, for they are renewed in place."""
    headers = CIMultiDict(
        {"Content-Type": "application/json", "User-Agent": f"vllm-preemption-exporter/{__version__}"}
    )
    headers.update({name: value.reveal() for name, value in config.headers.items()})
    if config.tenant is not None:
        headers["X-Scope-OrgID"] = config.tenant
    basic = config.basic_auth
    token = _secret(config.bearer_token, config.bearer_token_file, "bearer_token_file")
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    elif basic.username is not None:
        password = _secret(basic.password, basic.password_file, "basic_auth.password_file")
        pair = f"{basic.username}:{password}".encode()
        headers["Authorization"] = f"Basic {b64encode(pair).decode()}"
    return headers


def _secret(given: Secret | None, path: str | None, option: str) -> str | None:
    """A secret as it was given, or the text of its file without the last newline."""
    if given is not None or path is None:
        return None if given is None else given.reveal()
    try:
        if not S_ISREG(Path(path).stat().st_mode):  # a pipe would hold up everything
            raise _UnusableError(f"{option} is no regular file")
        with Path(path).open("rb") as file:
            text = file.read(_MAX_SECRET_FILE).decode().strip()
    except (OSError, UnicodeError) as problem:
        raise _UnusableError(f"cannot read {option}") from problem
    if not text or not text.isprintable():
        raise _UnusableError(f"{option} is empty or holds a character no header can carry")
    return text


def _trouble(problem: Exception) -> str:
    """What went wrong, in a word; an exception's own text may quote what is secret."""
    words: tuple[tuple[type[BaseException], str], ...] = (
        (TimeoutError, "timeout"),
        (aiohttp.ClientConnectorDNSError, "dns"),
        (aiohttp.ClientSSLError, "tls"),
        (aiohttp.ClientConnectorError, "unreachable"),
        (aiohttp.ServerDisconnectedError, "connection_reset"),
        (OSError, "connection_reset"),
    )
    return next((word for kind, word in words if isinstance(problem, kind)), type(problem).__name__)
