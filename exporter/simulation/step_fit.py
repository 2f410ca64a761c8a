"""Fits the time of a step to what a server showed, and says how far the observations leave it open.

A step takes a fixed time, a time per token of a prompt (first computed or computed again), and a time per
decoding request. Three kinds of observations are sums of these parts:

* the seconds of a slice in which the engine was busy all the time;
* the mean time between two tokens of a request, where nothing was preempted and the engine may have idled
  between polls;
* the mean time from admission to the first token, with few requests running.

The parts are not identified by one load alone, and on a shared machine the speed drifts. So the fit does not
look for one best answer: it weighs all ratios of the parts on a grid by their likelihood, with the speed as a
random walk, and a weak prior from servers that were measured. `fit` returns the mean and the extremes.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from exporter.analysis.load_profile import StepSlice
from exporter.simulation.timing import StepTime, nanoseconds

__all__ = ["fit"]

# Mean and deviation of the logarithms of: time per decoding request / fixed time (measured: 0.006 for an 8B
# model on a data-centre GPU, 0.2 where steps are computing); time per prompt token / per decoding request.
_PRIOR: Final = ((math.log(0.03), math.log(4)), (math.log(0.35), math.log(2.5)))
_GRID: Final = tuple(i / 4 for i in range(-24, 9)), tuple(i / 4 for i in range(-16, 9))
# The variance that the logarithm of the speed gains per second: steady, shared, and unsteady machines.
_DRIFTS: Final = (1e-5, 3e-4, 3e-3)
# Relative errors: of a time and of a gap between tokens; of a poll's time in seconds; of a time to the first
# token; per e-fold between the requests running then and now, because no step time is quite linear.
_ERROR: Final = 0.05
_GAP_ERROR: Final = 0.07
_POLL: Final = 0.1
_PREFILL_ERROR: Final = 0.4
_BEND: Final = 0.1
# An observation further away than this many standard errors counts as one at this distance.
_OUTLIER: Final = 3.0
# Fewer gaps or requests than this give no mean.
_GAPS: Final = 50
_PREFILLS: Final = 3
# With more requests running, several prompts share the steps in which they are computed.
_FEW_RUNNING: Final = 8.0
# The extremes are the means of this share of the weight on each side.
_TAIL: Final = 0.2
# Extremes that differ by less than this change no forecast.
_SAME: Final = 0.04
# The range of seconds per step, and requests decoding and tokens of prompts in a step, of any real engine.
_STEP: Final = 1e-6, 1e3
_DECODING: Final = 1e-2, 1e6
_PREFILL: Final = 1e8


class _Sum(NamedTuple):
    """One observation: ``seconds = fixed + prefill * per_token + decoding * per_request``."""

    age: float
    prefill: float
    decoding: float
    seconds: float
    variance: float  # of its logarithm
    steps: float = 0.0  # whose time it is; 0 where it is that of some requests


class _Point(NamedTuple):
    """Logarithms of the three parts, and their weight."""

    weight: float
    fixed: float
    per_request: float
    per_token: float

    def parts(self) -> tuple[float, float, float]:
        """Return the fixed time, the time per request and the time per prompt token, in seconds."""
        return math.exp(self.fixed), math.exp(self.per_request), math.exp(self.per_token)


def fit(slices: Sequence[StepSlice], recomputed: float, window: float) -> tuple[StepTime, ...]:
    """Return the step times that the slices allow, best first; empty if they show none.

    Args:
        slices: oldest first.
        recomputed: tokens that are computed again after a preemption, on average.
        window: seconds of the present; the steps of its slices take the observed time.
    """
    slices = [each for each in slices if _sane(each)]
    present = [each for each in slices if each.age <= window] or slices[-1:]
    if not present:
        return ()
    steps = sum(each.steps for each in present)
    decoding = sum(each.outputs for each in present) / steps
    prefill = sum(each.prompt_tokens + recomputed * each.preemptions for each in present) / steps
    sums = _observations(slices, recomputed, decoding)
    if not sums:
        return ()
    members = _members(_weighed(sums), prefill, decoding)
    now = [each for each in sums if each.age <= window] or sums[-1:]
    return tuple(_step_time(each, now) for each in members)


def _sane(each: StepSlice) -> bool:
    """Return whether numbers are those of an engine; a broken server shows any."""
    if min(each) < 0 or each.steps < 1 or each.seconds <= 0:
        return False
    step, decoding = each.seconds / each.steps, each.outputs / each.steps
    prefill = (each.prompt_tokens + each.preemptions) / each.steps
    return _STEP[0] <= step <= _STEP[1] and _DECODING[0] <= decoding <= _DECODING[1] and prefill <= _PREFILL


def _observations(slices: Sequence[StepSlice], recomputed: float, now: float) -> list[_Sum]:
    found = []
    for each in slices:
        decoding = each.outputs / each.steps
        prefill = (each.prompt_tokens + recomputed * each.preemptions) / each.steps
        bend = (_BEND * math.log(decoding / now)) ** 2
        if each.busy or each.preemptions:
            error = _ERROR**2 + (_POLL / each.seconds) ** 2
            found.append(
                _Sum(each.age, prefill, decoding, each.seconds / each.steps, error + bend, each.steps)
            )
        elif each.gaps >= _GAPS and _STEP[0] <= each.inter_token_seconds / each.gaps <= _STEP[1]:
            # The request whose prompt a step computes has no gap in it.
            others = prefill * max(0.0, decoding - 1) / decoding
            gap = each.inter_token_seconds / each.gaps
            found.append(_Sum(each.age, others, decoding, gap, _GAP_ERROR**2 + bend, each.steps))
        if not each.preemptions and each.prefills >= _PREFILLS and decoding < _FEW_RUNNING:
            prompt, seconds = each.prompt_tokens / each.prefills, each.prefill_seconds / each.prefills
            if _STEP[0] <= seconds <= _STEP[1]:
                found.append(_Sum(each.age, prompt, decoding, seconds, _PREFILL_ERROR**2 + bend))
    return found


def _weighed(sums: Sequence[_Sum]) -> list[_Point]:
    """Return all points of the grid with their weights, which add up to 1."""
    filters = [_filter(sums, drift) for drift in _DRIFTS]
    found: list[tuple[float, float, float, float]] = []
    (mean, deviation), (token_mean, token_deviation) = _PRIOR
    for request in _GRID[0]:
        per_request = math.exp(request)
        for token in _GRID[1]:
            per_token = per_request * math.exp(token)
            prior = -(((request - mean) / deviation) ** 2) - ((token - token_mean) / token_deviation) ** 2
            speeds = [
                math.log(each.seconds / (1.0 + per_token * each.prefill + per_request * each.decoding))
                for each in sums
            ]
            for gains, constant in filters:
                speed, likelihood = _likelihood(speeds, gains)
                found.append(
                    (likelihood + constant + prior / 2, speed, speed + request, speed + request + token)
                )
    most = max(likelihood for likelihood, *_ in found)
    weights = [math.exp(likelihood - most) for likelihood, *_ in found]
    total = sum(weights)
    return [_Point(weight / total, *each[1:]) for weight, each in zip(weights, found, strict=True)]


def _filter(sums: Sequence[_Sum], drift: float) -> tuple[list[tuple[float, float]], float]:
    """Return the gain and the precision of each observation in a Kalman filter of the speed's logarithm.

    The second value is the part of the logarithm of the likelihood that does not depend on the speeds.
    """
    gains: list[tuple[float, float]] = []
    variance, age = math.inf, sums[0].age
    for each in sums:
        variance += drift * max(0.0, age - each.age)
        age = each.age
        gain = 1.0 if math.isinf(variance) else variance / (variance + each.variance)
        gains.append((gain, (1 - gain) / each.variance))
        variance = each.variance * gain
    return gains, sum(math.log(precision) for _, precision in gains[1:]) / 2


def _likelihood(speeds: Sequence[float], gains: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the logarithm of the last speed and of the likelihood."""
    speed, likelihood = speeds[0], 0.0
    for observed, (gain, precision) in zip(speeds[1:], gains[1:], strict=True):
        error = observed - speed
        likelihood -= min(error * error * precision, _OUTLIER**2)
        speed += gain * error
    return speed, likelihood / 2


