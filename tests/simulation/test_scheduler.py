"""What the scheduler does, rule by rule, on pools small enough to follow by hand."""

from exporter.simulation.scheduler import Scheduler
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import Request

TICK = StepTime(1, 0, 0, 0)


def scheduler(blocks, **settings):
    """An engine with so many usable blocks of 4 tokens; a step takes a nanosecond."""
    settings = {"block_size": 4, "max_num_seqs": 8, "step_time": TICK, **settings}
    return Scheduler(Engine(num_gpu_blocks=blocks + 1, **settings))


def add(engine, *lengths, **fields):
    """Queue requests with (prompt, output) lengths, numbered from 0."""
    return [engine.add(Request(i, *pair, **fields), 0) for i, pair in enumerate(lengths)]


def steps(engine, count):
    """Take so many steps."""
    for _ in range(count):
        engine.step()


def test_prompts_are_computed_in_one_step_while_the_budget_lasts():
    """Two prompts of 4 fit into 8 tokens; each puts out its first token in that step."""
    engine = scheduler(10, max_num_batched_tokens=8)
    first, second = add(engine, (4, 2), (4, 2))
    engine.step()
    assert (engine.totals.scheduled_tokens, engine.totals.output_tokens) == (8, 2)
    assert first.first == second.first == 1


def test_a_prompt_beyond_the_budget_is_computed_in_chunks():
    """Twenty tokens at eight a step: the third step puts out the first token."""
    engine = scheduler(10, max_num_batched_tokens=8)
    (request,) = add(engine, (20, 1))
    steps(engine, 2)
    assert engine.totals.output_tokens == 0
    engine.step()
    assert request.first == request.ended == 3
    assert engine.totals.output_steps == 1


def test_unchunked_prompts_wait_for_a_step_of_their_own():
    """Without chunked prefill the second prompt is not begun in the step of the first."""
    engine = scheduler(10, max_num_batched_tokens=8, enable_chunked_prefill=False)
    first, second = add(engine, (6, 1), (6, 1))
    steps(engine, 2)
    assert (first.first, second.first) == (1, 2)


def test_no_more_run_than_there_are_seats():
    """The third of three requests waits for a seat, not for blocks."""
    engine = scheduler(100, max_num_seqs=2)
    add(engine, (4, 3), (4, 3), (4, 3))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)


def test_nobody_overtakes_the_head_of_the_queue():
    """A short prompt that would fit stays behind a long one that does not."""
    engine = scheduler(10)
    add(engine, (16, 20), (30, 1), (4, 1))
    steps(engine, 3)
    assert (engine.running, engine.waiting) == (1, 2)


def test_admission_wants_room_for_the_whole_prompt():
    """With reservation a prompt of 8 blocks does not start on 6 free ones; without it does."""
    for reserve, running in ((True, 1), (False, 2)):
        engine = scheduler(10, max_num_batched_tokens=16, reserve_full_prompt=reserve)
        add(engine, (16, 9), (32, 1))
        steps(engine, 2)
        assert engine.running == running


def test_the_watermark_is_kept_free_only_while_something_runs():
    """Two of ten blocks stay free for the second request; the first may take them all."""
    engine = scheduler(9, watermark=0.2)
    add(engine, (4, 9), (28, 1))
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)
    engine = scheduler(9, watermark=0.2)
    add(engine, (36, 1))
    engine.step()
    assert len(engine.finished) == 1


def test_one_block_is_never_used():
    """The null block is not part of usage."""
    engine = scheduler(2)
    add(engine, (8, 2))
    engine.step()
    assert engine.kv_usage == 1.0


def test_the_victim_is_the_request_admitted_last():
    """Two requests grow until the pool is full; the newer one goes to the head of the queue."""
    engine = scheduler(4)
    first, second = add(engine, (7, 9), (7, 9))
    steps(engine, 3)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert (engine.running, engine.waiting) == (1, 1)


def test_a_victim_may_be_the_one_that_asks():
    """The newest request needs the block that is missing, and gives way itself."""
    engine = scheduler(5)
    first, second = add(engine, (5, 9), (8, 9))
    steps(engine, 5)
    assert (first.preemptions, second.preemptions) == (0, 1)


def test_a_victim_goes_before_those_that_never_ran():
    """It resumes first, although others have waited longer."""
    engine = scheduler(4)
    first, second, third = add(engine, (7, 6), (7, 6), (7, 2))
    while not second.ended:
        engine.step()
    assert second.preemptions == 1
    assert first.ended < second.ended
    assert third.admitted is None


