"""Simulates one run: requests arrive, the engine steps, and the results are summed up."""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from exporter.simulation.arrivals import Arrivals
from exporter.simulation.counters import Counters, LatencyHistogram
from exporter.simulation.in_flight import InFlight
from exporter.simulation.scheduler import Scheduler
from exporter.simulation.settings import Engine
from exporter.simulation.timing import NANOSECONDS
from exporter.simulation.workload import Request

__all__ = ["Arrival", "Gate", "Result", "Run", "simulate"]

Arrival = tuple[Request, int]


class Gate(Protocol):
    """Keeps requests back, in front of the scheduler, until what they need is there."""

    @property
    def deferred(self) -> int:
        """Requests kept back."""

    def enter(self, request: Request, at: int) -> None:
        """Take in a request that arrives at a time in nanoseconds."""

    def next_at(self) -> int | None:
        """Return when the next request may pass, or None where that depends on the scheduler alone."""

    def release(self, now: int) -> list[Arrival]:
        """Let out the requests that may pass now, each with the time of its arrival."""

    def holds(self, number: int) -> bool:
        """Return whether a request is kept back here."""

    def left(self, number: int) -> None:
        """Forget a request that left the scheduler or whose client gave up."""


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run after the warm-up; times in simulated seconds, None if no request finished."""

    preemptions: int  # counted when they happen
    engine_steps: int  # that generated a token, as vLLM's ``iteration_tokens_total_count``
    kv_peak_ratio: float  # share of the usable blocks held, highest after a step
    recomputed_tokens: int  # computed again after a preemption
    output_tokens: int
    kv_mean_ratio: float
    steps: int  # all, including those that only computed a part of a context
    scheduled_tokens: int  # computed, prompt and output
    scheduled_sequences: int  # sum over the steps of the requests scheduled in each
    cached_tokens: int  # of prompts, found in the prefix cache at first admission
    swapped_out: int  # blocks copied over PCIe (recovery ``swap``)
    swapped_in: int
    finished: int
    preempted_requests: int  # finished after a preemption
    aborted: int  # the client gave up
    refused: int  # the prompt was too long
    unfinished: int  # left at the end
    seconds: float
    busy_seconds: float  # in steps
    output_tokens_per_second: float
    running_mean: float  # over time
    waiting_mean: float
    queue_mean: float | None  # until first admission
    queue_p95: float | None
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    inter_token_mean: float | None  # between two tokens of a request, stalls by preemption included
    e2e_mean: float | None
    e2e_p50: float | None
    e2e_p95: float | None
    unfittable: int  # requests whose full length exceeds the pool
    stuck: str | None  # why the engine stopped before all requests had finished


class _Meter:
    """Measures a run from now on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._since = scheduler.now
        self._before = scheduler.totals
        self._totals = scheduler.totals = Counters()
        self.queue, self.ttft, self.e2e = LatencyHistogram(), LatencyHistogram(), LatencyHistogram()
        self.preempted_requests = 0
        self._gaps = self._gap_time = 0

    def finished(self, live: InFlight) -> None:
        """Add a request that finished."""
        if live.admitted is not None and live.first is not None:
            self.queue.add(live.admitted - live.arrival)
            self.ttft.add(live.first - live.arrival)
            self._gaps += live.outputs - 1
            self._gap_time += live.ended - live.first
        self.e2e.add(live.ended - live.arrival)
        self.preempted_requests += live.preemptions > 0

    def result(self, stuck: str | None) -> Result:
        """Return the results."""
        t, scheduler = self._totals, self._scheduler
        size, elapsed = scheduler.pool.size, scheduler.now - self._since
        time = elapsed or 1
        return Result(
            preemptions=t.preemptions,
            engine_steps=t.output_steps,
            kv_peak_ratio=t.peak / size,
            recomputed_tokens=t.recomputed_tokens,
            output_tokens=t.output_tokens,
            kv_mean_ratio=t.held_time / time / size,
            steps=t.steps,
            scheduled_tokens=t.scheduled_tokens,
            scheduled_sequences=t.scheduled_sequences,
            cached_tokens=t.cached_tokens,
            swapped_out=t.swapped_out,
            swapped_in=t.swapped_in,
            finished=self.e2e.count,
            preempted_requests=self.preempted_requests,
            aborted=t.aborted,
            refused=t.refused,
            unfinished=scheduler.running + scheduler.waiting,
            seconds=elapsed / NANOSECONDS,
            busy_seconds=t.busy / NANOSECONDS,
            output_tokens_per_second=t.output_tokens * NANOSECONDS / time,
            running_mean=t.running_time / time,
            waiting_mean=t.waiting_time / time,
            queue_mean=_seconds(self.queue.mean),
            queue_p95=_seconds(self.queue.quantile(0.95)),
            ttft_mean=_seconds(self.ttft.mean),
            ttft_p50=_seconds(self.ttft.quantile(0.5)),
            ttft_p95=_seconds(self.ttft.quantile(0.95)),
            inter_token_mean=_seconds(self._gap_time / self._gaps if self._gaps else None),
            e2e_mean=_seconds(self.e2e.mean),
            e2e_p50=_seconds(self.e2e.quantile(0.5)),
            e2e_p95=_seconds(self.e2e.quantile(0.95)),
            unfittable=t.unfittable + self._before.unfittable,
            stuck=stuck,
        )


