"""Requests inside the engine, and the queues in which they wait."""

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from exporter.simulation.workload import Request

if TYPE_CHECKING:
    from exporter.simulation.pool import Remnant, SharedBlock, SharedText

__all__ = ["InFlight", "State", "WaitingQueue"]


class State(IntEnum):
    """Where a request is in the engine."""

    WAITING = 0
    PREFILL = 1  # running, its context is not complete
    DECODE = 2  # running, one token per step
    FINISHING = 3  # finished, but the scheduler does not know until the next step (async scheduling)
    GONE = 4


@dataclass(slots=True, eq=False)
class InFlight:
    """One request in the engine; lengths in tokens, times in nanoseconds.

    While a request decodes, its state follows from the number of the step: at the start of step ``t`` it has
    ``t - start`` computed tokens and one token more in all; it generates its last token in step ``end``.
    """

    request: Request
    arrival: int
    final: int  # prompt and output together
    key: tuple[int, int, int] = field(init=False)
    tokens: int = field(init=False)  # prompt and generated so far (not kept while decoding)
    outputs: int = field(init=False)
    state: State = State.WAITING
    seat: int = 0  # increases with each admission: the order of vLLM's running list
    computed: int = 0
    most_computed: int = 0  # below this, tokens are computed again
    start: int = 0
    end: int = 0
    swapped: int = 0  # tokens whose KV waits in the swap space
    text: "SharedText | None" = None
    shared: "list[SharedBlock]" = field(default_factory=list)
    shared_blocks: int = 0  # leading blocks that belong to the shared text
    remnant: "Remnant | None" = None
    preemptions: int = 0
    uncounted_preemptions: int = 0  # vLLM counts them with the next output
    cached_tokens: int = 0  # prefix cache hits at its first admission
    admitted: int | None = None
    first: int | None = None
    ended: int = 0
    stopped: int = 0  # time of its last token before the preemption

    def __post_init__(self) -> None:
        self.key = (self.request.priority, self.arrival, self.request.id)
        self.tokens = self.request.prompt_tokens
        self.outputs = self.final - self.tokens


class WaitingQueue:
    """Waiting requests; no request is admitted before the head.

    First come, first served, with preempted requests at the head; or by (priority, arrival).
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[tuple[int, ...], InFlight]] = []
        self._first = self._last = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, live: InFlight) -> None:
        """Queue a new request."""
        self._last += 1
        heapq.heappush(self._heap, (live.key if self._by_priority else (self._last,), live))

    def put_back(self, live: InFlight) -> None:
        """Queue a preempted request."""
        self._first -= 1
        heapq.heappush(self._heap, (live.key if self._by_priority else (self._first,), live))

    def head(self) -> InFlight:
        """Return the next request."""
        return self._heap[0][1]

    def pop(self) -> InFlight:
        """Remove and return the head."""
        return heapq.heappop(self._heap)[1]

    def remove(self, live: InFlight) -> None:
        """Remove a request at any position."""
        self._heap = [entry for entry in self._heap if entry[1] is not live]
        heapq.heapify(self._heap)
