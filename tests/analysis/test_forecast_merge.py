"""A forecast meets the fixes: what helps is ranked by it, what does not is moved to what will not help."""

from dataclasses import replace

import pytest
from support.scenes import Stage, engine_of, situation

from exporter.analysis import catalogue
from exporter.analysis.fixes import advise
from exporter.analysis.forecast import EngineForecast, FixForecast, Ratio
from exporter.publish.status import status_object

POOL = {"kv_cache_size_tokens": 299 * 32, "block_size": 32, "cache_dtype": "auto"}
STORM = {"running": 20, "waiting": 12, "kv": 0.98, "tokens": 300, "finished": 0.5, "preemptions": 2}
AT = 60.0


def ratio(mean, spread=0.0):
    """A ratio with a spread to both sides."""
    return Ratio(mean - spread, mean, mean + spread)


def one(fix, outcome, tokens, latency=1.0, value=None, spread=0.0):
    """A simulated fix."""
    return FixForecast(fix, outcome, value, ratio(tokens, spread), ratio(latency), score=tokens / latency)


def forecast(*fixes, trusted=True):
    """A forecast of a storm."""
    return EngineForecast(AT, trusted, "tokens/s and preemptions match", fixes)


def stage_of_a_storm(**facts):
    """A minute of a storm."""
    stage = Stage(cache=POOL, max_num_seqs=32, **facts)
    stage.play(60, **STORM)
    return stage


def advised(*fixes, trusted=True, verdict="preemption_thrash", **facts):
    """The advice of a verdict with simulated fixes."""
    made = forecast(*fixes, trusted=trusted)
    return advise(situation(stage_of_a_storm(**facts)), verdict, (), forecast=made)


def names(advice):
    """The fixes in their order."""
    return [each.fix for each in advice.fixes]


def reason(advice, fix):
    """Why a fix will not help; empty if that is not said."""
    return next((each.reason for each in advice.rejected if each.fix == fix), "")


@pytest.mark.parametrize(("outcome", "tokens"), [("worse", 0.76), ("no_help", 1.01)])
def test_what_does_not_help_stands_among_what_will_not_help_with_its_numbers(outcome, tokens):
    """It is advised nowhere."""
    advice = advised(one("set_watermark", outcome, tokens, 1.33))
    assert "set_watermark" not in names(advice)
    assert f"tokens/s x{tokens:.2f}, time per request x1.33" in reason(advice, "set_watermark")


def test_the_larger_gain_comes_first_even_if_it_costs_more():
    """A pool of twice the size is worth a change of the KV type."""
    advice = advised(one("set_watermark", "helps", 1.05), one("fp8_kv_cache", "helps", 1.4, 0.7))
    assert names(advice)[:2] == ["fp8_kv_cache", "set_watermark"]
    assert [each.gain for each in advice.fixes[:2]] == [1.4, 1.05]
    assert [each.suffices for each in advice.fixes[:2]] == [False, False]
    assert "tokens/s x1.40" in advice.fixes[0].note


def test_of_similar_gains_the_cheaper_fix_comes_first():
    """A flag, then the KV type, then another server."""
    similar = (
        one("add_replicas", "suffices", 1.45, value=1),
        one("fp8_kv_cache", "suffices", 1.42),
        one("set_watermark", "suffices", 1.40, value=0.08),
    )
    advice = advised(*similar)
    assert names(advice)[:3] == ["set_watermark", "fp8_kv_cache", "add_replicas"]
    assert advice.fixes[0].flag == "--watermark 0.08"
    assert all(each.suffices for each in advice.fixes[:3])


def test_an_uncertain_fix_is_last_without_a_gain_and_says_so():
    """Its effect depends on what the data leave open."""
    advice = advised(one("set_watermark", "uncertain", 1.02, spread=0.1), one("fp8_kv_cache", "helps", 1.4))
    last = advice.fixes[-1]
    assert (last.fix, last.gain, last.suffices) == ("set_watermark", None, None)
    assert "(0.92 to 1.12)" in last.note
    assert "uncertain" in last.note


