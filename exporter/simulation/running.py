"""The running requests, and the steps in which a decoding request will need a block or finish.

A decoding request computes one token per step, so its needs are known in advance: it needs a block in each
step whose number equals its start modulo the block size. The list keeps these appointments, and a step
takes no time for a request that has none.
"""

from exporter.simulation.in_flight import InFlight, State

__all__ = ["RunningList"]


class RunningList:
    """The running requests, in the order of their admission."""

    __slots__ = ("_ends", "_phases", "_seats", "_size", "decoding", "partial", "running", "turn")

    def __init__(self, block_size: int) -> None:
        self.turn = 0  # The number of the current or next step
        # By seat number, which increases with each admission: vLLM's running list.
        self.running: dict[int, InFlight] = {}
        self.decoding = 0  # How many of them decode
        # The request whose context is partly computed. There is at most one, and it was admitted last: a
        # context stays partial only if it took the rest of the token budget.
        self.partial: InFlight | None = None
        self._size = block_size
        self._seats = 0
        self._phases: list[dict[int, InFlight]] = [{} for _ in range(block_size)]
        self._ends: dict[int, list[InFlight]] = {}

    def computed(self, live: InFlight) -> int:
        """Return the tokens a request has computed before this step."""
        return self.turn - live.start if live.state is State.DECODE else live.computed

    def phase(self) -> dict[int, InFlight]:
        """Return the decoding requests that need a block in this step, by seat."""
        return self._phases[self.turn % self._size]

    def last(self) -> InFlight:
        """Return the request admitted last."""
        return next(reversed(self.running.values()))

    def lowest(self) -> InFlight:
        """Return the request with the lowest priority."""
        return max(self.running.values(), key=lambda live: live.key)

    def take_seat(self, live: InFlight) -> None:
        """Give an admitted request a seat; its context is not computed yet."""
        self._seats += 1
        live.seat = self._seats
        live.state = State.PREFILL
        self.running[live.seat] = live
        self.partial = live

    def start_decoding(self, live: InFlight) -> None:
        """Plan a request whose context is computed: this step and each next one generate a token."""
        self.partial = None
        live.state = State.DECODE
        self.decoding += 1
        start = self.turn + 1 - live.tokens
        self._plan(live, start, live.final - 2 + start)

    def leave(self, live: InFlight) -> None:
        """Remove a request from its seat."""
        del self.running[live.seat]
        if live.state is State.DECODE:
            self.stop_decoding(live)
        elif live is self.partial:
            self.partial = None

    def stop_decoding(self, live: InFlight) -> None:
        """Cancel a decoding request's need for blocks; `ending` ignores its planned end."""
        self.decoding -= 1
        del self._phases[live.start % self._size][live.seat]

    def stall_after(self, seat: int) -> int:
        """Skip the requests behind a seat in this step; return how many still decode in it."""
        stalled = [r for r in self.running.values() if r.seat > seat and r.state is State.DECODE]
        for live in stalled:
            del self._phases[live.start % self._size][live.seat]
            self._plan(live, live.start + 1, live.end + 1)
        return self.decoding - len(stalled)

    def ending(self) -> list[InFlight]:
        """Return the requests that generate their last token in this step, in the order of their seats."""
        planned = self._ends.pop(self.turn, None)
        if planned is None:
            return []
        ending = [live for live in planned if live.state is State.DECODE and live.end == self.turn]
        return ending if len(ending) == 1 else sorted(ending, key=lambda live: live.seat)

    def skip(self) -> None:
        """Skip a step in which nothing could be scheduled."""
        self._ends.pop(self.turn, None)
        self.turn += 1

    def glide(self, free: int, most: int | None) -> tuple[int, int, int]:
        """Take steps in which all decode, up to one that lacks blocks or finishes a request.

        Returns:
            The number of steps (at most ``most``, if given), the blocks they take, and the sum over the
            steps of the blocks left free.
        """
        needs = [len(phase) for phase in self._phases]
        size, ends, turn, left, spare = self._size, self._ends, self.turn, free, 0
        far = -1 if most is None else turn + most
        while turn not in ends and turn != far and (need := needs[turn % size]) <= left:
            left -= need
            spare += left
            turn += 1
        steps, self.turn = turn - self.turn, turn
        return steps, free - left, spare

    def _plan(self, live: InFlight, start: int, end: int) -> None:
        live.start, live.end = start, end
        self._phases[start % self._size][live.seat] = live
        self._ends.setdefault(end, []).append(live)