def test_nobody_is_admitted_in_a_step_that_preempted():
    """A short request would fit into the blocks of the victim, but waits for the next step."""
    engine = scheduler(4, enable_prefix_caching=False)
    add(engine, (7, 9), (7, 9), (1, 1))
    steps(engine, 2)
    assert engine.totals.preemptions == 0
    engine.step()
    assert engine.totals.preemptions == 1
    assert (engine.running, engine.waiting) == (1, 2)


def test_priority_preempts_the_least_important():
    """Not the last admitted, but the highest (priority, arrival)."""
    engine = scheduler(4, policy="priority")
    low = engine.add(Request(0, 7, 9, priority=5), 0)
    engine.step()
    high = engine.add(Request(1, 7, 9, priority=1), 1)
    steps(engine, 4)
    assert (low.preemptions, high.preemptions) == (1, 0)


def test_priority_admits_the_most_important_first():
    """The queue is ordered by (priority, arrival)."""
    engine = scheduler(10, max_num_seqs=1, policy="priority")
    later = engine.add(Request(0, 4, 2, priority=3), 0)
    sooner = engine.add(Request(1, 4, 2, priority=0), 0)
    steps(engine, 4)
    assert sooner.ended < later.ended


def test_resuming_finds_the_blocks_that_nobody_took():
    """With prefix caching only the blocks reused since are computed again; without, all of them."""
    lost = {}
    for caching in (True, False):
        engine = scheduler(8, enable_prefix_caching=caching)
        add(engine, (13, 12), (13, 12))
        while engine.step():
            pass
        assert engine.totals.preemptions == 1
        lost[caching] = engine.totals.recomputed_tokens
    assert 0 < lost[True] < lost[False]


def test_cached_blocks_are_given_up_from_the_end_of_the_longest_unused():
    """Blocks taken by others come from the victim's end: its beginning is still found."""
    engine = scheduler(6)
    first, second = add(engine, (11, 8), (11, 13))
    while not second.preemptions:
        engine.step()
    assert second.remnant.blocks == 2  # of three full ones; the first request needed one
    steps(engine, 4)
    assert second.remnant.blocks == 1
    while not second.ended:
        engine.step()
    assert first.ended
    assert engine.totals.recomputed_tokens == 12 - 4


def test_a_shared_prefix_is_computed_once():
    """The second prompt finds two full blocks of the first's text, in the very same step."""
    engine = scheduler(20)
    add(engine, (10, 2), (10, 2), prefix="system", prefix_tokens=8)
    engine.step()
    assert engine.totals.scheduled_tokens == 10 + 2
    assert engine.totals.cached_tokens == 8


def test_shared_blocks_are_held_once():
    """Three requests with the same two blocks hold five in all, not nine."""
    engine = scheduler(20)
    add(engine, (9, 3), (9, 3), (9, 3), prefix="system", prefix_tokens=8)
    engine.step()
    assert engine.pool.size - engine.pool.free == 2 + 3


def test_the_last_token_of_a_prompt_is_always_computed():
    """A prompt that is cached to its end still computes its last block."""
    engine = scheduler(20)
    add(engine, (8, 1), (8, 1), prefix="system", prefix_tokens=8)
    engine.step()
    assert engine.totals.scheduled_tokens == 8 + 4


def test_without_prefix_caching_nothing_is_shared():
    """The text's name does not matter then."""
    engine = scheduler(20, enable_prefix_caching=False)
    add(engine, (8, 1), (8, 1), prefix="system", prefix_tokens=8)
    engine.step()
    assert engine.totals.scheduled_tokens == 16


def test_outputs_end_at_the_model_length():
    """As vLLM: a sequence of max_model_len tokens is finished, whatever was asked for."""
    engine = scheduler(20, max_model_len=10)
    (request,) = add(engine, (6, 100))
    while engine.step():
        pass
    assert request.ended == 4
    assert engine.totals.output_tokens == 4


def test_prompts_as_long_as_the_model_are_refused():
    """They never enter the queue."""
    engine = scheduler(20, max_model_len=10)
    assert add(engine, (10, 1)) == [None]
    assert engine.totals.refused == 1
    assert engine.idle


def test_an_abort_frees_a_running_request():
    """Its blocks and its seat are free at once."""
    engine = scheduler(10)
    add(engine, (8, 9))
    engine.step()
    assert engine.abort(0)
    assert engine.idle
    assert engine.pool.free == engine.pool.size


def test_an_abort_drops_a_waiting_request():
    """The head that nobody could overtake is gone."""
    engine = scheduler(10)
    add(engine, (4, 9), (40, 1), (4, 9))
    engine.step()
    assert engine.abort(1)
    engine.step()
    assert engine.running == 2


