"""Identifies the load and the step times of a server: those whose simulation does what the server did."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from exporter.analysis.load_profile import LoadProfile
from exporter.simulation.load import Load, held_tokens, observed_loads
from exporter.simulation.run import Result, simulate
from exporter.simulation.settings import Engine
from exporter.simulation.step_fit import fit
from exporter.simulation.timing import StepTime, nanoseconds
from exporter.simulation.whatif import horizon
from exporter.simulation.workload import Lengths

__all__ = ["Identified", "identify"]

# The most steps of one simulation of the present.
_EFFORT: Final = 8000
# The simulated number of requests in the engine may differ by this share or this number.
_ALIKE: Final = 0.3
_ALIKE_REQUESTS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Identified:
    """What reproduces a server."""

    load: Load
    step_times: tuple[StepTime, ...]  # best first; empty if nothing is known of them
    assumed: tuple[str, ...]  # as sentences


def identify(
    profile: LoadProfile, prompts: Lengths, outputs: Lengths, engine: Engine, *, fitted: bool
) -> Identified:
    """Return the load and the step times that reproduce what a server showed.

    Args:
        profile: what it showed.
        prompts: lengths in tokens.
        outputs: lengths in tokens.
        engine: its settings.
        fitted: whether to fit the step time; otherwise that of `engine` is used.
    """
    in_flight = profile.requests_running_mean + profile.requests_waiting_mean
    for load, arrivals in observed_loads(profile, prompts, outputs, engine.max_num_seqs):
        times, simulated = _step_times(profile, load, engine, fitted=fitted)
        found = Identified(load, times, (arrivals, *_open(times, profile)))
        difference = abs(simulated.running_mean + simulated.waiting_mean - in_flight)
        if difference <= max(_ALIKE_REQUESTS, _ALIKE * in_flight):
            break
    return found


def _step_times(
    profile: LoadProfile, load: Load, engine: Engine, *, fitted: bool
) -> tuple[tuple[StepTime, ...], Result]:
    """Return the step times, and a short run of the present with the best one.

    vLLM does not count the tokens that it computes again. The run tells how many there are per preemption,
    which hardly depends on the time of a step.
    """
    times: tuple[StepTime, ...] = ()
    if fitted:
        times = fit(profile.steps, held_tokens(load)[0], profile.window_seconds)
    now = replace(engine, step_time=times[0]) if times else engine
    warm_up, measured = horizon(load, now)
    end = nanoseconds(warm_up + measured)
    run = simulate(now, load.arrivals(1, end), warm_up=nanoseconds(warm_up), end=end, effort=_EFFORT)
    if not fitted:
        return (engine.step_time,), run
    if run.preemptions:
        times = fit(profile.steps, run.recomputed_tokens / run.preemptions, profile.window_seconds)
    return times, run


def _open(times: Sequence[StepTime], profile: LoadProfile) -> tuple[str, ...]:
    """Say how far the observations leave the step time open."""
    if not times:
        return ("the step time of an 8B model on one GPU (unknown)",)
    running = max(1, round(profile.requests_running_mean))
    factors = [each.of(2 * running, 2 * running) / each.of(running, running) for each in times]
    if len(times) == 1:
        return ()
    sentence = (
        "a step with twice the running requests takes {:.2f} to {:.2f} times as long (as far as observed)"
    )
    return (sentence.format(min(factors), max(factors)),)
