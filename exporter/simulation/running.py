"""Who runs, and in which step a decoding request will need a block or end.

A decoding request takes one token a step, so its needs are known ahead: a block whenever the step's
number, modulo the block size, has the value of its start. The roster keeps these appointments, and a
step costs nothing for a request that has none.
"""

from exporter.simulation.in_flight import Live, State

__all__ = ["Roster"]


class Roster:
    """The running requests, in the order of their admission.

    Attributes:
        turn: The number of the step that comes next or is being scheduled.
        running: By seat number, which rises with every admission: vLLM's running list.
        decoding: How many of them decode.
        partial: The one whose context is computed in part. There is at most one, and it was admitted
            last: a context stays unfinished only when it took the rest of the token budget.
    """

    __slots__ = ("_ends", "_phases", "_seats", "_size", "decoding", "partial", "running", "turn")

    def __init__(self, block_size: int) -> None:
        self.turn = 0
        self.running: dict[int, Live] = {}
        self.decoding = 0
        self.partial: Live | None = None
        self._size = block_size
        self._seats = 0
        self._phases: list[dict[int, Live]] = [{} for _ in range(block_size)]
        self._ends: dict[int, list[Live]] = {}

    def computed(self, live: Live) -> int:
        """Return the tokens a request has computed before this step."""
        return self.turn - live.start if live.state is State.DECODE else live.computed

    def phase(self) -> dict[int, Live]:
        """Return the decoding requests that need a block in this step, by seat."""
        return self._phases[self.turn % self._size]

    def last(self) -> Live:
        """Return the request admitted last."""
        return next(reversed(self.running.values()))

    def lowest(self) -> Live:
        """Return the request that the priority policy values least."""
        return max(self.running.values(), key=lambda live: live.key)

    def take_seat(self, live: Live) -> None:
        """Seat an admitted request, whose context is still to be computed."""
        self._seats += 1
        live.seat = self._seats
        live.state = State.PREFILL
        self.running[live.seat] = live
        self.partial = live

    def start_decoding(self, live: Live) -> None:
        """Hear that a context is computed: this step puts out a token, the next ones compute one each."""
        self.partial = None
        live.state = State.DECODE
        self.decoding += 1
        start = self.turn + 1 - live.tokens
        self._plan(live, start, live.final - 2 + start)

    def leave(self, live: Live) -> None:
        """Take a request off its seat."""
        del self.running[live.seat]
        if live.state is State.DECODE:
            self.stop_decoding(live)
        elif live is self.partial:
            self.partial = None

    def stop_decoding(self, live: Live) -> None:
        """Cancel a decoding request's appointments; those to end are ignored by `ending`."""
        self.decoding -= 1
        del self._phases[live.start % self._size][live.seat]

    def stall_after(self, seat: int) -> int:
        """Leave those admitted after a seat out of this step; return how many still decode in it."""
        stalled = [r for r in self.running.values() if r.seat > seat and r.state is State.DECODE]
        for live in stalled:
            del self._phases[live.start % self._size][live.seat]
            self._plan(live, live.start + 1, live.end + 1)
        return self.decoding - len(stalled)

    def ending(self) -> list[Live]:
        """Return the requests that put out their last token in this step, in the order of their seats."""
        planned = self._ends.pop(self.turn, None)
        if planned is None:
            return []
        ending = [live for live in planned if live.state is State.DECODE and live.end == self.turn]
        return ending if len(ending) == 1 else sorted(ending, key=lambda live: live.seat)

    def skip(self) -> None:
        """Let a step pass in which nothing could be scheduled."""
        self._ends.pop(self.turn, None)
        self.turn += 1

    def glide(self, free: int, most: int | None) -> tuple[int, int, int]:
        """Pass steps in which all decode, up to one that needs more than the free blocks or ends a request.

        Returns:
            How many steps (at most ``most``, if given), the blocks they take, and the sum over the
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

    def _plan(self, live: Live, start: int, end: int) -> None:
        live.start, live.end = start, end
        self._phases[start % self._size][live.seat] = live
        self._ends.setdefault(end, []).append(live)
