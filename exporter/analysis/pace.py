"""How long a step of this engine takes at which load: learned while it works as usual, compared with now.

Pure. The time between two tokens is fitted as ``a + b * running + c * prompt tokens per step``. What the past
does not tell apart stays open: the expected time is the highest one that agrees with it, so that a load never
seen before is no slow engine.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from exporter.analysis.history import History
from exporter.analysis.median import median

__all__ = ["CalmRate", "PaceWatch", "computed_prompts"]

# One observation of the fit is at least this long and has this many steps.
_SLICE_SECONDS: Final = 2.0
_LEAST_STEPS: Final = 3.0
_LEAST_SLICES: Final = 10.0
# Older observations count less; half as much after 300 of them.
_KEEP: Final = 0.5 ** (1 / 300)
# Relative noise of an observation, at the least; and how many deviations of the fit are still plausible.
_NOISE: Final = 0.1
_DEVIATIONS: Final = 2.0
# This number of prompt tokens per step may double a step's time, where no prompts were seen.
_LEAST_PROMPT_SCALE: Final = 64.0
# Preemptions of this share of the requests that start add little to the prompts that are computed.
_FEW_AGAIN: Final = 0.2
# What takes more than this factor is not learned as usual.
_UNUSUAL: Final = 2.0
_CALM_SECONDS: Final = 10.0
# The time of a step is known after so long; how much of it is fixed, after so long without a queue.
_ENOUGH_SECONDS: Final = 40.0
_KEEP_CALM: Final = 60


def computed_prompts(history: History, start: int) -> float | None:
    """Return the prompt tokens computed since a window's start; those from the prefix cache are not."""
    prompts = history.increase("prompt_tokens", start)
    if prompts is None:
        return None
    computed = history.increase("prompt_tokens_computed", start)
    if computed is None:
        computed = max(0.0, prompts - (history.increase("prefix_hits", start) or 0.0))
    return min(computed, prompts)


class CalmRate(NamedTuple):
    """Some ten seconds of work without a preemption."""

    requests: float  # running and waiting, on average
    tokens_per_second: float  # generated
    inter_token_seconds: float  # NaN where unknown
    finished_per_second: float  # requests
    used_per_request: float  # share of the pool that one request held


class PaceWatch:
    """Learns the pace of one engine."""

    def __init__(self) -> None:
        self.calm: deque[CalmRate] = deque(maxlen=_KEEP_CALM)  # the last calm times
        # Of them, None if unknown: the least and the usual share of the pool that a request holds, the usual
        # seconds between two tokens, and of a request (by Little's law, None where too few finished).
        self.used_per_request: float | None = None
        self.usual_used_per_request: float | None = None
        self.calm_inter_token_seconds: float | None = None
        self.calm_latency: float | None = None
        self._sums = [0.0] * 10  # n, r, x, rr, rx, xx, y, ry, xy, yy
        self._calm_sums = [0.0] * 10  # the same, while nothing waits
        self._seconds = self._calm_seconds = 0.0
        self._calm_fit: _Fit | None = None
        self._begin = math.nan
        self._calm_begin = math.nan
        self._fit: _Fit | None = None

    def observe(self, history: History, *, frozen: bool) -> None:
        """Learn from the time since the last slice, unless the engine is in trouble (`frozen`)."""
        now = history.times[-1]
        if math.isnan(self._begin) or now < self._begin:
            self._begin = self._calm_begin = now
        usable = not frozen and not history.sources.by_turns(now)
        if now - self._begin >= _SLICE_SECONDS:
            if usable:
                self._learn(history, history.window_start(self._begin))
            self._begin = now
        if now - self._calm_begin >= _CALM_SECONDS:
            if usable:
                self._note_calm(history, history.window_start(self._calm_begin))
            self._calm_begin = now

    def expected(self, running: float, prompts_per_step: float) -> float | None:
        """Return the longest plausible seconds of a step at this load; None before enough was seen."""
        if self._sums[0] < _LEAST_SLICES or self._seconds < _ENOUGH_SECONDS:
            return None
        return self._fitted().most(running, prompts_per_step)

    def prompt_share(self, seconds: float, prompts_per_step: float) -> float | None:
        """Return the share of a step's time that computing prompts explains; None before enough was seen."""
        if self._sums[0] < _LEAST_SLICES or seconds <= 0:
            return None
        return min(1.0, self._fitted().prompt_seconds * prompts_per_step / seconds)

    def unexplained_share(self, seconds: float, running: float, prompts_per_step: float) -> float:
        """Return the share of a step's time beyond the usual at this load; 0 before enough was seen."""
        if self._sums[0] < _LEAST_SLICES or seconds <= 0:
            return 0.0
        return max(0.0, 1.0 - self._fitted().usual(running, prompts_per_step) / seconds)

    def work_share(self, seconds: float) -> float | None:
        """Return the least share of a step's time that grows with its work; None before enough was seen.

        More requests at once share only the rest: where nearly all of it grows, no seat and no block helps.
        """
        if self._calm_sums[0] < _LEAST_SLICES or self._calm_seconds < _ENOUGH_SECONDS or seconds <= 0:
            return None
        if self._calm_fit is None:
            self._calm_fit = _Fit(self._calm_sums)
        return max(0.0, 1.0 - self._calm_fit.fixed_seconds / seconds)

    def _fitted(self) -> "_Fit":
        """Return the fit of all slices so far, made when it is first needed."""
        if self._fit is None:
            self._fit = _Fit(self._sums)
        return self._fit

    def _learn(self, history: History, start: int) -> None:
        steps = history.increase("engine_steps", start)
        seconds = history.ratio("inter_token_seconds", "inter_token_count", start)
        running = history.mean("requests_running", start)
        if not steps or steps < _LEAST_STEPS or seconds is None or running is None:
            return
        started = history.increase("first_token_count", start) or 0.0
        if (history.increase("preemptions", start) or 0.0) > _FEW_AGAIN * started:
            return
        x = (computed_prompts(history, start) or 0.0) / steps
        expected = self.expected(running, x)
        if expected is not None and seconds > _UNUSUAL * expected:
            return
        new = (
            1.0,
            running,
            x,
            running**2,
            running * x,
            x * x,
            seconds,
            running * seconds,
            x * seconds,
            seconds**2,
        )
        self._sums = [_KEEP * old + one for old, one in zip(self._sums, new, strict=True)]
        self._seconds += history.span(start)
        self._fit = None
        if not history.highest("requests_waiting", start):
            self._calm_sums = [_KEEP * old + one for old, one in zip(self._calm_sums, new, strict=True)]
            self._calm_seconds += history.span(start)
            self._calm_fit = None

    def _note_calm(self, history: History, start: int) -> None:
        running, waiting = history.mean("requests_running", start), history.mean("requests_waiting", start)
        tokens = history.rate("generation_tokens", start)
        if not running or waiting is None or tokens is None or history.increase("preemptions", start):
            return
        deferred = history.mean("requests_deferred", start) or 0.0
        seconds = history.ratio("inter_token_seconds", "inter_token_count", start)
        usage = history.mean("kv_usage", start)
        self.calm.append(
            CalmRate(
                running + waiting,
                tokens,
                math.nan if seconds is None else seconds,
                history.rate("requests_finished", start) or 0.0,
                0.0 if usage is None else usage / (running + deferred),
            )
        )
        used = [each.used_per_request for each in self.calm if each.used_per_request > 0]
        self.used_per_request = min(used, default=None)
        self.usual_used_per_request = median(used) if used else None
        between = [each.inter_token_seconds for each in self.calm if not math.isnan(each.inter_token_seconds)]
        self.calm_inter_token_seconds = median(between) if between else None
        finished = sum(each.finished_per_second for each in self.calm)
        enough = finished * _CALM_SECONDS >= _LEAST_STEPS
        self.calm_latency = sum(each.requests for each in self.calm) / finished if enough else None


