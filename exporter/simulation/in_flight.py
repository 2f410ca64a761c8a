"""Requests inside the engine, and the queues in which they wait."""

import heapq
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


class InFlight:
    """One request in the engine; lengths in tokens, times in nanoseconds.

    While a request decodes, its state follows from the number of the step: at the start of step ``t`` it has
    ``t - start`` computed tokens and one token more in all; it generates its last token in step ``end``.
    """

    __slots__ = (
        "admitted",
        "arrival",
        "cached_tokens",
        "computed",
        "end",
        "ended",
        "final",
        "first",
        "key",
        "most_computed",
        "outputs",
        "preemptions",
        "remnant",
        "request",
        "seat",
        "shared",
        "shared_blocks",
        "start",
        "state",
        "stopped",
        "swapped",
        "text",
        "tokens",
        "uncounted_preemptions",
    )

    def __init__(self, request: Request, arrival: int, final: int) -> None:
        self.request = request
        self.arrival = arrival
        self.key = (request.priority, arrival, request.id)
        self.final = final  # prompt and output together
        self.tokens = request.prompt_tokens  # prompt and generated so far (not kept while decoding)
        self.outputs = final - request.prompt_tokens
        self.state = State.WAITING
        self.seat = 0  # increases with each admission: the order of vLLM's running list
        self.computed = 0
        self.most_computed = 0  # below this, tokens are computed again
        self.start = self.end = 0
        self.swapped = 0  # tokens whose KV waits in the swap space
        self.text: SharedText | None = None
        self.shared: list[SharedBlock] = []
        self.shared_blocks = 0  # leading blocks that belong to the shared text
        self.remnant: Remnant | None = None
        self.preemptions = 0
        self.uncounted_preemptions = 0  # vLLM counts them with the next output
        self.cached_tokens = 0  # prefix cache hits at its first admission
        self.admitted: int | None = None
        self.first: int | None = None
        self.ended = 0
        self.stopped = 0  # time of its last token before the preemption


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
