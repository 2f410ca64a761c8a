"""``/api/v1/whatif``: the last forecast of an engine; each is made by a process of its own, one at a time."""

import asyncio
import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from exporter.config import WhatIfConfig
from exporter.publish.json_text import json_text
from exporter.publish.status import choose_engine

__all__ = ["PATH", "Forecasts"]

log = logging.getLogger(__name__)

PATH: Final = "/api/v1/whatif"
_KEPT_SECONDS: Final = 600.0
_MOST_KEPT: Final = 64
_LOOK_EVERY: Final = 0.5  # at the client
_HEADERS: Final = {"Cache-Control": "no-store"}


class Forecasts:
    """Forecasts the effect of each fix, one at a time, and keeps the last one of each engine."""

    def __init__(
        self, status: Callable[..., Mapping[str, Any]], config: WhatIfConfig, clock: Callable[[], float]
    ) -> None:
        """Prepare; `status` returns the state of the target of a name and may raise LookupError."""
        self._status = status
        self.config = config  # thresholds, and the time limit of a forecast
        # Called with each forecast: its target, its engine, when it was requested, and the document.
        self.made: Callable[[str, str, float, Mapping[str, Any]], None] | None = None
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._last: dict[tuple[str, str], tuple[float, Mapping[str, Any]]] = {}

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one GET: the forecast for ``?engine=NAME``, by default for the engine that preempts most.

        With several targets ``?target=HOST:PORT`` chooses one. The last forecast is shown with its age; a new
        one is made where there is none, or it is old.
        """
        target, name = request.query.get("target"), request.query.get("engine")
        try:
            document = self._status() if target is None else self._status(target)
            chosen, engine = choose_engine(document["targets"][0], name)
        except LookupError as problem:
            return _error(404, str(problem))
        at, known = self._last.get((target or "", chosen), (-math.inf, {}))
        age = self._clock() - at
        if age < _KEPT_SECONDS:
            return web.json_response({**known, "age_seconds": round(age, 3)}, headers=_HEADERS)
        if self._lock.locked():
            return _error(429, "another forecast is under way", **{"Retry-After": "10"})
        status = {key: engine.get(key) for key in ("load", "limits", "fixes")}
        async with self._lock:
            making = asyncio.create_task(self._make(target or "", chosen, status, self._clock()))
            try:
                while not making.done() and request.transport is not None:  # None: the client is gone
                    await asyncio.wait([making], timeout=_LOOK_EVERY)
            finally:
                making.cancel()
                await asyncio.wait([making])
        if making.cancelled():
            return _error(503, "the client is gone")
        forecast = making.result()
        code = forecast.get("status")
        if code is not None:
            return _error(code, forecast["error"])
        return web.json_response({**forecast, "age_seconds": 0.0}, headers=_HEADERS)

    async def make(self, target: str, name: str, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """Simulate an engine by its status; the result of a failure has an ``error`` and a ``status``."""
        at = self._clock()  # it is as old as the status, however long it takes
        async with self._lock:
            return await self._make(target, name, status, at)

    async def _make(self, target: str, name: str, status: Mapping[str, Any], at: float) -> Mapping[str, Any]:
        limit = self.config.time_limit
        request = {"engine": name, "status": status, "limits": asdict(self.config)}
        forecast: Mapping[str, Any] | None
        try:
            forecast = await asyncio.wait_for(self._run(json_text(request).encode()), limit)
        except TimeoutError:
            why = f"the forecast took longer than {limit:g} s (whatif.time_limit)"
            forecast = {"error": why, "status": 504}
        if forecast is None:
            forecast = {"error": "the forecast failed; see the exporter's log", "status": 500}
        elif "error" in forecast:
            forecast = {"status": 409, **forecast}
        else:
            self._keep(target, name, at, forecast)
        if self.made is not None:
            self.made(target, name, at, forecast)
        return forecast

    def _keep(self, target: str, name: str, at: float, forecast: Mapping[str, Any]) -> None:
        self._last[target, name] = at, forecast
        while len(self._last) > _MOST_KEPT:
            del self._last[next(iter(self._last))]

    async def _run(self, question: bytes) -> dict[str, Any] | None:
        """Run `exporter.simulation.worker` as a process, which does not outlive the request."""
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "exporter.simulation.worker", stdin=pipe, stdout=pipe, stderr=pipe
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
