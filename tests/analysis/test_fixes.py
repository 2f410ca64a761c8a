"""FixAdvice in numbers, by hand; and what is held back, with its reason."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scenes import Stage, advice, engine_of, fixes, situation, withheld

from exporter.analysis import catalogue
from exporter.analysis.fixes import advise
from exporter.analysis.forecast import EngineForecast, FixForecast, Ratio
from exporter.config.arguments import read

BLOCKS_300 = {"kv_cache_size_tokens": 299 * 32, "block_size": 32, "cache_dtype": "auto"}
ROOMY = {"kv_cache_size_tokens": 1_000_000, "block_size": 32}
WORKLOAD = {
    "prompt_lengths": ({50: 0, 100: 11, 200: 28, 500: 64, math.inf: 64}, 14_913),
    "output_lengths": ({200: 0, 500: 40, 1000: 64, math.inf: 64}, 30_589),
}
STORM = {"running": 20, "waiting": 12, "kv": 0.98, "tokens": 300, "finished": 0.5, "preemptions": 2}
MEMORY = {"gpu_memory_gib": 80, "kv_cache_gib": 20}


def storm(cache=BLOCKS_300, lengths=WORKLOAD, part=STORM, **facts):
    """The last reading of a storm of a minute."""
    stage = Stage(cache=cache, **facts)
    return stage.play(60, **part, **lengths)[-1]


def reason(reading, fix):
    """Why a fix will not help."""
    return next(each.reason for each in engine_of(reading).advice.rejected if each.fix == fix)


# Fewer seats.


def waves(t):
    """Requests that run: twenty, and eight after each preemption of many."""
    return 20 if int(t) % 2 else 8


def test_fewer_seats_than_run_are_advised_with_their_number_and_a_caution():
    """32 seats, eight or twenty run: about fifteen fit; whether that is a gain only a forecast can say."""
    one = advice(storm(part=STORM | {"running": waves}, max_num_seqs=32), "lower_max_num_seqs")
    assert one.value in (14, 15, 16)
    assert one.flag == f"--max-num-seqs {one.value}"
    assert (one.gain, one.suffices) == (None, None)
    assert "can cost throughput" in one.note
    assert one.inputs["kv_capacity_tokens"] == 9568


def test_never_fewer_seats_than_run_on_average():
    """Twenty run all the time, so a limit of fifteen would be a loss."""
    assert "20" in reason(storm(max_num_seqs=32), "lower_max_num_seqs")


def test_never_fewer_seats_than_ran_without_preemption():
    """Eighteen ran for two minutes at a well used cache, so fifteen would be a loss."""
    stage = Stage(cache=BLOCKS_300, max_num_seqs=32)
    stage.play(120, running=18, kv=0.8, tokens=900, finished=2, **WORKLOAD)
    part = STORM | {"running": waves}
    assert advice(stage.play(60, **part, **WORKLOAD)[-1], "lower_max_num_seqs").value == 18


def test_a_limit_above_what_runs_is_no_cure():
    """Twelve run, at a cache that is full only at times; a limit of fourteen would change nothing."""
    part = STORM | {"running": 12, "kv": lambda t: 0.98 if int(t) % 3 == 0 else 0.4}
    assert "lower_max_num_seqs" in withheld(storm(part=part))


def test_a_single_request_that_fills_the_pool_needs_no_fewer_seats():
    """Two of 5,000 tokens in 9,568."""
    reading = storm(part=STORM | {"running": 2, "waiting": 1}, lengths={})
    assert "lower_max_num_seqs" in withheld(reading)


def test_seats_without_a_capacity_have_no_number():
    """Known is only that there are 32."""
    one = advice(storm(cache={}, max_num_seqs=32), "lower_max_num_seqs")
    assert (one.value, one.gain, one.suffices) == (None, None, None)
    assert "cache_config_info" in one.missing
    assert one.flag == "--max-num-seqs VALUE"


# More memory.


def test_the_gain_of_more_utilization_is_bytes_by_bytes():
    """From 0.85 to 0.93 of 80 GiB are 6.4 GiB more, on 20: 1.32 times."""
    one = advice(storm(gpu_memory_utilization=0.85, **MEMORY), "raise_gpu_memory_utilization")
    assert one.value == 0.93
    assert one.inputs["kv_capacity_ratio"] == pytest.approx(1.32)
    assert (one.gain, one.suffices) == (None, None)
    assert one.flag == "--gpu-memory-utilization 0.93"


def test_utilization_without_bytes_has_a_value_and_says_what_is_missing():
    """By how much the pool grows is not known."""
    one = advice(storm(gpu_memory_utilization=0.85), "raise_gpu_memory_utilization")
    assert (one.value, "kv_capacity_ratio" in one.inputs) == (0.93, False)
    assert "kv_cache_gib" in one.missing


@pytest.mark.parametrize(
    ("facts", "because"),
    [
        ({"gpu_memory_utilization": 0.93}, "0.93 already"),
        ({"gpu_memory_utilization": 0.95}, "0.95 already"),
        ({"gpu_memory_utilization": 0.85, "kv_cache_memory_bytes": 1 << 34}, "--kv-cache-memory-bytes"),
        ({"gpu_memory_utilization": 0.85, "num_gpu_blocks_override": 300}, "--num-gpu-blocks-override"),
    ],
)
def test_more_utilization_is_held_back_where_it_is_high_or_overridden(facts, because):
    """With the reason."""
    assert because in reason(storm(**facts), "raise_gpu_memory_utilization")


def test_more_utilization_is_held_back_after_a_restart_under_load():
    """It may have been memory."""
    stage = Stage(cache=BLOCKS_300, gpu_memory_utilization=0.85, **MEMORY)
    stage.play(60, **STORM, **WORKLOAD)
    stage.fail(30)
    stage.restart()
    reading = stage.play(60, **STORM, **WORKLOAD)[-1]
    assert "restarted" in reason(reading, "raise_gpu_memory_utilization")


def test_an_eight_bit_cache_holds_at_most_twice_the_tokens():
    """``auto`` does not prove sixteen bits."""
    sure = advice(storm(kv_cache_dtype="bfloat16", part=STORM | {"waiting": 3}), "fp8_kv_cache")
    assert sure.inputs["kv_capacity_ratio"] == 2.0
    unsure = advice(storm(part=STORM | {"waiting": 3}), "fp8_kv_cache")
    assert unsure.inputs["kv_capacity_ratio"] == 2.0
    assert "auto" in unsure.note


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int8", "nvfp4"])
def test_a_narrow_cache_is_not_narrowed_again(dtype):
    """Whatever its spelling."""
    assert dtype in reason(storm(kv_cache_dtype=dtype), "fp8_kv_cache")


def test_smaller_weights_give_their_half_to_the_pool():
    """16 GiB of weights halved are 8 more on 20: 1.4 times."""
    one = advice(storm(weights_gib=16, kv_cache_gib=20), "quantize_weights")
    assert one.inputs["kv_capacity_ratio"] == pytest.approx(1.4)
    assert "weights_gib" in advice(storm(), "quantize_weights").missing


@pytest.mark.parametrize(
    ("facts", "value", "ratio"),
    [
        ({"tensor_parallel_size": 2, "num_kv_heads": 8}, 4, 2.0),
        ({"tensor_parallel_size": 2, "num_kv_heads": 8, "weights_gib": 16, "kv_cache_gib": 20}, 4, 2.8),
        ({"tensor_parallel_size": 8, "num_kv_heads": 8, "weights_gib": 16, "kv_cache_gib": 20}, 16, 1.4),
        ({"tensor_parallel_size": 8, "num_kv_heads": 8}, 16, None),
        ({"tensor_parallel_size": 2}, 4, None),
        ({}, None, None),
    ],
    ids=["half the heads", "and half the weights", "weights only", "no weights told", "no heads", "nothing"],
)
def test_tensor_parallel_more_than_doubles_the_pool_only_up_to_the_kv_heads(facts, value, ratio):
    """Beyond them the same KV is held on every GPU, and only the weights make room."""
    one = advice(storm(**facts), "raise_tensor_parallel")
    assert one.value == value
    assert one.inputs.get("kv_capacity_ratio") == (ratio if ratio is None else pytest.approx(ratio))
    assert bool(one.missing) == (ratio is None)


def test_pipeline_parallel_needs_to_be_known_to_be_doubled():
    """One may not be what it is."""
    assert advice(storm(pipeline_parallel_size=1), "raise_pipeline_parallel").value == 2
    assert advice(storm(), "raise_pipeline_parallel").value is None


# Other roads.


def test_a_watermark_needs_vllm_0_24():
    """The labels date the server; a version that was told goes before."""
    assert advice(storm(), "set_watermark").flag == "--watermark 0.05"
    older = {"num_gpu_blocks": 300, "block_size": 32, "cache_dtype": "auto", "_block_size_resolved": "True"}
    assert "0.24" in reason(storm(cache=older), "set_watermark")
    assert "0.24" in reason(storm(vllm_version="0.23.0"), "set_watermark")
    assert advice(storm(cache=older, vllm_version="0.24.1"), "set_watermark").value == 0.05
    assert "already" in reason(storm(watermark=0.05), "set_watermark")


def test_reserving_whole_prompts_is_advised_only_where_it_is_off():
    """It is on by default since it exists."""
    assert fixes(storm(scheduler_reserve_full_isl=False))[0] == "reserve_full_prompt"
    assert "default" in reason(storm(), "reserve_full_prompt")


def test_replicas_are_as_many_as_hold_all_that_runs_and_waits():
    """Twenty and forty hold 60 x 498 tokens, 3.1 pools: three more."""
    one = advice(storm(part=STORM | {"waiting": 40}), "add_replicas")
    assert one.value == 3
    assert one.inputs["need_ratio"] == pytest.approx(60 * 498 / 9568, rel=0.03)


def test_replicas_for_seats_are_counted_by_seats():
    """Ten and thirty of ten seats: four servers, three more."""
    stage = Stage(cache=ROOMY, max_num_seqs=10)
    reading = stage.play(90, running=10, waiting=30, kv=0.1, tokens=900, finished=2, **WORKLOAD)[-1]
    assert engine_of(reading).judgement.verdict == "seat_bound"
    assert advice(reading, "add_replicas").value == 3
    assert advice(reading, "raise_max_num_seqs").value == 40
    assert engine_of(reading).saturation["seats"] == pytest.approx(4.0)


def test_more_seats_stop_where_the_cache_is_full():
    """Thirty wait for ten seats, and about fifteen fit."""
    stage = Stage(cache=BLOCKS_300, max_num_seqs=10)
    reading = stage.play(90, running=10, waiting=30, kv=0.4, tokens=900, finished=2, **WORKLOAD)[-1]
    one = advice(reading, "raise_max_num_seqs")
    assert one.value in (14, 15, 16)


def test_more_seats_are_never_more_than_tokens_in_a_step_nor_fewer_tokens_than_seats():
    """Neither is a pair that vLLM starts with."""
    part = {"running": 10, "waiting": 30, "kv": 0.1, "tokens": 900, "finished": 2, **WORKLOAD}
    few = Stage(cache=ROOMY, max_num_seqs=10, max_num_batched_tokens=16)
    assert advice(few.play(90, **part)[-1], "raise_max_num_seqs").value == 16
    none = Stage(cache=ROOMY, max_num_seqs=10, max_num_batched_tokens=10)
    assert "max_num_batched_tokens" in reason(none.play(90, **part)[-1], "raise_max_num_seqs")
    for tokens, value in ((64, 32), (63, None)):
        stage = Stage(cache=ROOMY, max_num_seqs=32, max_num_batched_tokens=tokens)
        stage.play(5)
        found = advise(situation(stage), "healthy", ("suspect_out_of_memory",))
        values = [one.value for one in found.fixes if one.fix == "lower_max_num_batched_tokens"]
        assert values == ([] if value is None else [value])


LIMITS = st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 90)).filter(
    lambda limits: limits[0] <= limits[1] <= limits[2]
)


@given(LIMITS, st.integers(1, 90), st.booleans())
@settings(max_examples=25, deadline=None)
def test_no_advice_about_seats_keeps_vllm_from_starting_or_leaves_the_limit_in_force(
    limits, simulated, short
):
    """Active seats <= seats <= tokens in a step, as vLLM demands; and the smaller limit is what changes."""
    active, most, tokens = limits
    known = {"max_num_active_seqs": active, "max_num_seqs": most, "max_num_batched_tokens": tokens}
    stage = Stage(cache=BLOCKS_300 if short else ROOMY, **known)
    part = STORM if short else {"running": active, "waiting": 30, "kv": 0.1, "tokens": 900, "finished": 2}
    stage.play(60, **part | {"running": lambda t: max(1, active if int(t) % 2 else active // 2)}, **WORKLOAD)
    fix = "lower_max_num_seqs" if simulated < active else "raise_max_num_seqs"
    one = FixForecast(
        fix, "helps", min(simulated, tokens), Ratio(1.2, 1.3, 1.4), Ratio(0.8, 0.9, 1.0), score=1.4
    )
    for forecast in (None, EngineForecast(60.0, True, "", (one,))):
        verdict = "preemption_thrash" if short else "seat_bound"
        for each in advise(situation(stage), verdict, (), forecast=forecast).fixes:
            if each.fix in ("lower_max_num_seqs", "raise_max_num_seqs"):
                after = known | read(each.flag)
                after = {name: int(value) for name, value in after.items()}
                assert after["max_num_active_seqs"] == each.value
                assert each.value <= after["max_num_seqs"] <= after["max_num_batched_tokens"]


def test_the_limit_of_active_seats_is_the_one_that_is_named():
    """4 of 64 seats are active: to 19 only that limit moves; beyond the seats both do."""
    stage = Stage(cache=ROOMY, max_num_seqs=64, max_num_active_seqs=4)
    part = {"running": 4, "waiting": 15, "kv": 0.1, "tokens": 900, "finished": 2, **WORKLOAD}
    reading = stage.play(90, **part)[-1]
    assert engine_of(reading).judgement.verdict == "seat_bound"
    one = advice(reading, "raise_max_num_seqs")
    assert (one.flag, one.inputs["max_num_active_seqs"]) == ("--max-num-active-seqs 19", 4)
    stage = Stage(cache=ROOMY, max_num_seqs=8, max_num_active_seqs=4)
    one = advice(stage.play(90, **part)[-1], "raise_max_num_seqs")
    assert one.flag == "--max-num-seqs 19 --max-num-active-seqs 19"
    both = storm(part=STORM | {"running": waves}, max_num_seqs=40, max_num_active_seqs=40)
    one = advice(both, "lower_max_num_seqs")
    assert one.flag == f"--max-num-active-seqs {one.value}"


def test_a_shorter_maximum_is_what_the_pool_can_hold():
    """9,568 tokens for one request, of which two should fit where the maximum does not exceed the pool."""
    stage = Stage(cache=BLOCKS_300, max_model_len=32_768)
    assert advice(stage.play(5)[-1], "lower_max_model_len").value == 9568
    stage = Stage(cache=BLOCKS_300, max_model_len=8192)
    assert advice(stage.play(5)[-1], "lower_max_model_len").value == 4784


def test_without_a_forecast_the_order_is_by_cost_and_what_may_do_harm_is_last():
    """Flags, then another KV type, then more GPUs; fewer seats last; and no number is promised."""
    part = STORM | {"running": waves}
    known = {"max_num_seqs": 32, "tensor_parallel_size": 1, "num_kv_heads": 8, "gpu_memory_utilization": 0.9}
    one = engine_of(storm(part=part, **known, **MEMORY)).advice
    table = catalogue.load().fixes
    costs = [catalogue.COSTS.index(table[each.fix].cost) for each in one.fixes[:-1]]
    assert costs == sorted(costs)
    assert one.fixes[-1].fix == "lower_max_num_seqs"
    assert not any(each.gain or each.suffices for each in one.fixes)
    assert "not been simulated" in one.sentence


def test_what_will_not_help_is_said_with_a_reason():
    """Smaller steps do not cut preemption, and nothing advises swap."""
    reading = storm()
    assert "blocks" in reason(reading, "lower_max_num_batched_tokens")
    assert {*fixes(reading)}.isdisjoint(withheld(reading))
    assert not any("swap" in name for name in catalogue.load().fixes)


def test_a_load_that_is_shared_badly_is_shared_before_memory_is_bought():
    """Routing comes first."""
    stage = Stage(cache=BLOCKS_300)
    stage.play(60, **STORM, **WORKLOAD)
    advised = advise(situation(stage), "preemption_thrash", (), imbalanced=True)
    assert advised.fixes[0].fix == "balance_routing"


def test_every_fix_of_every_verdict_can_be_asked_of_any_engine():
    """Advice or held back with a reason, whatever is known: nothing, or all."""
    table = catalogue.load()
    for cache, lengths in (({}, {}), (BLOCKS_300, WORKLOAD)):
        stage = Stage(cache=cache)
        stage.play(60, **STORM, **lengths)
        for verdict in table.verdicts:
            advised = advise(situation(stage), verdict, tuple(table.findings))
            assert all(each.reason for each in advised.rejected)
            assert len({each.fix for each in advised.fixes}) == len(advised.fixes)
