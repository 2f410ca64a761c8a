"""The loads: a quiet lead with few clients, then many, each of which sends one request after the other."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

from bench.real.server import MODEL, Settings

__all__ = ["LOADS", "Load", "play"]

_LEAD_CLIENTS = 3
_VOCABULARY = 2048
_SPECIAL_TOKENS = 4


@dataclass(frozen=True)
class Load:
    """A load and the server that it meets."""

    settings: Settings
    clients: int
    prompts: tuple[int, int]  # tokens, least and most
    outputs: tuple[int, int]
    verdicts: frozenset[str]  # each is right at its end
    tolerance: float  # of ratios between two runs; the tiny model's speed moves more
    changes: tuple[str, ...]  # besides the advised one, as ``whatif --try`` reads them

    def requests(self, seed: int) -> Iterator[tuple[int, int]]:
        """Yield lengths of prompts and answers."""
        rng = random.Random(seed)
        while True:
            yield rng.randint(*self.prompts), rng.randint(*self.outputs)


_PREEMPTS = frozenset({"preemption_thrash", "preemption_light"})
LOADS = {
    "storm": Load(
        Settings("tiny", 200, 32), 32, (50, 300), (400, 1000), _PREEMPTS, 0.25, ("seats=8", "pool=x2")
    ),
    "prompts": Load(
        Settings("mid", 200, 32),
        24,
        (500, 1100),
        (60, 240),
        _PREEMPTS | {"prefill_bound", "kv_bound"},
        0.1,
        ("seats=6", "pool=x2"),
    ),
    "seats": Load(
        Settings("tiny", 1500, 8), 32, (50, 300), (200, 600), frozenset({"seat_bound"}), 0.25, ("seats=16",)
    ),
}


def play(url: str, load: Load, clients: int, lead: float, seconds: float) -> None:
    """Play the lead, then the load, each for some seconds; requests under way at the end are given up."""
    asyncio.run(_clients(url, load, _LEAD_CLIENTS, lead, 3))
    asyncio.run(_clients(url, load, clients, seconds, 7))


async def _clients(url: str, load: Load, clients: int, seconds: float, seed: int) -> None:
    requests, rng = load.requests(seed), random.Random(seed)
    end = time.monotonic() + seconds
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:

        async def client() -> None:
            while time.monotonic() < end:
                prompt, output = next(requests)
                tokens = [rng.randrange(_SPECIAL_TOKENS, _VOCABULARY) for _ in range(prompt)]
                exact = {"max_tokens": output, "min_tokens": output, "ignore_eos": True}
                body = {"model": MODEL, "prompt": tokens, **exact}
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    await answer.read()

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        _, running = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in running:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
