"""A server that stands in for vLLM: the simulated scheduler in real time behind vLLM's endpoints.

For the demo, for trying dashboards and rules, and for load tests. The numbers are simulated; the format is
that of a real server, see `exporter.standin.metrics_page`.
"""

import asyncio
import time
from typing import Any, Final

from aiohttp import web

from exporter.config import Fact, arguments
from exporter.simulation.run import Run
from exporter.simulation.timing import nanoseconds
from exporter.standin.metrics_page import EngineFigures, MetricsPage
from exporter.standin.run_figures import RunFigures
from exporter.standin.scenarios import SCENARIOS, Life, Scenario, Server, arrivals_of, lives
from exporter.standin.site import Site

__all__ = ["FakeServer", "Play"]

# The simulation advances this often while nobody polls: a scrape after an hour must not wait for that hour.
_TICK_SECONDS: Final = 0.25
_CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"


class _Player:
    """One engine of one process: its simulation, and its figures on the metrics page."""

    def __init__(self, life: Life, number: int, seed: int, figures: EngineFigures) -> None:
        self._run = Run(life.server.engine, arrivals_of(life, number, seed))
        self._figures = figures
        self._counts = RunFigures(self._run.scheduler, figures)

    def until(self, at: int) -> None:
        """Advance to a time in nanoseconds since the start of the process."""
        ended = None
        while ended is None or ended:
            ended = self._run.until(at)
            self._counts.advance(ended)
        scheduler = self._run.scheduler
        self._figures.gauges(scheduler.running, scheduler.waiting, scheduler.kv_usage)
        self._figures.preempted(scheduler.totals.preemptions_counted)


class Play:
    """A scenario, played: the server's responses at any time. Reads no clock."""

    def __init__(self, scenario: Scenario, version: str, model: str, seed: int, origin: float) -> None:
        """Prepare: `version` is one of `metrics_page.VERSIONS`, `origin` the unix seconds of the start."""
        self._lives = lives(scenario)
        self._version = version
        self._model = model
        self._seed = seed
        self._origin = origin
        self._begin(next(self._lives))

    def _begin(self, life: Life) -> None:
        self._life = life
        self.server = server = life.server  # the settings of the process that responds, or will respond next
        self._page = MetricsPage(
            self._version,
            self._model,
            self._origin + life.start,
            max_model_len=server.engine.max_model_len or 0,
            cache=_cache_labels(server),
            engines=server.engines,
        )
        self._players = [
            _Player(life, number, self._seed, figures) for number, figures in enumerate(self._page.engines)
        ]

    def at(self, seconds: float) -> bool:
        """Advance to a time since the start, never back; returns whether the server responds then."""
        while self._life.end is not None and seconds >= self._life.end:
            self._begin(next(self._lives))
        if seconds < self._life.start:
            return False
        for player in self._players:
            player.until(nanoseconds(seconds - self._life.start))
        return True

    def body(self, seconds: float) -> bytes | None:
        """Return the metrics page at a time, None while the server is down."""
        return self._page.body(self._origin + seconds) if self.at(seconds) else None

    def facts(self) -> dict[str, Fact]:
        """Return the server's settings by vLLM's flag names."""
        engine = self.server.engine
        return {
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_model_len": engine.max_model_len or 0,
            "block_size": engine.block_size,
            "tensor_parallel_size": self.server.gpus,
            "watermark": engine.watermark,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "enable_chunked_prefill": engine.enable_chunked_prefill,
            "scheduler_reserve_full_isl": engine.reserve_full_prompt,
            "scheduling_policy": engine.policy,
            "async_scheduling": engine.async_scheduling,
            "data_parallel_size": self.server.engines,
        }


def _cache_labels(server: Server) -> dict[str, str]:
    """Return labels of ``cache_config_info``: blocks are the sum of all engines, tokens those of one."""
    engine = server.engine
    tokens = engine.num_gpu_blocks * engine.block_size
    return {
        "block_size": str(engine.block_size),
        "effective_attention_block_size": str(engine.block_size),
        "enable_prefix_caching": str(engine.enable_prefix_caching),
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": str(tokens),
        "kv_cache_max_concurrency": str(round(tokens / (engine.max_model_len or tokens), 3)),
        "num_gpu_blocks": str(engine.num_gpu_blocks * server.engines),
        "num_gpu_blocks_override": "None",
        "user_specified_block_size": "False",
    }


class FakeServer:
    """Serves a play on its own port, which is closed while the play's server is down."""

    def __init__(self, scenario: str, *, host: str, port: int, version: str, model: str, seed: int) -> None:
        """Prepare, without opening anything; arguments as of `Play`, port 0 is any free one."""
        self._model = model
        self._start = time.monotonic()
        self.play = Play(SCENARIOS[scenario], version, model, seed, time.time())
        self._task: asyncio.Task[None] | None = None
        json = web.json_response
        responses = {
            "/metrics": self._metrics,
            "/health": web.Response,
            "/ping": web.Response,
            "/version": lambda: json({"version": version}),
            "/v1/models": lambda: json({"object": "list", "data": [self._card()]}),
            "/server_info": lambda: json({"vllm_config": arguments.fields_of(self.play.facts())}),
        }
        self._site = Site(responses, host, port)

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    async def start(self) -> str:
        """Listen, and return the base URL; raises OSError where the port cannot be listened on."""
        url = await self._site.open()
        self._task = asyncio.create_task(self._live())
        return url

    async def stop(self) -> None:
        """End the play and close the port."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._site.close()

    async def _live(self) -> None:
        """Advance while nobody polls; open and close the port with the play's server."""
        while True:
            if self.play.at(self._elapsed()):
                await self._site.open()
            else:
                await self._site.close()
            await asyncio.sleep(_TICK_SECONDS)

    def _metrics(self) -> web.Response:
        body = self.play.body(self._elapsed())
        if body is None:
            return web.Response(status=503)
        return web.Response(body=body, headers={"Content-Type": _CONTENT_TYPE})

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self._model,
            "parent": None,
            "permission": [],
            "max_model_len": self.play.server.engine.max_model_len,
        }
