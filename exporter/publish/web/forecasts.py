"""``/api/v1/whatif``: a forecast when somebody asks for one, in a process of its own, one at a time."""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from exporter.config import WhatIfConfig
from exporter.publish.status import choose_engine

__all__ = ["PATH", "Forecasts"]

log = logging.getLogger(__name__)

PATH: Final = "/api/v1/whatif"
_HEADERS: Final = {"Cache-Control": "no-store"}


class Forecasts:
    """Answers the question what each fix would do. Nothing runs while nobody asks."""

    def __init__(self, status: Callable[..., Mapping[str, Any]], config: WhatIfConfig) -> None:
        """Prepare.

        Args:
            status: the state now, with what was asked of the engines; of the target of a name where one is
                asked for. May raise LookupError.
            config: thresholds, and how long a forecast may take.
        """
        self._status = status
        self.config = config
        self._process: asyncio.subprocess.Process | None = None
        self._busy = False

    async def answer(self, request: web.Request) -> web.Response:
        """One GET: the forecast for ``?engine=NAME``, for the engine that preempts most without it.

        Where there are several targets ``?target=HOST:PORT`` says whose.
        """
        if self._busy:
            return _refused(429, "a forecast is under way; one is made at a time", {"Retry-After": "10"})
        self._busy = True
        try:
            return await self._answer(request.query.get("engine"), request.query.get("target"))
        finally:
            self._busy = False

    async def _answer(self, name: str | None, target: str | None = None) -> web.Response:
        try:
            told = self._status() if target is None else self._status(target)
            chosen, engine = choose_engine(told["targets"][0], name)
        except LookupError as problem:
            return _refused(404, str(problem))
        limit = self.config.time_limit
        try:
            found = await asyncio.wait_for(self._ask(_question(chosen, engine, self.config)), limit)
        except TimeoutError:
            return _refused(504, f"the forecast took longer than {limit:g} s (whatif.time_limit)")
        if found is None:
            return _refused(500, "the forecast failed; the log says why")
        if "error" in found:
            return _refused(409, found["error"])
        return web.json_response(found, headers=_HEADERS)

    async def _ask(self, asked: bytes) -> dict[str, Any] | None:
        """Let a process of its own do it; it does not outlive the question."""
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "exporter.simulation.worker", stdin=pipe, stdout=pipe, stderr=pipe
        )
        try:
            out, err = await process.communicate(asked)
        finally:
            await self.stop()
        if process.returncode:
            log.error(
                "forecast failed status=%d error=%r", process.returncode, err[-500:].decode(errors="replace")
            )
            return None
        told: dict[str, Any] = json.loads(out)
        return told

    async def stop(self) -> None:
        """End the forecast under way, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _question(name: str, engine: Mapping[str, Any], limits: WhatIfConfig) -> bytes:
    """What `exporter.simulation.worker` is asked as a process. It is not imported: nobody may ever ask."""
    asked = {key: engine.get(key) for key in ("load", "limits")}
    return json.dumps({"engine": name, "status": asked, "limits": asdict(limits)}).encode()


def _refused(status: int, why: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": why}, status=status, headers={**_HEADERS, **(headers or {})})
