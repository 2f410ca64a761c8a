"""Gates of a run: requests wait for an adapter slot, or for KV that a connector loads.

vLLM keeps such requests apart and counts them as waiting and deferred.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable

from exporter.simulation.run import Arrival
from exporter.simulation.scheduler import Scheduler
from exporter.simulation.workload import Request

__all__ = ["AdapterSlots", "ConnectorLoads"]


class AdapterSlots:
    """At most ``slots`` adapters in use at once; a request of another one waits, and others overtake it.

    ``adapter_of`` gives a request's adapter, or None for the base model.
    """

    def __init__(self, slots: int, adapter_of: Callable[[Request], int | None]) -> None:
        self._slots = slots
        self._adapter_of = adapter_of
        self._in_use: Counter[int] = Counter()
        self._inside: dict[int, int] = {}
        self._kept: dict[int, Arrival] = {}

    @property
    def deferred(self) -> int:
        """Requests whose adapter has no slot."""
        return len(self._kept)

    def enter(self, request: Request, at: int) -> None:
        """Take in a request."""
        self._kept[request.id] = (request, at)

    def next_at(self) -> int | None:
        """Return None: a slot becomes free when a request leaves."""
        return None

    def release(self, now: int) -> list[Arrival]:  # noqa: ARG002 -- slots do not depend on the time
        """Let out the requests whose adapter has a slot, in the order of their arrival."""
        passing = []
        for number, (request, at) in list(self._kept.items()):
            adapter = self._adapter_of(request)
            if adapter is not None:
                if adapter not in self._in_use and len(self._in_use) >= self._slots:
                    continue
                self._in_use[adapter] += 1
                self._inside[number] = adapter
            del self._kept[number]
            passing.append((request, at))
        return passing

    def holds(self, number: int) -> bool:
        """Whether a request waits for a slot."""
        return number in self._kept

    def left(self, number: int) -> None:
        """Free the slot of an adapter with its last request."""
        self._kept.pop(number, None)
        adapter = self._inside.pop(number, None)
        if adapter is not None:
            self._in_use[adapter] -= 1
            if not self._in_use[adapter]:
                del self._in_use[adapter]


class ConnectorLoads:
    """The KV of a prompt is loaded from elsewhere; meanwhile the request holds its blocks and does not run.

    A request whose blocks are not free waits for them, and everyone behind it too. ``load_time`` gives the
    nanoseconds of a load. What was loaded is found as a prefix hit where prefix caching is on.
    """

    def __init__(self, scheduler: Scheduler, load_time: Callable[[Request, int], int]) -> None:
        self._scheduler = scheduler
        self._load_time = load_time
        self._queue: deque[Arrival] = deque()  # waiting for blocks
        self._ready: list[tuple[int, int]] = []
        self._loading: dict[int, tuple[Request, int, int]] = {}

    @property
    def deferred(self) -> int:
        """Requests whose KV is being loaded."""
        return len(self._loading)

    @property
    def queued(self) -> int:
        """Requests that wait for the blocks to load into."""
        return len(self._queue)

    def enter(self, request: Request, at: int) -> None:
        """Take in a request."""
        self._queue.append((request, at))

    def next_at(self) -> int | None:
        """Return when the next load is complete."""
        while self._ready and self._ready[0][1] not in self._loading:
            heapq.heappop(self._ready)
        return self._ready[0][0] if self._ready else None

    def release(self, now: int) -> list[Arrival]:
        """Begin loads that fit into the free blocks; let out the requests whose load is complete.

        No load begins while a request waits in the scheduler, for that one came first and needs blocks too.
        """
        passing = []
        while (at := self.next_at()) is not None and at <= now:
            request, arrival, blocks = self._loading.pop(heapq.heappop(self._ready)[1])
            self._scheduler.return_blocks(blocks)
            passing.append((request, arrival))
        while self._queue and not passing and not self._scheduler.waiting:
            request, arrival = self._queue[0]
            blocks = self._scheduler.kv.blocks(request.prompt_tokens)
            if not self._scheduler.hold_blocks(blocks):
                break
            self._queue.popleft()
            self._loading[request.id] = (request, arrival, blocks)
            heapq.heappush(self._ready, (now + self._load_time(request, now), request.id))
        return passing

    def holds(self, number: int) -> bool:
        """Whether a request loads or waits for blocks."""
        return number in self._loading or any(request.id == number for request, _ in self._queue)

    def left(self, number: int) -> None:
        """Free the blocks of a load that nobody wants any more."""
        loading = self._loading.pop(number, None)
        if loading is not None:
            self._scheduler.return_blocks(loading[2])
        self._queue = deque(kept for kept in self._queue if kept[0].id != number)