def test_a_fix_without_a_forecast_follows_those_that_help():
    """Tensor parallel was not simulated."""
    advice = advised(one("fp8_kv_cache", "helps", 1.2), one("set_watermark", "uncertain", 1.0, spread=0.1))
    order = names(advice)
    assert order[0] == "fp8_kv_cache"
    assert order.index("fp8_kv_cache") < order.index("raise_tensor_parallel") < order.index("set_watermark")


def test_the_simulation_chooses_the_number_of_seats():
    """Twenty run all the time, so without a forecast no limit is named; six help by simulation."""
    assert "lower_max_num_seqs" not in names(advised(trusted=False))
    advice = advised(one("lower_max_num_seqs", "helps", 1.04, 0.9, value=6))
    assert (advice.fixes[0].fix, advice.fixes[0].flag) == ("lower_max_num_seqs", "--max-num-seqs 6")
    assert not reason(advice, "lower_max_num_seqs")


def test_a_forecast_advises_nothing_that_the_server_is_too_old_for():
    """The watermark came with 0.24."""
    advice = advised(one("set_watermark", "helps", 1.3, value=0.05), vllm_version="0.23.0")
    assert "set_watermark" not in names(advice)
    assert "0.24" in reason(advice, "set_watermark")


def test_a_forecast_advises_no_memory_that_another_setting_overrides():
    """It knows nothing of the GPU's memory."""
    advice = advised(one("raise_gpu_memory_utilization", "helps", 1.2), num_gpu_blocks_override=300)
    assert "raise_gpu_memory_utilization" not in names(advice)


def test_an_untrusted_forecast_changes_no_order_and_is_explained():
    """Nor does it reject anything."""
    made = advised(one("fp8_kv_cache", "suffices", 1.9), one("set_watermark", "worse", 0.5), trusted=False)
    plain = advise(situation(stage_of_a_storm()), "preemption_thrash", ())
    assert names(made) == names(plain)
    assert not any(each.gain or each.suffices for each in made.fixes)
    assert made.sentence == "Ordered by cost, without gains: tokens/s and preemptions match."


def test_verdicts_that_are_not_about_capacity_are_not_ranked_by_a_forecast():
    """A hang is no question of load."""
    made = advised(one("restart_engine", "helps", 2.0), verdict="engine_stalled")
    assert names(made)[0] == "send_probe_request"
    assert made.sentence == ""


def test_it_is_said_where_only_hardware_or_nothing_helps():
    """Of what was simulated."""
    assert "only more hardware helps" in advised(one("add_replicas", "suffices", 1.9, 0.5)).sentence
    assert "No change that was simulated helps" in advised(one("fp8_kv_cache", "no_help", 1.0)).sentence
    assert "helps" not in advised(one("fp8_kv_cache", "helps", 1.3)).sentence


def test_the_pipeline_shows_the_forecast_from_the_next_poll_and_forgets_it_after_a_restart():
    """It was of another process."""
    stage = stage_of_a_storm()
    key = engine_of(stage.readings[-1]).key
    stage.pipeline.set_forecast(key, forecast(one("fp8_kv_cache", "helps", 1.4)))
    shown = engine_of(stage.play(1, **STORM)[-1])
    assert (shown.advice.fixes[0].fix, shown.advice.fixes[0].gain) == ("fp8_kv_cache", 1.4)
    assert shown.forecast.at == AT
    stage.restart()
    shown = engine_of(stage.play(2, **STORM)[-1])
    assert shown.forecast is None
    assert not any(each.gain for each in shown.advice.fixes)


def test_a_forecast_that_took_until_after_a_restart_is_not_used():
    """Its readings are those of the old process."""
    stage = stage_of_a_storm()
    before = stage.readings[-1]
    stage.restart()
    stage.play(2, **STORM)
    late = replace(forecast(one("fp8_kv_cache", "helps", 1.4)), at=before.t)
    stage.pipeline.set_forecast(engine_of(before).key, late)
    shown = engine_of(stage.play(1, **STORM)[-1])
    assert shown.forecast is None
    assert not any(each.gain for each in shown.advice.fixes)