def test_a_second_abort_finds_nothing():
    """So does one for a request that never was."""
    engine = scheduler(10)
    add(engine, (4, 9))
    assert engine.abort(0)
    assert not engine.abort(0)
    assert not engine.abort(7)


def test_vllm_counts_a_preemption_with_the_next_output():
    """The counter stands still until the victim has been computed again."""
    engine = scheduler(4)
    _, second = add(engine, (7, 9), (7, 9))
    while not second.preemptions:
        engine.step()
    assert (engine.totals.preemptions, engine.totals.preemptions_counted) == (1, 0)
    while not second.ended:
        engine.step()
    assert engine.totals.preemptions_counted == engine.totals.preemptions


def test_vllm_counts_it_at_once_with_async_scheduling():
    """One output was in flight, and takes the event along."""
    engine = scheduler(4, async_scheduling=True)
    _, second = add(engine, (7, 9), (7, 9))
    while not second.preemptions:
        engine.step()
    assert engine.totals.preemptions_counted == 1


def test_vllm_never_counts_a_preemption_whose_client_left():
    """An abort sends no output."""
    engine = scheduler(4)
    _, second = add(engine, (7, 9), (7, 9))
    while not second.preemptions:
        engine.step()
    engine.abort(1)
    while engine.step():
        pass
    assert (engine.totals.preemptions, engine.totals.preemptions_counted) == (1, 0)


def test_async_scheduling_frees_a_finished_request_one_step_late():
    """Its seat is taken one step later than without."""
    admitted = {}
    for lagging in (False, True):
        engine = scheduler(10, max_num_seqs=1, async_scheduling=lagging)
        add(engine, (4, 3), (4, 3))
        while engine.step():
            pass
        admitted[lagging] = engine.finished[1].admitted
    assert admitted == {False: 3, True: 3}
    engine = scheduler(10, max_num_seqs=2, async_scheduling=True)
    _, _, third = add(engine, (4, 3), (4, 9), (4, 3))
    steps(engine, 6)
    assert third.admitted == 4


def test_swapping_keeps_what_was_computed():
    """Nothing is computed again; the blocks go to host memory and come back."""
    engine = scheduler(4, recovery="swap", swap_blocks=10, enable_prefix_caching=False)
    _, second = add(engine, (7, 6), (7, 6))
    while engine.step():
        pass
    assert second.preemptions == 1
    assert engine.totals.recomputed_tokens == 0
    assert engine.totals.swapped_out == engine.totals.swapped_in == 2


def test_swapping_costs_time_per_block():
    """A step that copies blocks takes so much longer."""
    times = []
    for cost in (0, 100):
        engine = scheduler(
            4,
            recovery="swap",
            swap_blocks=10,
            enable_prefix_caching=False,
            step_time=StepTime(1, 0, 0, cost),
        )
        add(engine, (7, 6), (7, 6))
        while engine.step():
            pass
        times.append(engine.now)
    assert times[1] - times[0] == 100 * 4


def test_a_victim_that_does_not_fit_into_the_swap_space_is_recomputed():
    """The space is bounded."""
    engine = scheduler(4, recovery="swap", swap_blocks=1, enable_prefix_caching=False)
    add(engine, (7, 6), (7, 6))
    while engine.step():
        pass
    assert engine.totals.swapped_out == 0
    assert engine.totals.recomputed_tokens > 0


def test_a_request_that_outgrows_the_whole_pool_is_stated():
    """It runs alone, fills the pool, preempts itself, and can never come back: said, not looped."""
    engine = scheduler(3)
    add(engine, (8, 100))
    while engine.step():
        pass
    assert engine.stuck() == (
        "request 0 needs 4 blocks for its 13 tokens, the pool has 3: it can never be scheduled, "
        "and no request overtakes it"
    )
    assert engine.totals.unfittable == 1


def test_without_reservation_a_request_too_long_for_the_pool_ends_in_a_stated_deadlock():
    """A real server would admit its first chunk, preempt it, and begin again for ever."""
    engine = scheduler(3, reserve_full_prompt=False, max_num_batched_tokens=8)
    add(engine, (40, 1))
    while engine.step():
        pass
    assert "can never be scheduled" in engine.stuck()


def test_an_engine_with_work_is_not_stuck():
    """Running, waiting and idle engines have nothing to state."""
    engine = scheduler(10)
    assert engine.stuck() is None
    add(engine, (4, 2))
    engine.step()
    assert engine.stuck() is None
