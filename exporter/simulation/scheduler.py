"""Simulates vLLM V1's scheduler on a paged KV pool, in counts: who runs, who waits, who is preempted.

One step, as in ``vllm/v1/core/sched/scheduler.py`` (0.26 and 0.32 agree on all of it):

1. Running requests in the order of their admission get their tokens: one each while decoding, the rest
   of the token budget for a context that is computed in chunks. If a block is missing, victims are
   preempted until it fits (FCFS: the request admitted last, possibly the one that needs the block;
   priority: the highest (priority, arrival)). A victim loses its blocks and its computed tokens and
   returns to the head of the queue.
2. If no request was preempted, the head of the queue is admitted while there is a seat, token budget, and
   room for its whole context (prompt and generated tokens, less prefix cache hits), plus the watermark
   while something runs. No request overtakes the head.

With async scheduling a step is scheduled before the output of the previous step is known: a finished
request keeps its seat and its blocks for another step (`State.FINISHING`), and arrivals are seen one step
later.

The simulation takes time only for what changes in a step, and skips steps in which only counters move
(`exporter.simulation.running`).
"""

import math
from typing import TYPE_CHECKING, Final

from exporter.simulation.counters import Counters
from exporter.simulation.in_flight import InFlight, State, WaitingQueue
from exporter.simulation.kv import KvManager
from exporter.simulation.pool import SharedBlock
from exporter.simulation.running import RunningList
from exporter.simulation.settings import Engine
from exporter.simulation.workload import Request

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Scheduler"]

# The cost of queueing a request, and of a shared block that it finds, in steps.
_QUEUEING_EFFORT: Final = 0.1
_SHARED_BLOCK_EFFORT: Final = 1 / 60


