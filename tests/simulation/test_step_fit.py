"""The step times that observations allow: near the truth where they tell, several where they do not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.analysis.load_profile import StepSlice
from exporter.simulation.step_fit import fit
from exporter.simulation.timing import StepTime

# A tiny and a larger model on a CPU, and an 8B model on a GPU, as measured.
TRUTHS = [StepTime(1_900_000, 35_000, 25_000), StepTime(5_300_000, 270_000, 800_000), StepTime()]
# Requests decoding, prompt tokens per step and preemptions per step: calm, rise and storm.
CALM = [(1, 2, 0.0), (2, 4, 0.0), (3, 5, 0.0)]
RISE = [(5, 12, 0.0), (8, 20, 0.0), (11, 25, 0.01)]
STORM = [(11, 6, 0.04), (12, 5, 0.045), (10, 7, 0.035)] * 2
RECOMPUTED = 450.0


def observed(truth, shapes, speed=lambda _: 1.0, recomputed=RECOMPUTED):
    """Slices of ten seconds each, as a server with that step time shows them."""
    slices = []
    for i, (decoding, prompts, preempted) in enumerate(shapes):
        prefill = prompts + recomputed * preempted
        step = (truth.fixed + truth.per_token * (prefill + decoding) + truth.per_sequence * decoding) / 1e9
        step *= speed(i)
        steps = 10.0 / step
        age = 10.0 * (len(shapes) - i)
        slices.append(StepSlice(age, 10.0, steps, prompts * steps, decoding * steps, preempted * steps))
    return slices


def growth(step_time, decoding=11, prefill=24):
    """How much longer a step takes with twice the work."""
    parts = step_time.per_token * prefill + (step_time.per_token + step_time.per_sequence) * decoding
    return (step_time.fixed + 2 * parts) / (step_time.fixed + parts)


@pytest.mark.parametrize("truth", TRUTHS, ids=["overhead", "computing", "GPU"])
def test_calm_rise_and_storm_together_identify_a_step(truth):
    """The best one grows with the load as the truth does, to a twentieth; the extremes enclose it."""
    times = fit(observed(truth, [*CALM, *RISE, *STORM]), RECOMPUTED, 60.0)
    assert growth(times[0]) == pytest.approx(growth(truth), rel=0.05)
    assert min(map(growth, times)) <= growth(truth) * 1.01
    assert max(map(growth, times)) >= growth(truth) * 0.99


def test_one_load_alone_leaves_the_step_open():
    """Several step times, far apart, and each takes the observed time."""
    slices = observed(TRUTHS[0], [STORM[0]] * 6)
    times = fit(slices, RECOMPUTED, 60.0)
    assert 3 <= len(times) <= 5
    assert max(map(growth, times)) > 1.2 * min(map(growth, times))
    steps, prompts = slices[0].steps, slices[0].prompt_tokens + RECOMPUTED * slices[0].preemptions
    for each in times:
        taken = each.fixed + (each.per_token * (prompts + slices[0].outputs)) / steps + each.per_sequence * 11
        assert taken * steps / 1e9 == pytest.approx(10.0, rel=1e-3)


def test_recomputed_tokens_are_no_fixed_time():
    """Without them the fit blames the fixed part for the work that vLLM does not count."""
    slices = observed(TRUTHS[1], [*CALM, *STORM])
    known, blind = fit(slices, RECOMPUTED, 60.0)[0], fit(slices, 0.0, 60.0)[0]
    assert known.per_token == pytest.approx(TRUTHS[1].per_token, rel=0.4)
    assert blind.fixed + 11 * blind.per_sequence > known.fixed + 11 * known.per_sequence


def test_a_machine_that_slows_down_is_not_taken_for_a_cost_of_requests():
    """Its speed drifts by a third during the storm; the rise before it tells the parts apart."""
    truth = TRUTHS[0]
    shapes = [*CALM, *RISE, *STORM]
    slices = observed(truth, shapes, lambda i: 1.0 + 0.35 * max(0, i - 6) / 5)
    times = fit(slices, RECOMPUTED, 60.0)
    assert min(map(growth, times)) < growth(truth) < max(map(growth, times))
    assert growth(times[0]) == pytest.approx(growth(truth), rel=0.15)


def test_an_idle_engine_shows_its_step_by_the_gaps_between_tokens():
    """The seconds of a slice mean nothing while the engine idles."""
    truth = TRUTHS[1]
    idle = [
        each._replace(
            seconds=30.0,
            busy=0.0,
            gaps=each.outputs,
            inter_token_seconds=each.outputs
            * (truth.fixed + truth.per_sequence + truth.per_token) / 1e9,
        )
        for each in observed(truth, [(1, 0, 0.0)] * 3)
    ]  # fmt: skip
    times = fit([*idle, *observed(truth, STORM)], RECOMPUTED, 60.0)
    assert growth(times[0]) == pytest.approx(growth(truth), rel=0.1)


def test_nothing_seen_is_no_step_time():
    """Rather than a guess."""
    assert fit([], 0.0, 60.0) == ()
    assert fit([StepSlice(1.0, 1.0, 0.0, 0.0, 0.0)], 0.0, 60.0) == ()


numbers = st.floats(0, 1e12, allow_nan=False)


@settings(max_examples=20)
@given(st.lists(st.builds(StepSlice, *[numbers] * 11), max_size=4), st.floats(0, 1e6))
def test_whatever_was_seen_no_step_takes_less_than_no_time(slices, recomputed):
    """Any numbers give finite parts, and more requests never take less."""
    for each in fit(slices, recomputed, 60.0):
        assert all(math.isfinite(part) and part >= 0 for part in (each.fixed, each.per_token))
        assert each.per_token + each.per_sequence >= 0
