"""``/api/v1/whatif``: forecasts on request, each in a process of its own, one at a time."""

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
    """Forecasts the effect of each fix. Nothing runs without a request."""

    def __init__(self, status: Callable[..., Mapping[str, Any]], config: WhatIfConfig) -> None:
        """Prepare; `status` returns the state of the target of a name and may raise LookupError."""
        self._status = status
        self.config = config  # thresholds, and the time limit of a forecast
        self._process: asyncio.subprocess.Process | None = None
        self._busy = False

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one GET: the forecast for ``?engine=NAME``, by default for the engine that preempts most.

        With several targets ``?target=HOST:PORT`` chooses one.
        """
        if self._busy:
            return _error(429, "another forecast is under way", **{"Retry-After": "10"})
        self._busy = True
        try:
            return await self._answer(request.query.get("engine"), request.query.get("target"))
        finally:
            self._busy = False

    async def _answer(self, name: str | None, target: str | None = None) -> web.Response:
        try:
            document = self._status() if target is None else self._status(target)
            chosen, engine = choose_engine(document["targets"][0], name)
        except LookupError as problem:
            return _error(404, str(problem))
        limit = self.config.time_limit
        try:
            status = {key: engine.get(key) for key in ("load", "limits")}
            question = {"engine": chosen, "status": status, "limits": asdict(self.config)}
            forecast = await asyncio.wait_for(self._run(json.dumps(question).encode()), limit)
        except TimeoutError:
            return _error(504, f"the forecast took longer than {limit:g} s (whatif.time_limit)")
        if forecast is None:
            return _error(500, "the forecast failed; see the exporter's log")
        if "error" in forecast:
            return _error(409, forecast["error"])
        return web.json_response(forecast, headers=_HEADERS)

    async def _run(self, question: bytes) -> dict[str, Any] | None:
        """Run `exporter.simulation.worker` as a process, which does not outlive the request."""
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "exporter.simulation.worker", stdin=pipe, stdout=pipe, stderr=pipe
        )
        try:
            out, err = await process.communicate(question)
        finally:
            await self.stop()
        if process.returncode:
            error = err[-500:].decode(errors="replace")
            log.error("forecast failed status=%d error=%r", process.returncode, error)
            return None
        forecast: dict[str, Any] = json.loads(out)
        return forecast

    async def stop(self) -> None:
        """End the forecast under way, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _error(status: int, why: str, **headers: str) -> web.Response:
    return web.json_response({"error": why}, status=status, headers={**_HEADERS, **headers})
