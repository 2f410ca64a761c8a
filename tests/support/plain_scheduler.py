# ruff: noqa: C901, D102 -- in vLLM's own order, so that the two can be compared
"""vLLM V1's scheduling loop written out plainly: every step, every request, every block.

The oracle for `exporter.simulation.scheduler`, which skips steps in which only counters change. Slow on
purpose; it shares only the settings and the requests with the package.
"""

from collections import OrderedDict


class Block:
    """One KV block: how many requests hold it and what full text it has (its hash), if any."""

    def __init__(self):
        self.refs = 0
        self.text = None


class PlainPool:
    """vLLM's block pool: a free queue, blank blocks at its head, cached ones in the order of release."""

    def __init__(self, size, *, caching):
        self.caching = caching
        self.blocks = [Block() for _ in range(size)]
        self.queue = OrderedDict.fromkeys(self.blocks)
        self.cached = {}

    @property
    def free(self):
        return len(self.queue)

    def lookup(self, texts):
        found = []
        for text in texts:
            if not self.cached.get(text):
                break
            found.append(next(iter(self.cached[text])))
        return found

    def touch(self, blocks):
        for block in blocks:
            if block.refs == 0:
                del self.queue[block]
            block.refs += 1

    def take(self, count):
        taken = []
        for _ in range(count):
            block, _ = self.queue.popitem(last=False)
            self._forget(block)
            block.refs = 1
            taken.append(block)
        return taken

    def _forget(self, block):
        if block.text is not None:
            del self.cached[block.text][block]
            if not self.cached[block.text]:
                del self.cached[block.text]
            block.text = None

    def register(self, block, text):
        if self.caching and block.text is None:
            block.text = text
            self.cached.setdefault(text, OrderedDict())[block] = None

    def release(self, blocks):
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                self.queue[block] = None
                if block.text is None:
                    self.queue.move_to_end(block, last=False)

    def reset(self):
        if self.free != len(self.blocks):
            return False
        for block in self.blocks:
            self._forget(block)
        return True

    def check(self):
        held = sum(block.refs > 0 for block in self.blocks)
        assert held + self.free == len(self.blocks)
        assert all(block.refs == 0 for block in self.queue)


class Job:
    """A request in the engine."""

    def __init__(self, request, arrival, final):
        self.request = request
        self.id = request.id
        self.arrival = arrival
        self.key = (request.priority, arrival, request.id)
        self.final = final
        self.tokens = request.prompt_tokens
        self.computed = 0
        self.high = 0
        self.blocks = []
        self.state = "waiting"
        self.preemptions = 0
        self.owed = 0
        self.swapped = 0
        self.put_out = False  # its last step generated a token
        self.first = None
        self.ended = None
        self.admitted = None

    def texts(self, size, count):
        shared = self.request.prefix_tokens // size if self.request.prefix else 0
        return [("prefix", self.request.prefix, i) if i < shared else (self.id, i) for i in range(count)]


