"""The direct push: alerts to every configured Alertmanager, without ever delaying a poll.

`TargetAlerts.note` takes a reading and returns at once. Each Alertmanager has a task of its own that pushes
the newest state of each alert, and retries with ever longer waits after a failure.
"""

import asyncio
import logging
import random
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Literal

import aiohttp
from multidict import CIMultiDict

from exporter import __version__
from exporter.analysis.pipeline import TargetReading
from exporter.config import AlertmanagerConfig, Secret
from exporter.net import tls
from exporter.net.backoff import backoff
from exporter.net.errors import RefusedError, explain
from exporter.net.secret_files import SecretFile
from exporter.publish.alerts.tracker import ActiveAlerts, Key, Notice
from exporter.publish.json_text import json_text

__all__ = ["OUTCOMES", "Notifier", "Outcome", "TargetAlerts", "body"]

log = logging.getLogger(__name__)

Outcome = Literal["sent", "failed", "rejected", "dropped"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("sent", "failed", "rejected", "dropped")
Count = Callable[[Outcome, int], None]
Sleep = Callable[[float], Awaitable[None]]

# Alerts per push, and alerts queued for one Alertmanager: a target with very many engines stays within both.
MOST_PER_PUSH: Final = 64
MOST_WAITING: Final = 1024
# The wait after a failure doubles from the first to the longest of these.
FIRST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 30.0
# The warning is repeated after this many failures, about every ten minutes.
FAILURES_PER_WARNING: Final = 20
# Clocks that differ by less than this are equal.
_CLOCK_SECONDS: Final = 15.0
_PATH: Final = "/api/v2/alerts"
_SUCCESS: Final = range(200, 300)
# Alertmanager will never accept these alerts; a wrong path or token may still be corrected.
_FINAL: Final = frozenset({400, 413, 415, 422})


class Notifier:
    """Pushes the alerts of all targets, through one queue per Alertmanager."""

    def __init__(
        self,
        config: AlertmanagerConfig,
        count: Count,
        wall_clock: Callable[[], float],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Prepare; `count` gets an outcome and the number of its alerts, once per Alertmanager."""
        # Whether nothing is pushed, because no Alertmanager is configured or after `close`.
        self.closed = not config.urls
        self._config = config
        self._wall_clock = wall_clock
        self._raised: set[Key] = set()
        self._peers = [_Peer(url, config, count, wall_clock, sleep) for url in config.urls]
        for outcome in OUTCOMES if config.urls else ():
            count(outcome, 0)

    def target(self, labels: Mapping[str, str], before: "TargetAlerts | None" = None) -> "TargetAlerts":
        """The alerts of one target: they carry these labels too, which override the external ones.

        Those of the target's predecessor `before`, with the same labels, go on.
        """
        config = replace(self._config, external_labels={**self._config.external_labels, **labels})
        return TargetAlerts(self, ActiveAlerts(config, before.active if before else None), self._wall_clock)

    def put(self, notices: Sequence[Notice]) -> None:
        """Queue notices for every Alertmanager; logs those that are not sent again only."""
        for notice in notices:
            if notice.resolved or notice.key not in self._raised:
                labels = ",".join(f"{name}={value!r}" for name, value in notice.key)
                log.info("alert %s labels=%s", "resolved" if notice.resolved else "raised", labels)
            (self._raised.discard if notice.resolved else self._raised.add)(notice.key)
            for peer in self._peers:
                peer.put(notice)

    def close(self) -> None:
        """Raise and resolve nothing from now on: active alerts are left to expire.

        A server that stops together with the exporter is no news, and its alerts have not ended well.
        """
        self.closed = True

    async def run(self) -> None:
        """Push until cancelled. Raises nothing but CancelledError."""
        await asyncio.gather(*(peer.run() for peer in self._peers))


@dataclass(frozen=True, slots=True)
class TargetAlerts:
    """The alerts of one target."""

    _notifier: Notifier
    active: ActiveAlerts
    _wall_clock: Callable[[], float]

    def note(self, reading: TargetReading) -> None:
        """Queue what a reading raises or resolves."""
        if not self._notifier.closed:
            self._notifier.put(self.active.observe(reading, self._wall_clock()))

    def end(self) -> None:
        """Resolve the alerts of a target that is no longer watched."""
        if not self._notifier.closed:
            self._notifier.put(self.active.end(self._wall_clock()))


class _Peer:
    """One Alertmanager and its queue."""

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
        token, password = config.bearer_token_file, config.basic_auth.password_file
        self._token_file = SecretFile(token, "bearer_token_file") if token else None
        self._password_file = SecretFile(password, "basic_auth.password_file") if password else None
        self._count = count
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._waiting: dict[Key, Notice] = {}
        self._due = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._failures = 0
        self._error: str | None = "none yet"
        self._ahead = 0.0  # seconds by which its clock is ahead of ours

    def put(self, notice: Notice) -> None:
        """Queue a notice in place of an older one of the same alert."""
        self._waiting.pop(notice.key, None)
        if len(self._waiting) >= MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
            self._count("dropped", 1)
        self._waiting[notice.key] = notice
        self._due.set()

    async def run(self) -> None:
        """Push the queued notices, until cancelled."""
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
        """The notices to push next, the oldest first; those that are too late are dropped."""
        now = self._wall_clock()
        late = [notice.key for notice in self._waiting.values() if notice.useless_at <= now]
        for key in late:
            del self._waiting[key]
        if late:
            self._count("dropped", len(late))
        return list(self._waiting.values())[:MOST_PER_PUSH]

    async def _push(self, batch: Sequence[Notice]) -> bool:
        """Push alerts; those of a rejected batch in ever smaller parts, for one of them may be the cause.

        Returns whether there was an answer for good.
        """
        outcome, error, detail = await self._post(batch)
        if outcome == "rejected" and len(batch) > 1:
            middle = len(batch) // 2
            return await self._push(batch[:middle]) and await self._push(batch[middle:])
        self._count(outcome, len(batch))
        self._failures += outcome == "failed"
        self._log(error, detail)
        if outcome == "failed":
            await self._drop_session()  # certificates and addresses may have changed
            chance = random.random()  # noqa: S311 (no secret)
            await self._sleep(backoff(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, self._failures - 1, chance))
            return False
        self._failures = 0
        for notice in batch:
            if self._waiting.get(notice.key) is notice:  # else a newer state is queued already
                del self._waiting[notice.key]
        return True

    async def _post(self, batch: Sequence[Notice]) -> tuple[Outcome, str | None, str]:
        """Send one request; returns its outcome, its error and a detail that repeats nothing secret."""
        try:
            async with asyncio.timeout(self._config.timeout):
                ahead, status = self._ahead, await self._request(batch)
                if self._ahead != ahead:  # by its clock the alerts were over, or had not begun
                    status = await self._request(batch)
        except Exception as problem:  # noqa: BLE001 (whatever it is, the alerts are pushed again)
            return "failed", *explain(problem)
        if status in _SUCCESS:
            return "sent", None, ""
        return ("rejected" if status in _FINAL else "failed"), f"http_{status}", ""

    async def _request(self, batch: Sequence[Notice]) -> int:
        if self._session is None:
            secure = tls.context(self._config.tls) if self._url.startswith("https:") else True
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=1, ssl=secure),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),  # ours covers all of it
                trust_env=False,
            )
        async with self._session.post(
            self._url,
            data=body(batch, self._ahead),
            headers=self._headers(),
            allow_redirects=False,
            server_hostname=self._config.tls.server_name,
        ) as response:
            self._compare_clocks(response.headers.get("Date", ""))
            return response.status

    def _compare_clocks(self, date: str) -> None:
        """Take its clock from now on if it differs by much: an alert must not be over when it arrives."""
        try:
            ahead = parsedate_to_datetime(date).timestamp() - self._wall_clock()
        except (ValueError, OverflowError):
            return
        if abs(ahead - self._ahead) > _CLOCK_SECONDS:
            self._ahead = ahead if abs(ahead) > _CLOCK_SECONDS else 0.0
            log.warning("clocks differ alertmanager=%s ahead=%.0fs", self._url, self._ahead)

    def _headers(self) -> CIMultiDict[str]:
        """Return the headers now; raises RefusedError if a file with a secret cannot be used."""
        config, basic = self._config, self._config.basic_auth
        headers = CIMultiDict(
            {"Content-Type": "application/json", "User-Agent": f"vllm-preemption-exporter/{__version__}"}
        )
        headers.update({name: value.reveal() for name, value in config.headers.items()})
        if config.tenant is not None:
            headers["X-Scope-OrgID"] = config.tenant
        token = _secret(config.bearer_token, self._token_file)
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        elif basic.username is not None:
            pair = f"{basic.username}:{_secret(basic.password, self._password_file)}".encode()
            headers["Authorization"] = f"Basic {b64encode(pair).decode()}"
        return headers

    async def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _log(self, error: str | None, detail: str) -> None:
        """Log that alerts are accepted, once until an error; an error at once and after every ten minutes."""
        again = error is not None and self._failures > 0 and self._failures % FAILURES_PER_WARNING == 0
        if error == self._error and not again:
            return
        if error is not None:
            words = "cannot push alerts alertmanager=%s error=%s detail=%r waiting=%d failures=%d"
            log.warning(words, self._url, error, detail, len(self._waiting), self._failures)
        else:
            log.info("alerts accepted alertmanager=%s", self._url)
        self._error = error


def body(notices: Sequence[Notice], ahead: float = 0.0) -> bytes:
    """Make the JSON list of alerts that Alertmanager's API v2 accepts, in its time, `ahead` of ours."""

    def rfc3339(seconds: float) -> str:
        return datetime.fromtimestamp(seconds + ahead, UTC).isoformat(timespec="milliseconds")

    alerts = [
        {
            "labels": dict(notice.key),
            "annotations": dict(notice.annotations),
            "startsAt": rfc3339(notice.starts_at),
            "endsAt": rfc3339(notice.ends_at),
        }
        for notice in notices
    ]
    return json_text(alerts).encode()


def _secret(given: Secret | None, file: SecretFile | None) -> str | None:
    """A secret as configured, or the text of its file."""
    if given is not None:
        return given.reveal()
    if file is None:
        return None
    text = file.read()
    if not text or not text.isprintable():
        detail = f"{file.name} is empty or holds a character that no header can carry"
        raise RefusedError("unreachable", detail)
    return text