def _members(points: Sequence[_Point], prefill: float, decoding: float) -> list[_Point]:
    """Return the mean of the points, and the extremes in what matters to a forecast.

    That is how much longer a step takes with twice the requests, and which share of it is prefill.
    """

    def growth(point: _Point) -> float:
        fixed, per_request, per_token = point.parts()
        more = per_request * decoding + per_token * prefill
        return math.log((fixed + 2 * more) / (fixed + more))

    def share(point: _Point) -> float:
        fixed, per_request, per_token = point.parts()
        return per_token * prefill / (fixed + per_request * decoding + per_token * prefill)

    members = [_mean(points)]
    for measure in (growth, share):
        ordered = sorted(points, key=measure)
        extremes = _mean(_tail(ordered)), _mean(_tail(ordered[::-1]))
        if measure(extremes[1]) - measure(extremes[0]) > _SAME:
            members += extremes
    return members


def _tail(ordered: Sequence[_Point]) -> list[_Point]:
    """Return the first points, up to the share of the weight that makes a tail."""
    tail, weight = [], 0.0
    for point in ordered:
        tail.append(point)
        weight += point.weight
        if weight >= _TAIL:
            break
    return tail


def _mean(points: Sequence[_Point]) -> _Point:
    total = sum(point.weight for point in points)
    return _Point(total, *(sum(point.weight * point[i] for point in points) / total for i in (1, 2, 3)))


def _step_time(point: _Point, now: Sequence[_Sum]) -> StepTime:
    """Return the step time of a point, scaled so that the present takes the observed time."""
    fixed, per_request, per_token = point.parts()
    times = [(each.steps or 1.0, each) for each in now if each.steps or not any(e.steps for e in now)]
    observed = sum(steps * each.seconds for steps, each in times)
    modelled = sum(
        steps * (fixed + per_token * each.prefill + per_request * each.decoding) for steps, each in times
    )
    factor = observed / modelled
    token = nanoseconds(per_token * factor)
    return StepTime(nanoseconds(fixed * factor), token, nanoseconds(per_request * factor) - token)