class PlainEngine:
    """One engine, one step at a time."""

    def __init__(self, engine):
        self.engine = engine
        self.pool = PlainPool(engine.num_gpu_blocks - 1, caching=engine.enable_prefix_caching)
        self.running = []
        self.waiting = []
        self.lame = []
        self.now = self.sees = 0
        self.done = []
        self.aborted = []
        self.steps = self.output_steps = self.preemptions = self.counted = 0
        self.output_tokens = self.recomputed = self.scheduled_tokens = self.hit_tokens = 0
        self.swap_used = self.swapped_out = self.swapped_in = 0
        self.peak = 0
        self.refused = []

    def add(self, request, arrival):
        limit = self.engine.max_model_len
        if limit is not None and request.prompt_tokens >= limit:
            self.refused.append(request.id)
            return
        final = request.prompt_tokens + request.output_tokens
        job = Job(request, arrival, final if limit is None else min(final, limit))
        self.waiting.append(job)
        self._sort()

    def _sort(self):
        if self.engine.policy == "priority":
            self.waiting.sort(key=lambda job: job.key)

    @property
    def idle(self):
        return not self.running and not self.waiting

    def blocks_for(self, tokens):
        return -(-tokens // self.engine.block_size)

    def preempt(self, victim):
        self.running.remove(victim)
        self.preemptions += 1
        victim.preemptions += 1
        victim.owed += 1
        in_flight = self.engine.async_scheduling and victim.put_out
        self._unregister_later(victim)
        if self.engine.recovery == "swap" and victim.state == "running":
            held = self.blocks_for(victim.computed)
            if victim.computed and self.swap_used + held <= self.engine.swap_blocks:
                self.swap_used += held
                victim.swapped = victim.computed
                self.moved += held
                self.swapped_out += held
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.computed = 0
        victim.put_out = False
        if in_flight:
            self.in_flight.append(victim)
        if victim.state == "lame":
            self.lame.remove(victim)
            victim.state = "ended"
        else:
            victim.state = "waiting"
            self.waiting.insert(0, victim)
            self._sort()

    def _unregister_later(self, victim):
        self.pending = [entry for entry in self.pending if entry[0] is not victim]

    def schedule(self):
        engine = self.engine
        budget = engine.max_num_batched_tokens
        self.scheduled, self.pending, self.moved, self.in_flight = {}, [], 0, []
        self.preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            if job.state == "lame":
                index += 1
                continue
            new = min(job.tokens - job.computed, budget)
            need = self.blocks_for(job.computed + new) - len(job.blocks)
            fits = True
            while need > self.pool.free:
                self.preempted = True
                victim = (
                    self.running[-1] if engine.policy == "fcfs" else max(self.running, key=lambda j: j.key)
                )
                if victim in self.scheduled:
                    budget += self.scheduled.pop(victim)
                    index -= 1
                elif victim.state == "lame" and self.running.index(victim) < index:
                    index -= 1
                self.preempt(victim)
                if victim is job:
                    fits = False
                    break
            if not fits:
                break
            job.blocks += self.pool.take(need)
            self.pending.append((job, job.computed, job.computed + new))
            self.scheduled[job] = new
            budget -= new
            index += 1
        for job, since, until in self.pending:
            self._register(job, since, until)
        if not self.preempted:
            self._admit(budget)

    def _register(self, job, since, until):
        size = self.engine.block_size
        texts = job.texts(size, until // size)
        for i in range(since // size, until // size):
            self.pool.register(job.blocks[i], texts[i])

    def _admit(self, budget):
        engine, size = self.engine, self.engine.block_size
        while self.waiting and budget > 0 and len(self.running) < engine.max_num_seqs:
            job = self.waiting[0]
            hits = []
            if engine.enable_prefix_caching:
                hits = self.pool.lookup(job.texts(size, (job.tokens - 1) // size))
            in_use = sum(block.refs > 0 for block in hits)
            computed = max(len(hits) * size, job.swapped)
            new = job.tokens - computed
            if not engine.enable_chunked_prefill and new > budget:
                break
            new = min(new, budget)
            watermark = int(engine.watermark * engine.num_gpu_blocks) if self.running else 0
            whole = self.blocks_for(job.tokens)
            if engine.reserve_full_prompt and whole - in_use + watermark > self.pool.free:
                break
            if self.blocks_for(computed + new) - in_use + watermark > self.pool.free:
                break
            if not self.running and whole > len(self.pool.blocks):
                break
            self.waiting.pop(0)
            self.pool.touch(hits)
            job.blocks = hits + self.pool.take(self.blocks_for(computed + new) - len(hits))
            if job.swapped:
                back = max(0, self.blocks_for(job.swapped) - len(hits))
                self.moved += back
                self.swapped_in += back
                self.swap_used -= self.blocks_for(job.swapped)
                job.swapped = 0
            if job.preemptions == 0:
                self.hit_tokens += len(hits) * size
            job.computed = computed
            job.state = "running"
            if job.admitted is None:
                job.admitted = self.now
            self._register(job, 0, computed + new)
            self.running.append(job)
            self.scheduled[job] = new
            budget -= new

    def step(self):
        """Schedule, compute, generate; returns False if nothing could be scheduled."""
        self.schedule()
        tokens = sum(self.scheduled.values())
        for job in self.lame:
            self._end(job)
        freed, self.lame = bool(self.lame), []
        for job in self.in_flight:
            self.counted += job.owed
            job.owed = 0
        if not tokens and not self.moved:
            self.sees = self.now
            return freed or self.preempted
        self.sees = self.now
        self.now += self.engine.step_time.of(tokens, len(self.scheduled), self.moved)
        if not self.engine.async_scheduling:
            self.sees = self.now
        self.steps += 1
        self.scheduled_tokens += tokens
        outputs = 0
        for job, new in self.scheduled.items():
            self.recomputed += max(0, min(job.computed + new, job.high) - job.computed)
            job.computed += new
            job.high = max(job.high, job.computed)
            if job.computed < job.tokens:
                continue
            outputs += 1
            job.put_out = True
            job.tokens += 1
            self.counted += job.owed
            job.owed = 0
            job.first = self.now if job.first is None else job.first
            if job.tokens >= job.final:
                job.ended = self.now
                self.done.append(job)
                if self.engine.async_scheduling:
                    job.state = "lame"
                    self.lame.append(job)
                else:
                    self._end(job)
        self.output_tokens += outputs
        self.output_steps += outputs > 0
        self.peak = max(self.peak, len(self.pool.blocks) - self.pool.free)
        self.pool.check()
        return True

    def _end(self, job):
        self.running.remove(job)
        self.pool.release(job.blocks)
        job.blocks = []
        job.state = "ended"

    def abort(self, number):
        for job in self.waiting:
            if job.id == number:
                self.waiting.remove(job)
                if job.swapped:
                    self.swap_used -= self.blocks_for(job.swapped)
                self.aborted.append(job)
                return True
        for job in self.running:
            if job.id == number and job.state == "running":
                self._end(job)
                self.aborted.append(job)
                return True
        return False


def run_plain(engine, arrivals, on_step=None):
    """Run a plain engine with arrivals until it is empty or stuck; returns the engine."""
    plain = PlainEngine(engine)
    deadlines = []
    seen_done = seen_gone = 0
    while True:
        for at, number in sorted(deadlines):
            if at <= plain.sees:
                deadlines.remove((at, number))
                plain.abort(number)
        while len(plain.aborted) > seen_gone:
            seen_gone += 1
            arrivals.left(plain.now)
        while (at := arrivals.next_at()) is not None and at <= plain.sees:
            request = arrivals.take()
            before = len(plain.refused)
            plain.add(request, at)
            if len(plain.refused) > before:
                arrivals.left(plain.now)
            elif request.abort_after is not None:
                deadlines.append((at + request.abort_after, request.id))
        moved = plain.step() if not plain.idle else False
        if on_step is not None:
            on_step(plain)
        while len(plain.done) > seen_done:
            seen_done += 1
            arrivals.left(plain.now)
        if not moved:
            upcoming = [at for at, _ in deadlines if any(j.id == _ for j in plain.waiting)]
            at = arrivals.next_at()
            if at is not None:
                upcoming.append(at)
            if not upcoming:
                return plain
            plain.now = plain.sees = max(plain.now, min(upcoming))
