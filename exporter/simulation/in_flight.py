"""A request inside the engine, and the queue it waits in."""

import heapq
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from exporter.simulation.workload import Request

if TYPE_CHECKING:
    from exporter.simulation.pool import Remnant, SharedBlock, SharedText

__all__ = ["ByPriority", "FirstCome", "Live", "Queue", "State"]


class State(IntEnum):
    """Where a request is."""

    WAITING = 0
    PREFILL = 1  # running, its context is not computed to the end yet
    DECODE = 2  # running, one token a step
    LAME = 3  # finished, but the scheduler learns of it one step later (async scheduling)
    GONE = 4


class Live:
    """The engine's record of one request; lengths in tokens, times in nanoseconds.

    While a request decodes nothing of it changes but the number of the step: at the start of step ``t``
    it has ``t - start`` tokens computed, one more in all, and it puts out its last token in step ``end``.
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
        "high",
        "key",
        "outputs",
        "owed",
        "preemptions",
        "recomputed",
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
    )

    def __init__(self, request: Request, arrival: int, final: int) -> None:
        self.request = request
        self.arrival = arrival
        self.key = (request.priority, arrival, request.id)
        self.final = final  # prompt and output together
        self.tokens = request.prompt_tokens  # prompt and generated so far (not kept while decoding)
        self.outputs = final - request.prompt_tokens
        self.state = State.WAITING
        self.seat = 0  # rises with every admission: the order of vLLM's running list
        self.computed = 0
        self.high = 0  # the most it ever had computed: what is computed again below it is lost work
        self.start = self.end = 0
        self.swapped = 0  # tokens whose KV waits in the swap space
        self.text: SharedText | None = None
        self.shared: list[SharedBlock] = []
        self.shared_blocks = 0  # leading blocks that belong to the shared text
        self.remnant: Remnant | None = None
        self.preemptions = 0
        self.owed = 0  # preemptions that vLLM has not counted yet: it does with the next output
        self.recomputed = 0
        self.cached_tokens = 0  # prefix hits at its first admission
        self.admitted: int | None = None
        self.first: int | None = None
        self.ended = 0
        self.stopped = 0  # when it put out its last token before it was preempted


class Queue(Protocol):
    """Waiting requests; the head is admitted or nobody is."""

    def __len__(self) -> int: ...

    def add(self, live: Live) -> None:
        """Queue a new request."""

    def put_back(self, live: Live) -> None:
        """Queue a preempted request."""

    def head(self) -> Live:
        """Return the request that is next."""

    def pop(self) -> Live:
        """Take the head out."""

    def remove(self, live: Live) -> None:
        """Take out a request wherever it stands."""


class FirstCome:
    """First come, first served; a preempted request goes to the head."""

    def __init__(self) -> None:
        self._items: deque[Live] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, live: Live) -> None:
        """Queue a new request at the end."""
        self._items.append(live)

    def put_back(self, live: Live) -> None:
        """Queue a preempted request at the head."""
        self._items.appendleft(live)

    def head(self) -> Live:
        """Return the request that is next."""
        return self._items[0]

    def pop(self) -> Live:
        """Take the head out."""
        return self._items.popleft()

    def remove(self, live: Live) -> None:
        """Take out a request wherever it stands."""
        self._items.remove(live)


class ByPriority:
    """Lowest (priority, arrival) first, preempted or not."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Live]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, live: Live) -> None:
        """Queue a request by its priority."""
        heapq.heappush(self._heap, (live.key, live))

    put_back = add

    def head(self) -> Live:
        """Return the request that is next."""
        return self._heap[0][1]

    def pop(self) -> Live:
        """Take the head out."""
        return heapq.heappop(self._heap)[1]

    def remove(self, live: Live) -> None:
        """Take out a request wherever it stands."""
        self._heap.remove((live.key, live))
        heapq.heapify(self._heap)
