"""Counts the steps and requests of a simulated run on the metrics page, as vLLM's own counters do."""

from collections.abc import Iterable
from dataclasses import replace

from exporter.simulation.counters import Counters
from exporter.simulation.in_flight import InFlight
from exporter.simulation.scheduler import Scheduler
from exporter.simulation.timing import NANOSECONDS
from exporter.standin.metrics_page import EngineFigures, Finished

__all__ = ["RunFigures"]


class RunFigures:
    """The figures of one engine's run."""

    def __init__(self, scheduler: Scheduler, figures: EngineFigures) -> None:
        """Count what this scheduler does from now on."""
        self._scheduler = scheduler
        self._figures = figures
        self._counted = Counters()
        self._outputs = 0  # tokens that `_count_token` counted since the last call of `advance`
        scheduler.on_context_complete = self._count_token

    def _count_token(self, live: InFlight) -> None:
        """Count the token of a request whose whole context has just been computed."""
        now = self._scheduler.now
        self._outputs += 1
        if live.first is None:
            seconds = (now - live.arrival) / NANOSECONDS
            self._figures.first_token(live.request.prompt_tokens, live.cached_tokens, seconds)
        else:
            self._figures.next_tokens(1, (now - live.stopped) / NANOSECONDS)

    def advance(self, ended: Iterable[InFlight]) -> None:
        """Count the steps since the last call, and the requests that ended with the last of them."""
        now, before = self._scheduler.totals, self._counted
        steps = now.steps - before.steps
        if steps:
            others = now.output_tokens - before.output_tokens - self._outputs
            self._figures.next_tokens(others, (now.busy - before.busy) / steps / NANOSECONDS)
            # Tokens that are computed again are in no counter of vLLM's.
            again = now.recomputed_tokens - before.recomputed_tokens
            tokens = now.scheduled_tokens - before.scheduled_tokens - again
            self._figures.steps(now.output_steps - before.output_steps, tokens)
        self._counted, self._outputs = replace(now), 0
        for live in ended:
            self._figures.finished(_finished(live))


def _finished(live: InFlight) -> Finished:
    """Describe a request that has ended, with times in seconds."""
    admitted, first = live.admitted or live.arrival, live.first or live.ended
    return Finished(
        prompt=live.request.prompt_tokens,
        output=live.outputs,
        computed=live.request.prompt_tokens - live.cached_tokens,
        queue=(admitted - live.arrival) / NANOSECONDS,
        first=(first - live.arrival) / NANOSECONDS,
        total=(live.ended - live.arrival) / NANOSECONDS,
        preemptions=live.preemptions,
    )