class Scheduler:
    """The scheduler of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kv = KvManager(engine)  # the blocks that requests hold
        self.pool = self.kv.pool  # all blocks
        # `now`: the time in nanoseconds, the end of the last step. `sees`: the next step sees requests that
        # arrived up to this time: the start of the last step with async scheduling, otherwise its end.
        self.now = self.sees = 0
        self.totals = Counters()
        # The cost, in steps simulated one by one, and after how much of it `advance` stops.
        self.effort, self.most_effort = 0.0, math.inf
        self.finished: list[InFlight] = []  # since the caller last emptied this list
        # Called with each request whose context has just been computed, before its next token is counted: the
        # first one, or (``first`` is set) the first one after a preemption.
        self.on_context_complete: Callable[[InFlight], None] | None = None
        self._running_list = RunningList(engine.block_size)
        self._queue = WaitingQueue(engine.policy)
        self._lives: dict[int, InFlight] = {}
        self._finishing: list[InFlight] = []
        self._blocked = False  # the head got no seat or blocks, and nothing was freed since then
        # Of the current step:
        self._preempted = False
        self._in_flight: list[InFlight] = []  # victims whose last output comes with the next step
        self._computed: list[InFlight] = []  # requests whose context was completed

    # Between steps.

    @property
    def running(self) -> int:
        """Requests running."""
        return len(self._running_list.running)

    @property
    def waiting(self) -> int:
        """Requests waiting, preempted ones included."""
        return len(self._queue)

    @property
    def kv_usage(self) -> float:
        """Share of the usable blocks that requests hold, as ``kv_cache_usage_perc``."""
        return 1.0 - self.pool.free / self.pool.size

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do at all."""
        return not self._running_list.running and not self._queue

    def holds(self, number: int) -> bool:
        """Return whether a request is in the engine, running or waiting."""
        return number in self._lives

    def add(self, request: Request, arrival: int) -> InFlight | None:
        """Queue a request; return None if its prompt exceeds the model length."""
        limit = self.engine.max_model_len
        final = request.prompt_tokens + request.output_tokens
        if limit is not None:
            if request.prompt_tokens >= limit:
                self.effort += 1
                self.totals.refused += 1
                return None
            final = min(final, limit)
        self.effort += _QUEUEING_EFFORT
        live = InFlight(request, arrival, final)
        self.kv.enter(live)
        if self.kv.blocks(final - 1) > self.pool.size:
            self.totals.unfittable += 1
        self._lives[request.id] = live
        if not self._queue or self.engine.policy == "priority":
            self._blocked = False
        self._queue.add(live)
        return live

    def abort(self, number: int) -> bool:
        """Drop a request whose client gave up; return False if it is not there or has just finished."""
        live = self._lives.get(number)
        if live is None or live.state is State.FINISHING:
            return False
        if live.state is State.WAITING:
            self._queue.remove(live)
            self._blocked = False
        else:
            computed = self._running_list.computed(live)
            self._running_list.leave(live)
            self._free(live, computed)
        self._forget(live)
        self.totals.aborted += 1
        return True

    def hold_blocks(self, blocks: int) -> bool:
        """Take free blocks out of use, for a load or a leak; False if there are not enough."""
        if blocks > self.pool.free:
            return False
        self.pool.take(blocks)
        return True

    def return_blocks(self, blocks: int) -> None:
        """Put blocks that were held back into use."""
        self.pool.release(blocks, 0)
        self._blocked = False

    def stuck(self) -> str | None:
        """Return why nothing can ever move again, or None; valid after a step that did nothing."""
        if self._running_list.running or not self._queue:
            return None
        head = self._queue.head()
        need = self.kv.blocks(head.tokens)
        if need <= self.pool.size:
            return (
                f"request {head.request.id} ({head.tokens} tokens) exceeds max_num_batched_tokens unchunked"
            )
        return (
            f"request {head.request.id} needs {need} blocks for its {head.tokens} tokens, the pool has "
            f"{self.pool.size}: it can never be scheduled, and no request overtakes it"
        )

    # Steps.

    def advance(self, limit: int | None) -> bool:
        """Step until `sees` reaches a limit or a request finishes; False if nothing can be scheduled."""
        while self.step():
            if self.finished or (limit is not None and self.sees >= limit):
                return True
            self._glide(limit)
            if (limit is not None and self.sees >= limit) or self.effort >= self.most_effort:
                return True
        return False

    def step(self) -> bool:
        """Take one engine step; return False if nothing could be scheduled (no time passes then)."""
        self.effort += 1
        self.kv.moved, self._preempted = 0, False
        self._in_flight, self._computed = [], []
        decoding, chunk = self._schedule_running()
        tokens, sequences = decoding + chunk, decoding + (chunk > 0)
        if not self._preempted and self._queue and not self._blocked:
            new_tokens, new_sequences = self._admit(self.engine.max_num_batched_tokens - tokens)
            tokens += new_tokens
            sequences += new_sequences
        # With async scheduling, the output of the previous step becomes known only here.
        freed = bool(self._finishing) and self._free_finishing()
        if self._in_flight:
            self._count(self._in_flight)
        if not tokens and not self.kv.moved:
            self._running_list.skip()
            self.sees = self.now
            return freed or self._preempted
        took = self.engine.step_time.of(tokens, sequences, self.kv.moved)
        self.totals.add_step(took, self.pool.size - self.pool.free, sequences, len(self._queue))
        self.sees = self.now if self.engine.async_scheduling else self.now + took
        self.now += took
        self._emit(tokens, decoding)
        return True

    def _glide(self, limit: int | None) -> None:
        """Take all steps before the next one in which more than counters changes."""
        running_list = self._running_list
        decoding = running_list.decoding
        if running_list.partial or self._finishing or not decoding or (self._queue and not self._blocked):
            return
        took = self.engine.step_time.of(decoding, decoding)
        lag = took if self.engine.async_scheduling else 0
        most = None
        if limit is not None and (took or limit <= self.now):
            most = max(1, -(-(limit + lag - self.now) // took) if took else 1)
        steps, taken, spare = running_list.glide(self.pool.free, most)
        if not steps:
            return
        self.now += steps * took
        self.sees = self.now - lag
        self.pool.take(taken)
        held = steps * self.pool.size - spare
        self.totals.add_glide(
            steps, took, decoding, held=held, after=self.pool.size - self.pool.free, waiting=len(self._queue)
        )

    # The running requests.

    def _schedule_running(self) -> tuple[int, int]:
        """Give the running requests their blocks; return how many decode, and the tokens of a chunk."""
        running_list = self._running_list
        partial, decoding, chunk = running_list.partial, running_list.decoding, 0
        need = len(running_list.phase())
        if partial:
            chunk = self._chunk(partial, decoding)
            need += self.kv.growth(partial, chunk)
        if need > self.pool.free:
            decoding, chunk = self._squeeze()
        elif need:
            self.pool.take(need)
        if partial and chunk:
            self._compute(partial, chunk, partial.computed // self.engine.block_size)
        return decoding, chunk

    def _chunk(self, live: InFlight, scheduled: int) -> int:
        return min(live.tokens - live.computed, self.engine.max_num_batched_tokens - scheduled)

    def _squeeze(self) -> tuple[int, int]:
        """Hand out blocks in the order of admission, and preempt while one is missing."""
        running_list, phase = self._running_list, self._running_list.phase()
        seats, free = sorted(phase), self.pool.free
        served = set(seats[:free])
        self.pool.take(len(served))
        for seat in seats[free:]:
            live = phase.get(seat)
            if live is None:  # preempted for an earlier request
                continue
            if not self._make_room(live, 1, served):
                return running_list.stall_after(seat), 0
            self.pool.take(1)
            served.add(seat)
        partial, chunk = running_list.partial, 0
        if partial:
            chunk = self._chunk(partial, running_list.decoding)
            need = self.kv.growth(partial, chunk)
            if self._make_room(partial, need, served):
                self.pool.take(need)
            else:
                chunk = 0
        return running_list.decoding, chunk

    def _make_room(self, live: InFlight, need: int, served: set[int]) -> bool:
        """Preempt until this many blocks are free; return False if the request itself was preempted."""
        while need > self.pool.free:
            victim = (
                self._running_list.last() if self.engine.policy == "fcfs" else self._running_list.lowest()
            )
            self._preempt(victim, 1 if victim.seat in served else 0)
            if victim is live:
                return False
        return True

    def _preempt(self, victim: InFlight, took: int = 0) -> None:
        """Take a running request's blocks (``took`` of them from this step) and queue it again."""
        self._preempted = True
        self.totals.preemptions += 1
        victim.preemptions += 1
        victim.uncounted_preemptions += 1
        computed, state = self._running_list.computed(victim), victim.state
        if self.engine.async_scheduling and state is not State.PREFILL:
            self._in_flight.append(victim)
        self._running_list.leave(victim)
        if state is State.DECODE:
            victim.tokens = computed + 1
            victim.stopped = self.now
        if state is not State.FINISHING:
            victim.most_computed = max(victim.most_computed, computed)
            self.kv.swap_out(victim, computed, self.totals)
        self._free(victim, computed, took)
        victim.computed = 0
        if state is State.FINISHING:
            self._finishing.remove(victim)
            self._forget(victim)
        else:
            victim.state = State.WAITING
            self._queue.put_back(victim)

    # The head of the queue.

    def _admit(self, budget: int) -> tuple[int, int]:
        """Admit from the head while all limits allow; return the tokens and requests that were scheduled."""
        engine, running, tokens, sequences = self.engine, self._running_list.running, 0, 0
        while self._queue and tokens < budget:
            if len(running) >= engine.max_num_seqs:
                self._blocked = True
                break
            live = self._queue.head()
            found, own = self.kv.look_up(live)
            computed = max((len(found) + own) * engine.block_size, live.swapped)
            new = min(live.tokens - computed, budget - tokens)
            if not engine.enable_chunked_prefill and new < live.tokens - computed:
                break
            whole = self.kv.blocks(live.tokens)
            need = whole if engine.reserve_full_prompt else self.kv.blocks(computed + new)
            need += engine.watermark_blocks if running else 0
            self.effort += len(found) * _SHARED_BLOCK_EFFORT
            short = need > self.pool.free and need - sum(b.refs > 0 for b in found) > self.pool.free
            if short or (not running and whole > self.pool.size):
                self._blocked = True
                break
            self._start(self._queue.pop(), found, own, computed, new)
            tokens += new
            sequences += 1
        return tokens, sequences

    def _start(self, live: InFlight, found: list[SharedBlock], own: int, computed: int, new: int) -> None:
        """Give a request a seat, its cached blocks and new blocks for this step's chunk."""
        self.kv.give(live, found, own, computed + new, self.totals)
        if live.admitted is None:
            live.admitted = self.now
        live.computed = computed
        self._running_list.take_seat(live)
        self._compute(live, new, len(found))

    def _compute(self, live: InFlight, new: int, known: int) -> None:
        """Compute a chunk of a context whose blocks are already taken; ``known`` of them were cached."""
        again = min(live.computed + new, live.most_computed) - live.computed
        self.totals.recomputed_tokens += max(0, again)
        live.computed += new
        live.most_computed = max(live.most_computed, live.computed)
        if self.kv.share(live, known):
            self._blocked = False  # the head may find more cached blocks now
        if live.computed == live.tokens:
            self._computed.append(live)
            self._running_list.start_decoding(live)

    # The end of a step.

    def _emit(self, tokens: int, decoding: int) -> None:
        """Generate this step's tokens: one for each request whose whole context is computed."""
        for live in self._computed:
            if self.on_context_complete is not None:
                self.on_context_complete(live)
            if live.first is None:
                live.first = self.now
        self._count(self._computed)
        ending = self._running_list.ending()
        for live in ending:
            live.ended = self.now
            live.computed = live.final - 1
            self._running_list.stop_decoding(live)
            live.state = State.FINISHING
            self._finishing.append(live)
            self.finished.append(live)
        if ending and not self.engine.async_scheduling:
            self._free_finishing()
        self._running_list.turn += 1
        outputs = decoding + len(self._computed)
        self.totals.add_outputs(tokens, outputs, self.pool.size - self.pool.free)

    def _count(self, lives: list[InFlight]) -> None:
        """Count preemptions as vLLM does, with the request's next output."""
        for live in lives:
            self.totals.preemptions_counted += live.uncounted_preemptions
            live.uncounted_preemptions = 0

    def _free_finishing(self) -> bool:
        lame, self._finishing = self._finishing, []
        for live in lame:
            self._running_list.leave(live)
            self._free(live, live.computed)
            self._forget(live)
        return bool(lame)

    def _free(self, live: InFlight, computed: int, took: int = 0) -> None:
        self._blocked = False
        self.kv.free(live, computed, took)

    def _forget(self, live: InFlight) -> None:
        live.state = State.GONE
        del self._lives[live.request.id]
        self.kv.forget(live)
