"""The scheduler against a plain one that takes every step and names every block; what always holds."""

import pytest
from hypothesis import given, settings
from support.plain_scheduler import run_plain
from support.scheduler_cases import cases, check_pool

from exporter.simulation.run import Run
from exporter.simulation.scheduler import Scheduler


def outcome(run, ended):
    """Everything that can be compared, of the package's scheduler."""
    scheduler, t = run.scheduler, run.scheduler.totals
    return {
        "preemptions": (t.preemptions, t.preemptions_counted),
        "steps": (t.steps, t.output_steps, scheduler.now),
        "tokens": (t.output_tokens, t.scheduled_tokens, t.recomputed_tokens, t.cached_tokens),
        "swapped": (t.swapped_out, t.swapped_in),
        "peak": t.peak,
        "lost": (t.refused, t.aborted, scheduler.running, scheduler.waiting),
        "ended": [(r.request.id, r.admitted, r.first, r.ended, r.preemptions) for r in ended],
    }


def plain_outcome(plain):
    """The same of the plain one."""
    return {
        "preemptions": (plain.preemptions, plain.counted),
        "steps": (plain.steps, plain.output_steps, plain.now),
        "tokens": (plain.output_tokens, plain.scheduled_tokens, plain.recomputed, plain.hit_tokens),
        "swapped": (plain.swapped_out, plain.swapped_in),
        "peak": plain.peak,
        "lost": (len(plain.refused), len(plain.aborted), len(plain.running), len(plain.waiting)),
        "ended": [(j.id, j.admitted, j.first, j.ended, j.preemptions) for j in plain.done],
    }


def finish(run):
    """Take a run to its end; everything that ended, in order."""
    ended = []
    while some := run.until(None):
        ended += some
    return ended


@settings(max_examples=100, deadline=None)
@given(cases())
def test_counting_gives_what_plain_stepping_gives(case):
    """Every count and every request's times are those of the scheduler that takes every step."""
    run = Run(case.engine, case.arrivals())
    assert outcome(run, finish(run)) == plain_outcome(run_plain(case.engine, case.arrivals()))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_gliding_changes_nothing(case):
    """Steps that were glided over are the steps that would have been taken."""
    gliding, stepping = (Run(case.engine, case.arrivals()) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_glide", lambda *_: None)
        stepped = outcome(stepping, finish(stepping))
    assert outcome(gliding, finish(gliding)) == stepped


@settings(max_examples=60, deadline=None)
@given(cases())
def test_at_every_step_blocks_and_requests_are_conserved(case):
    """Free and held blocks are the pool, within the limits; every request is somewhere."""
    run = Run(case.engine, case.arrivals())
    engine, scheduler = case.engine, run.scheduler
    step, add, entered, known = scheduler.step, scheduler.add, set(), set()

    def watched_add(request, arrival):
        live = add(request, arrival)
        if live is not None:
            entered.add(request.id)
        return live

    def watched():
        before = scheduler.totals.scheduled_tokens
        moved = step()
        pool, running = scheduler.pool, scheduler._running_list.running.values()
        check_pool(pool)
        private = sum(
            scheduler.kv.blocks(scheduler._running_list.computed(r)) - len(r.shared) for r in running
        )
        shared = {block for r in running for block in r.shared}
        assert private + len(shared) + pool.free == pool.size == engine.num_gpu_blocks - 1
        assert all(sum(block in r.shared for r in running) == block.refs for block in shared)
        assert scheduler.running <= engine.max_num_seqs
        assert scheduler.totals.scheduled_tokens - before <= engine.max_num_batched_tokens
        assert len(scheduler._lives) == scheduler.running + scheduler.waiting
        known.update(live.request.id for live in scheduler.finished)
        assert len(entered) == len(known | set(scheduler._lives)) + scheduler.totals.aborted
        return moved

    scheduler.step, scheduler.add = watched, watched_add
    finish(run)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_all_work_gets_done_or_the_deadlock_is_stated(case):
    """A run ends; what is left over then is behind a request that can never be scheduled."""
    run = Run(case.engine, case.arrivals())
    ended = finish(run)
    scheduler = run.scheduler
    if scheduler.idle:
        assert run.stuck is None
        gone = len(ended) + scheduler.totals.aborted + scheduler.totals.refused
        assert gone == len(case.requests)
        assert scheduler.pool.free == scheduler.pool.size
        assert all(live.final == live.request.prompt_tokens + live.outputs for live in ended)
    else:
        assert "never be scheduled" in run.stuck or "max_num_batched_tokens" in run.stuck
        assert scheduler.running == 0


@settings(max_examples=20, deadline=None)
@given(cases())
def test_the_same_case_gives_the_same_outcome(case):
    """Nothing is left to chance."""
    first, second = (Run(case.engine, case.arrivals()) for _ in range(2))
    assert outcome(first, finish(first)) == outcome(second, finish(second))
