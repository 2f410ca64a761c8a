"""One engine of a scenario: the simulated scheduler, its faults, and what vLLM would count of it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.judge.gates import AdapterSlots, ConnectorLoads
from bench.judge.traffic import Clients, Traffic
from exporter.simulation.run import Gate, Run
from exporter.simulation.scheduler import Scheduler
from exporter.simulation.settings import Engine
from exporter.simulation.timing import nanoseconds
from exporter.simulation.workload import Request
from exporter.standin.metrics_page import EngineFigures
from exporter.standin.run_figures import RunFigures

__all__ = ["Fault", "Machine", "Said", "Sample"]


class Sample(NamedTuple):
    """What is known of an engine at one moment; counters are sums since the start, over restarts."""

    t: float
    running: int
    waiting: int
    deferred: int
    kv_usage: float
    output_tokens: int
    prompt_tokens: int
    finished: int
    preemptions: int
    aborted: int
    recomputed: int


class Said(NamedTuple):
    """What the exporter says of an engine after a poll."""

    t: float
    verdict: str
    severity: str
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        kind: ``slow`` (steps take ``factor`` times as long), ``stall`` (no step), ``leak`` (a share
            ``factor`` of the free blocks is lost), ``door`` (nobody is admitted), ``connector`` (loads take
            ``factor`` seconds), ``adapters`` (``factor`` slots), ``restart`` (down for ``factor`` seconds),
            ``down``.
        at: Seconds from the start; adapters and connectors are there from the start.
        factor: See ``kind``.
        until: Seconds at which it is over, or None.
    """

    kind: str
    at: float
    factor: float = 0.0
    until: float | None = None

    @property
    def over(self) -> float | None:
        """Seconds at which it is over, or None."""
        return self.at + self.factor if self.kind == "restart" else self.until