def _seconds(value: float | None) -> float | None:
    return None if value is None else value / NANOSECONDS


class Run:
    """A run that can be taken in pieces, `until` a time or to its end."""

    def __init__(
        self, engine: Engine, arrivals: Arrivals, gate_for: Callable[[Scheduler], Gate] | None = None
    ) -> None:
        # The engine; its counters, gauges and time may be read between the pieces.
        self.scheduler = Scheduler(engine)
        # Keeps requests back before the scheduler sees them, or None.
        self.gate = gate_for(self.scheduler) if gate_for is not None else None
        self.stuck: str | None = None  # Why nothing can ever move again, or None
        self._arrivals = arrivals
        self._deadlines: list[tuple[int, int]] = []

    def until(self, end: int | None) -> list[InFlight]:
        """Run until requests finish, a time (nanoseconds) is reached, or nothing is left to do.

        Returns:
            The requests that finished; empty if the time was reached or nothing will ever happen again.
        """
        scheduler, arrivals = self.scheduler, self._arrivals
        while not scheduler.finished and (end is None or scheduler.now < end):
            if scheduler.effort >= scheduler.most_effort:
                break
            self._let_in()
            if not scheduler.idle and scheduler.advance(self._next(end)):
                self.stuck = None
                continue
            self.stuck = scheduler.stuck()
            following = self._next(end)
            if following is None:
                break
            scheduler.now = scheduler.sees = max(following, scheduler.now)
        ended, scheduler.finished = scheduler.finished, []
        for live in ended:
            arrivals.left(live.ended)
            if self.gate is not None:
                self.gate.left(live.request.id)
        return ended

    def _next(self, end: int | None) -> int | None:
        """Return the time of the next event outside the engine."""
        moments = [at for at in (self._arrivals.next_at(), end) if at is not None]
        if self.gate is not None and (passing := self.gate.next_at()) is not None:
            moments.append(passing)
        while self._deadlines and not self._holds(self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
        if self._deadlines:
            moments.append(self._deadlines[0][0])
        return min(moments, default=None)

    def _holds(self, number: int) -> bool:
        return self.scheduler.holds(number) or (self.gate is not None and self.gate.holds(number))

    def _let_in(self) -> None:
        """Pass on what the engine can see: clients that gave up, then new requests."""
        scheduler, arrivals, gate = self.scheduler, self._arrivals, self.gate
        while self._deadlines and self._deadlines[0][0] <= scheduler.sees:
            _, number = heapq.heappop(self._deadlines)
            if scheduler.abort(number) or (gate is not None and gate.holds(number)):
                arrivals.left(scheduler.now)
                if gate is not None:
                    gate.left(number)
        # Clients whose requests are all refused send again at once: only the effort ends that.
        while (at := arrivals.next_at()) is not None and at <= scheduler.sees:
            if scheduler.effort >= scheduler.most_effort:
                break
            request = arrivals.take()
            if request.abort_after is not None:
                heapq.heappush(self._deadlines, (at + request.abort_after, request.id))
            if gate is None:
                self._add(request, at)
            else:
                gate.enter(request, at)
        if gate is not None:
            for request, at in gate.release(scheduler.sees):
                self._add(request, at)

    def _add(self, request: Request, at: int) -> None:
        if self.scheduler.add(request, at) is None:
            self._arrivals.left(self.scheduler.now)


def simulate(
    engine: Engine,
    arrivals: Arrivals,
    *,
    warm_up: int | None = None,
    end: int | None = None,
    effort: float = math.inf,
) -> Result:
    """Run a workload and measure it after the ``warm_up``.

    It stops at the ``end`` (both in nanoseconds), when all requests have finished or none ever can, or when
    it has taken the ``effort``: steps simulated one by one, and a share per request and shared block. The
    warm-up may take a third of it.
    """
    run = Run(engine, arrivals)
    if warm_up:
        run.scheduler.most_effort = effort / 3
        while run.until(warm_up):
            pass
    run.scheduler.most_effort = effort
    meter = _Meter(run.scheduler)
    while ended := run.until(end):
        for live in ended:
            meter.finished(live)
    return meter.result(run.stuck)
