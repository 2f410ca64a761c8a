"""One simulated run: requests arrive, the engine steps, what came of it is summed up."""

import heapq
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from exporter.simulation.arrivals import Arrivals
from exporter.simulation.counters import Totals
from exporter.simulation.gates import Gate
from exporter.simulation.in_flight import Live
from exporter.simulation.latency_histogram import Spread
from exporter.simulation.scheduler import Scheduler
from exporter.simulation.settings import Engine
from exporter.simulation.timing import NANOSECONDS
from exporter.simulation.workload import Request

__all__ = ["Result", "Run", "simulate"]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run, from the end of the warm-up on; times in seconds of simulated time.

    Attributes:
        preemptions: Preemptions, counted when they happen.
        engine_steps: Steps that put out a token, as vLLM's ``iteration_tokens_total_count``.
        kv_peak_ratio, kv_mean_ratio: Share of the usable blocks held, at most after a step, and over time.
        recomputed_tokens: Tokens computed a second time because a preemption lost them.
        output_tokens: Tokens put out.
        steps: All steps, those that only computed a part of a context included.
        scheduled_tokens: Tokens computed, prompt and output.
        scheduled_sequences: Sum over the steps of the requests scheduled in each.
        cached_tokens: Prompt tokens found in the prefix cache at first admission.
        swapped_out, swapped_in: Blocks copied over PCIe (recovery ``swap``).
        finished, preempted_requests, aborted, refused, unfinished: Requests: ended, those of them that had
            been preempted at least once, given up by their clients, refused for their length, left over.
        seconds, busy_seconds: Time, and time spent in steps.
        running_mean, waiting_mean: Requests, averaged over time.
        queue_mean, ttft_mean, e2e_mean, ...: Arrival to first admission, to first token, to the end;
            None where nothing finished.
        unfittable: Requests that the whole pool cannot hold at full length.
        stuck: Why the engine stopped for good before the work was done, or None.
    """

    preemptions: int
    engine_steps: int
    kv_peak_ratio: float
    recomputed_tokens: int
    output_tokens: int
    kv_mean_ratio: float
    steps: int
    scheduled_tokens: int
    scheduled_sequences: int
    cached_tokens: int
    swapped_out: int
    swapped_in: int
    finished: int
    preempted_requests: int
    aborted: int
    refused: int
    unfinished: int
    seconds: float
    busy_seconds: float
    output_tokens_per_second: float
    running_mean: float
    waiting_mean: float
    queue_mean: float | None
    queue_p95: float | None
    ttft_mean: float | None
    ttft_p95: float | None
    e2e_mean: float | None
    e2e_p50: float | None
    e2e_p95: float | None
    unfittable: int
    stuck: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object would have them."""
        return asdict(self)


class _Meter:
    """Sums up from some moment on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._since = scheduler.now
        self._before = scheduler.totals
        self._totals = scheduler.totals = Totals()
        self.queue, self.ttft, self.e2e = Spread(), Spread(), Spread()
        self.preempted_requests = 0

    def finished(self, live: Live) -> None:
        """Take note of a request that ended."""
        if live.admitted is not None and live.first is not None:
            self.queue.add(live.admitted - live.arrival)
            self.ttft.add(live.first - live.arrival)
        self.e2e.add(live.ended - live.arrival)
        self.preempted_requests += live.preemptions > 0

    def result(self, stuck: str | None) -> Result:
        """Sum up."""
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
            ttft_p95=_seconds(self.ttft.quantile(0.95)),
            e2e_mean=_seconds(self.e2e.mean),
            e2e_p50=_seconds(self.e2e.quantile(0.5)),
            e2e_p95=_seconds(self.e2e.quantile(0.95)),
            unfittable=t.unfittable + self._before.unfittable,
            stuck=stuck,
        )


def _seconds(value: float | None) -> float | None:
    return None if value is None else value / NANOSECONDS


class Run:
    """A run that can be taken in pieces: `until` a time, or to its end.

    Attributes:
        scheduler: The engine; its totals, gauges and time may be read between the pieces.
        gate: What keeps requests back before the scheduler sees them, if anything does.
        stuck: Why nothing can move any more, once that is so.
    """

    def __init__(
        self, engine: Engine, arrivals: Arrivals, gate_for: Callable[[Scheduler], Gate] | None = None
    ) -> None:
        self.scheduler = Scheduler(engine)
        self.gate = gate_for(self.scheduler) if gate_for is not None else None
        self.stuck: str | None = None
        self._arrivals = arrivals
        self._deadlines: list[tuple[int, int]] = []

    def until(self, end: int | None) -> list[Live]:
        """Go on until something ends, a time (nanoseconds) has come, or nothing is left; return what ended.

        An empty list means that the time has come, or that nothing will ever happen again.
        """
        scheduler, arrivals = self.scheduler, self._arrivals
        while not scheduler.finished and (end is None or scheduler.now < end):
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
        """Return the next moment at which the world outside does something."""
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
        """Hand over what the engine can see by now: clients giving up, then new requests."""
        scheduler, arrivals, gate = self.scheduler, self._arrivals, self.gate
        while self._deadlines and self._deadlines[0][0] <= scheduler.sees:
            _, number = heapq.heappop(self._deadlines)
            if scheduler.abort(number) or (gate is not None and gate.holds(number)):
                arrivals.left(scheduler.now)
                if gate is not None:
                    gate.left(number)
        while (at := arrivals.next_at()) is not None and at <= scheduler.sees:
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
    engine: Engine, arrivals: Arrivals, *, warm_up: int | None = None, end: int | None = None
) -> Result:
    """Run a workload and sum it up.

    Args:
        engine: The engine's settings.
        arrivals: Where requests come from.
        warm_up: Nanoseconds that are simulated but not measured.
        end: Nanoseconds at which to stop, finished or not; None runs until all work is done.

    Returns:
        What came of it. An engine that can never go on says so in ``stuck``.
    """
    run = Run(engine, arrivals)
    if warm_up:
        while run.until(warm_up):
            pass
    meter = _Meter(run.scheduler)
    while ended := run.until(end):
        for live in ended:
            meter.finished(live)
    return meter.result(run.stuck)
