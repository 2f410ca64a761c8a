"""The page of a simulated run counts what vLLM counts: no token twice, whatever was computed again."""

from exporter.simulation.arrivals import Trace
from exporter.simulation.run import Run
from exporter.simulation.settings import Engine
from exporter.simulation.timing import nanoseconds
from exporter.simulation.workload import Request
from exporter.standin.metrics_page import MetricsPage
from exporter.standin.run_figures import RunFigures
from exporter.vllm.exposition import Reader

PROMPT, ANSWER, REQUESTS = 100, 150, 6


def run_to_the_end(blocks):
    """Six requests of 250 tokens on a pool; the totals, and what the page says of them."""
    engine = Engine(num_gpu_blocks=blocks + 1, block_size=16, enable_prefix_caching=False)
    run = Run(engine, Trace(Request(n, PROMPT, ANSWER, arrival=0) for n in range(REQUESTS)))
    page = MetricsPage("0.32.0", "m", 0.0, max_model_len=1000, cache={}, engines=1)
    counts = RunFigures(run.scheduler, page.engines[0])
    finished = 0
    while finished < REQUESTS:
        ended = run.until(nanoseconds(3600))
        finished += len(ended)
        counts.advance(ended)
    (snapshot,) = Reader().read(page.body(3600.0)).engines.values()
    return run.scheduler.totals, snapshot.values, page.body(3600.0).decode()


def tokens_of_steps(body):
    """The sum of ``iteration_tokens_total``."""
    (line,) = (line for line in body.splitlines() if line.startswith("vllm:iteration_tokens_total_sum"))
    return round(float(line.split()[1]))


def test_tokens_that_are_computed_again_are_in_no_step():
    """With preemptions the steps sum up to what they do without: each prompt and each answer once."""
    roomy, _, calm = run_to_the_end(blocks=100)
    tight, values, storm = run_to_the_end(blocks=40)
    assert (roomy.recomputed_tokens, tight.recomputed_tokens > 100) == (0, True)
    assert tokens_of_steps(storm) == tokens_of_steps(calm) == REQUESTS * (PROMPT + ANSWER - 1)
    assert values["prompt_tokens"] == REQUESTS * PROMPT
    assert values["generation_tokens"] == REQUESTS * ANSWER


def test_preempted_requests_are_counted_with_their_latency():
    """Each token of an answer but the first is one observation of the time between tokens."""
    _, values, _ = run_to_the_end(blocks=40)
    assert values["inter_token_count"] == REQUESTS * (ANSWER - 1)
    assert values["requests_finished"] == REQUESTS