def test_the_best_of_several_simulated_values_is_the_forecast_of_a_fix():
    """What makes things worse is chosen only if nothing else was tried."""
    calibration = {"trusted": True, "reason": "they match"}

    def row(fixes, outcome, tokens, **more):
        figure = {"ratio_to_now": tokens, "ratio_least": tokens - 0.1, "ratio_most": tokens + 0.1}
        figures = {"output_tokens_per_second": figure}
        return {"fixes": fixes, "outcome": outcome, "figures": figures, "parts": [], "score": tokens, **more}

    rows = [
        row(["lower_max_num_seqs"], "worse", 0.8, value=4),
        row(["lower_max_num_seqs"], "helps", 1.1, value=12),
        row(["fp8_kv_cache", "raise_tensor_parallel"], "no_help", 1.0),
        row([], "helps", 3.0),
    ]
    now = {"figures": {"recomputed_tokens_per_second": {"mean": 700.0}, "recomputed_ratio": {"mean": 0.38}}}
    simulated = {"step_times": [{"per_token": 25_000}, {"per_token": 20_000}]}
    document = {"calibration": calibration, "now": now, "simulated": simulated, "candidates": rows}
    made = EngineForecast.from_dict(document, AT)
    assert (made.recomputed_per_second, made.recomputed_ratio) == (700.0, 0.38)
    assert made.seconds_per_token == pytest.approx(20e-6)
    assert {each.fix: (each.outcome, each.value) for each in made.fixes} == {
        "lower_max_num_seqs": ("helps", 12),
        "fp8_kv_cache": ("no_help", None),
        "raise_tensor_parallel": ("no_help", None),
    }
    assert made.fixes[0].tokens == pytest.approx(Ratio(1.0, 1.1, 1.2))
    assert made.pairs == ()
    parts = [{"fixes": ["fp8_kv_cache", "raise_tensor_parallel"], "value": None}]
    parts.append({"fixes": ["set_watermark"], "value": 0.05})
    rows.append(row([], "suffices", 1.9, parts=parts))
    pairs = EngineForecast.from_dict(document, AT).pairs
    assert [[(one.fix, one.value, one.score) for one in each] for each in pairs] == [
        [(fix, None, 1.9), ("set_watermark", 0.05, 1.9)] for fix in ("fp8_kv_cache", "raise_tensor_parallel")
    ]
    rows[-1]["outcome"] = "helps"
    assert EngineForecast.from_dict(document, AT).pairs == ()
    failed = EngineForecast.from_dict({"error": "no request has finished yet"}, AT)
    assert replace(failed, fixes=()) == EngineForecast(AT, False, "no request has finished yet")


def test_few_fixes_can_do_harm():
    """Without a forecast they are advised last."""
    table = catalogue.load().fixes.values()
    assert {fix.name for fix in table if fix.may_harm} == {
        "lower_max_num_seqs",
        "raise_max_num_batched_tokens",
    }


@pytest.mark.parametrize("trusted", [True, False])
def test_the_cost_of_preemptions_is_shown_by_a_forecast_that_matches(trusted):
    """Tokens computed again, per second and of all."""
    stage = stage_of_a_storm()
    made = EngineForecast(AT, trusted, "they match", (), 700.0, 0.38)
    stage.pipeline.set_forecast(engine_of(stage.readings[-1]).key, made)
    reading = stage.play(1, **STORM)[-1]
    (engine,) = status_object("http://a", reading, reading.t)["engines"].values()
    known = {"recomputed_tokens_per_second": 700.0, "recomputed_ratio": 0.38} if trusted else {}
    assert (
        engine["forecast"]
        == {"trusted": trusted, "sentence": "they match", "age_seconds": reading.t - AT} | known
    )