class Machine:
    """A simulated engine with a fault, sampled at any rising times."""

    def __init__(
        self,
        engine: Engine,
        traffic: Traffic,
        fault: Fault | None = None,
        *,
        since: float = 0.0,
        figures: EngineFigures | None = None,
        new_process: Callable[[], EngineFigures] | None = None,
    ) -> None:
        """Begin.

        Args:
            engine: Its settings.
            traffic: What is sent to it.
            fault: What goes wrong, if anything does.
            since: Seconds at which to begin; what arrives earlier is left out.
            figures: Filled as vLLM's logger would; None saves the work.
            new_process: Returns the figures of the process after a restart.
        """
        self._engine = engine
        self._fault = fault
        self._arrivals = traffic.arrivals(since)
        self._traffic = traffic
        self.figures = figures
        self._new_process = new_process
        self._before = [0] * 6
        self._begin(nanoseconds(since))
        self._events = self._plan(since)
        self._frozen = False
        self.up = True

    def _begin(self, now: int) -> None:
        self._run = Run(self._engine, self._arrivals, self._gate)
        scheduler = self._run.scheduler
        scheduler.now = scheduler.sees = now
        self._finished = self._leaked = 0
        self._counts: RunFigures | None = None
        if self.figures is not None:
            self.figures.gauges(0, 0, 0.0)
            self.figures.preempted(0)
            self._counts = RunFigures(scheduler, self.figures)

    def _gate(self, scheduler: Scheduler) -> Gate | None:
        fault = self._fault
        if fault is None or fault.kind not in ("adapters", "connector"):
            return None
        if fault.kind == "adapters":
            return AdapterSlots(int(fault.factor), _adapter_of)
        slow_from, slow, normal = nanoseconds(fault.at), nanoseconds(fault.factor), nanoseconds(0.2)

        def load_time(request: Request, now: int) -> int:
            most = slow if now >= slow_from else normal
            return most // 2 + (request.id * 2654435761 % 1000) * most // 1000

        return ConnectorLoads(scheduler, load_time)

    def _plan(self, since: float) -> list[tuple[float, Callable[[], None]]]:
        fault = self._fault
        if fault is None or fault.kind in ("adapters", "connector"):
            return []
        begin, end = {
            "slow": (self._slow, self._normal),
            "stall": (self._freeze, self._thaw),
            "leak": (self._leak, self._tight),
            "door": (self._close_door, self._normal),
            "restart": (self._go_down, self._come_up),
            "down": (self._go_down, self._come_up),
        }[fault.kind]
        events = [(max(since, fault.at), lambda: begin(fault))]
        if fault.over is not None:
            events.append((fault.over, lambda: end(fault)))
        return events

    def until(self, t: float) -> Sample:
        """Go on to a time in seconds and return the state there."""
        while self._events and self._events[0][0] <= t:
            at, event = self._events.pop(0)
            self._advance(nanoseconds(at))
            event()
        self._advance(nanoseconds(t))
        return self._sample(t)

    def _advance(self, at: int) -> None:
        if self._frozen or not self.up:
            return
        ended = None
        while ended is None or ended:
            ended = self._run.until(at)
            self._finished += len(ended)
            if self._counts is not None:
                self._counts.advance(ended)

    def _sample(self, t: float) -> Sample:
        if not self.up:
            return Sample(t, 0, 0, 0, 0.0, *self._before)
        run, scheduler = self._run, self._run.scheduler
        gate, totals = run.gate, scheduler.totals
        deferred = gate.deferred if gate is not None else 0
        waiting = scheduler.waiting + deferred + getattr(gate, "queued", 0)
        if self.figures is not None and not self._frozen:
            self.figures.gauges(scheduler.running, waiting, scheduler.kv_usage, deferred)
            self.figures.preempted(totals.preemptions_counted)
        counted = self._sums()
        return Sample(t, scheduler.running, waiting, deferred, scheduler.kv_usage, *counted)

    def _sums(self) -> list[int]:
        totals = self._run.scheduler.totals
        now = [
            totals.output_tokens,
            totals.scheduled_tokens - totals.output_tokens - totals.recomputed_tokens,
            self._finished,
            totals.preemptions,
            totals.aborted,
            totals.recomputed_tokens,
        ]
        return [a + b for a, b in zip(self._before, now, strict=True)]

    # What goes wrong.

    def _slow(self, fault: Fault) -> None:
        engine = self._engine
        self._run.scheduler.engine = replace(engine, step_time=engine.step_time.scaled(fault.factor))

    def _leak(self, fault: Fault) -> None:
        scheduler = self._run.scheduler
        self._leaked = int(scheduler.pool.free * fault.factor)
        scheduler.hold_blocks(self._leaked)

    def _tight(self, _fault: Fault) -> None:
        self._run.scheduler.return_blocks(self._leaked)

    def _freeze(self, fault: Fault) -> None:
        self._sample(fault.at)  # the gauges of the last step stay
        self._frozen = True

    def _thaw(self, fault: Fault) -> None:
        self._frozen = False
        self._run.scheduler.now = nanoseconds(fault.until or 0.0)

    def _close_door(self, _fault: Fault) -> None:
        closed = copy.copy(self._engine)
        object.__setattr__(closed, "max_num_seqs", 0)
        self._run.scheduler.engine = closed

    def _normal(self, _fault: Fault) -> None:
        self._run.scheduler.engine = self._engine
        self._run.scheduler.return_blocks(0)

    def _go_down(self, _fault: Fault) -> None:
        self._before = self._sums()
        self.up = False

    def _come_up(self, fault: Fault) -> None:
        over = fault.over or 0.0
        now = nanoseconds(over)
        self.up = True
        if isinstance(self._arrivals, Clients):
            self._arrivals.lose_all(now)
        else:
            self._arrivals = self._traffic.arrivals(over)
        if self._new_process is not None:
            self.figures = self._new_process()
        self._begin(now)


def _adapter_of(request: Request) -> int | None:
    """Two in three requests use one of 12 adapters."""
    number = request.id * 2654435761 % 2**32
    return None if number % 3 == 0 else number // 3 % 12
