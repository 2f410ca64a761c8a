"""Asks a server for its version, its longest request and its configuration, between the polls."""

import asyncio
import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Final, Self
from urllib.parse import urlsplit

from exporter.config import PollConfig, TargetConfig
from exporter.vllm.answers import MODELS, NO_ANSWERS, SERVER_INFO, VERSION, from_header, to_header
from exporter.vllm.client import MetricsClient

__all__ = ["Prober", "base_of", "header_of", "patient_client"]

log = logging.getLogger(__name__)

# The first /server_info of a server inspects its whole machine, which takes seconds.
PATIENCE_SECONDS: Final = 30.0
# An endpoint that broke off or timed out is asked again after this many good polls, this often in all.
AGAIN_AFTER_POLLS: Final = 60
TRIES: Final = 3
# Errors that waiting does not cure. Without development mode /server_info is a 404, without a key /v1 a 401.
_FINAL_ERRORS: Final = frozenset({"body_too_large", "protocol", "redirect"})


def base_of(url: str) -> str:
    """Return the path above a server's endpoints: ``/`` for ``/metrics``, ``/a/`` for ``/a/metrics``."""
    above = urlsplit(url).path.strip("/").rpartition("/")[0]
    return f"/{above}/" if above else "/"


async def header_of(client: MetricsClient, patient: MetricsClient) -> dict[str, Any]:
    """Ask a server about itself, for the header of a recording.

    Args:
        client: asks the quick questions.
        patient: asks for the configuration, once the server has answered those.

    Returns:
        Facts by path: ``{"/version": {"version": "0.26.0"}, "/v1/models": {"max_model_len": 2048}}``.
        Endpoints that do not answer are left out, and so is everything that is no fact.
    """
    version = await client.get_json(VERSION.lstrip("/"))
    if version.error is not None and not version.error.startswith("http_"):
        return {}  # the server is down or busy: the metrics matter more
    models = await client.get_json(MODELS.lstrip("/"))
    info = await patient.get_json(SERVER_INFO.lstrip("/"))
    return to_header(from_header({VERSION: version.value, MODELS: models.value, SERVER_INFO: info.value}))


def patient_client(target: TargetConfig, poll: PollConfig) -> MetricsClient:
    """Return a client that waits for ``/server_info``; opens no connection yet."""
    return MetricsClient(target, replace(poll, timeout=max(poll.timeout, PATIENCE_SECONDS)))


class Prober:
    """Asks a server for its configuration once per start of its engine, in a task of its own.

    The poller calls `note_good_poll` after each good poll, which costs nothing, and reads `answers`.
    """

    def __init__(self, client: MetricsClient, base: str = "/", name: str = "") -> None:
        """Begin with nothing known.

        Args:
            client: a client of its own: a poll must never wait for an answer to this one.
            base: as `base_of` returns it.
            name: of the target, for the log; empty if it is the only one.
        """
        self.answers = NO_ANSWERS  # those of this start of the server so far
        self._log_suffix = f" target={name}" if name else ""
        self._client = client
        self._base = base
        self._start: Hashable = None
        self._open: tuple[str, ...] = ()  # the paths without a final answer
        self._tries = 0
        self._polls = 0
        self._due = asyncio.Event()

    @classmethod
    def for_target(cls, target: TargetConfig, poll: PollConfig, name: str = "") -> Self:
        """Return a prober with a patient client for the target; opens no connection yet."""
        return cls(patient_client(target, poll), base_of(target.url), name)

    def note_good_poll(self, start: Hashable) -> None:
        """Schedule the questions that this start of the server has not answered yet.

        Args:
            start: changes when an engine restarts, for example the number of restarts. Not None.
        """
        if start != self._start:
            self._start = start
            self.answers = NO_ANSWERS  # its flags may have changed
            self._open = (VERSION, MODELS, SERVER_INFO)  # the slow one last
            self._tries = TRIES
            self._polls = 0
            self._due.set()
        elif self._open and self._tries:
            self._polls += 1
            if self._polls >= AGAIN_AFTER_POLLS:
                self._polls = 0
                self._due.set()

    async def refresh(self) -> None:
        """Ask the questions that are still open. Raises nothing but CancelledError."""
        start = self._start
        self._tries -= 1
        for path in self._open:
            value, error = await self._client.get_json(self._base + path.lstrip("/"))
            if start != self._start:  # the answer is from before a restart
                break
            if error is None or error.startswith("http_4") or error in _FINAL_ERRORS:
                self._open = tuple(other for other in self._open if other != path)
                self.answers = from_header({**to_header(self.answers), path: value})

    async def run(self) -> None:
        """Ask whenever questions are due, until cancelled. Raises nothing but CancelledError."""
        while True:
            await self._due.wait()
            self._due.clear()
            await self.refresh()
            answers = self.answers
            known = ",".join(sorted({*answers.models, *answers.server_info})) or "none"
            version = answers.version or "unknown"
            log.info("server configuration read version=%s facts=%s%s", version, known, self._log_suffix)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()
