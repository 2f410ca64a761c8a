"""Small engines with heavy loads, for properties: drawn by hypothesis, replayable from their arguments."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from exporter.simulation.arrivals import Burst, ClosedLoop, Poisson, Trace
from exporter.simulation.rng import Rng
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import Request


@dataclass(frozen=True)
class Case:
    """An engine, its requests and their arrivals."""

    engine: Engine
    requests: tuple[Request, ...]
    kind: str
    parameter: int

    def arrivals(self):
        """Return new arrivals, the same at each call."""
        if self.kind == "burst":
            return Burst(self.requests)
        if self.kind == "closed":
            return ClosedLoop(self.requests, 1 + self.parameter % 6, pause=self.parameter % 3 * 500)
        if self.kind == "poisson":
            return Poisson(self.requests, 200_000.0, Rng(self.parameter))
        return Trace(replace(r, arrival=r.id * (self.parameter % 3000)) for r in self.requests)


@st.composite
def engines(draw):
    """Draw engines of a few dozen blocks, with every setting that has an effect."""
    seats = draw(st.integers(1, 12))
    return Engine(
        num_gpu_blocks=draw(st.integers(2, 60)),
        block_size=draw(st.sampled_from([1, 2, 4, 8, 16])),
        max_num_seqs=seats,
        max_num_batched_tokens=seats + draw(st.sampled_from([0, 1, 7, 20, 2000])),
        max_model_len=draw(st.sampled_from([None, None, 30, 100])),
        watermark=draw(st.sampled_from([0.0, 0.05, 0.2])),
        enable_prefix_caching=draw(st.booleans()),
        reserve_full_prompt=draw(st.sampled_from([True, True, False])),
        enable_chunked_prefill=draw(st.sampled_from([True, True, True, False])),
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
        async_scheduling=draw(st.booleans()),
        recovery=draw(st.sampled_from(["recompute", "recompute", "swap"])),
        swap_blocks=draw(st.sampled_from([0, 5, 100])),
        step_time=StepTime(
            draw(st.sampled_from([0, 777, 1000])),
            draw(st.sampled_from([0, 3, 10])),
            draw(st.sampled_from([0, 7])),
            draw(st.sampled_from([0, 50])),
        ),
    )


@st.composite
def cases(draw):
    """Draw a case; most requests fit, some never can, clients give up, prompts share texts."""
    engine = draw(engines())
    tokens = engine.block_size * engine.usable_blocks
    longest = max(1, tokens * draw(st.sampled_from([10, 15, 30, 50])) // 100)
    requests = []
    for number in range(draw(st.integers(1, 25))):
        prompt = draw(st.integers(1, longest))
        prefix = draw(st.sampled_from([None, "a", "b"]))
        requests.append(
            Request(
                number,
                prompt,
                draw(st.integers(1, longest)),
                arrival=0,
                priority=draw(st.integers(0, 2)),
                prefix=prefix,
                prefix_tokens=draw(st.integers(0, prompt)) if prefix else 0,
                abort_after=draw(st.sampled_from([None, None, None, 0, 2_500, 20_000])),
            )
        )
    kind = draw(st.sampled_from(["burst", "closed", "poisson", "trace"]))
    return Case(engine, tuple(requests), kind, draw(st.integers(0, 10_000)))


def check_pool(pool):
    """Free blocks are exactly the blank and the cached ones."""
    assert pool.free == pool._blank + sum(entry.blocks for entry in pool._queue)
    assert 0 <= pool.free <= pool.size