class _Fit:
    """The fit, by Bayesian least squares: coefficients and what remains open of them.

    In units of the means, so that each coefficient is about a share of a usual step; before any data it may
    be as large as the step.
    """

    __slots__ = ("_cov", "_mean", "_scale", "_y", "fixed_seconds", "prompt_seconds")

    def __init__(self, sums: list[float]) -> None:
        n, r, x, rr, rx, xx, y, ry, xy, yy = sums
        self._y = y0 = max(y / n, 1e-9)
        self._scale = r0, x0 = max(r / n, 1.0), max(x / n, _LEAST_PROMPT_SCALE)
        f = (n, r / r0, x / x0, rr / r0**2, rx / (r0 * x0), xx / x0**2)
        g = (y / y0, ry / (r0 * y0), xy / (x0 * y0))
        noise = _NOISE**2
        for _ in range(2):  # the noise is known after the first fit
            self._cov = _inverse([each / noise + own for each, own in zip(f, _PRIOR, strict=True)])
            self._mean = _times(self._cov, (g[0] / noise, g[1] / noise, g[2] / noise))
            left = yy / y0**2 - 2 * _dot(self._mean, g) + _dot(self._mean, _times(f, self._mean))
            noise = max(_NOISE**2, left / n)
        self.prompt_seconds = max(0.0, self._mean[2]) * y0 / x0
        self.fixed_seconds = max(0.0, self._mean[0] + math.sqrt(self._cov[0])) * y0

    def usual(self, running: float, prompts_per_step: float) -> float:
        r0, x0 = self._scale
        return self._y * max(0.0, _dot((1.0, running / r0, prompts_per_step / x0), self._mean))

    def most(self, running: float, prompts_per_step: float) -> float:
        r0, x0 = self._scale
        at = (1.0, running / r0, prompts_per_step / x0)
        open_ = math.sqrt(max(0.0, _dot(at, _times(self._cov, at))))
        expected = _dot(at, self._mean) + _DEVIATIONS * open_
        return self._y * max(1.0, expected)


_Vector = tuple[float, float, float]
# Symmetric: (00, 01, 02, 11, 12, 22).
_Matrix = Sequence[float]
_PRIOR: Final[_Matrix] = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0)


def _dot(one: _Vector, other: _Vector) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def _times(matrix: _Matrix, by: _Vector) -> _Vector:
    a, b, c, d, e, f = matrix
    x, y, z = by
    return a * x + b * y + c * z, b * x + d * y + e * z, c * x + e * y + f * z


def _inverse(matrix: _Matrix) -> _Matrix:
    a, b, c, d, e, f = matrix
    m00, m01, m02 = d * f - e * e, c * e - b * f, b * e - c * d
    m11, m12, m22 = a * f - c * c, b * c - a * e, a * d - b * b
    det = a * m00 + b * m01 + c * m02
    return m00 / det, m01 / det, m02 / det, m11 / det, m12 / det, m22 / det
