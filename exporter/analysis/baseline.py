"""Keeps an engine's normal tokens per second and inter-token latency, from slices of its recent past.

Pure. Harm is judged against the past of the same engine, never against a constant that fits another GPU or
model.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from exporter.analysis.history import History
from exporter.analysis.median import median

__all__ = ["Baseline", "Pace", "Slice"]

SLICE_SECONDS: Final = 20.0
KEEP_SLICES: Final = 150  # fifty minutes
KEEP_PACES: Final = 16
LEVEL_SECONDS: Final = 1200.0
LEAST_CALM: Final = 2
# Only a slice with at least this KV usage shows how many requests fit.
CALM_KV: Final = 0.5
LEAST_BUSY: Final = 3
# Latency is compared with older slices of about the same load; at least this many are needed.
LATENCY_MARGIN_SECONDS: Final = 90.0
LEAST_LIKE: Final = 12
_LIKE_RUNNING: Final = 0.3
_LIKE_KV: Final = 0.15
_LIKE_PROMPTS: Final = 1.5


class Slice(NamedTuple):
    """About twenty seconds of the past; NaN is unknown. Rates are per second."""

    at: float
    generation_rate: float
    prompt_rate: float
    inter_token_seconds: float
    running: float
    kv_usage: float
    preemptions: float
    kv_growth: float
    counted: float


class Pace(NamedTuple):
    """Seconds per token in a slice, and normally at such a load."""

    at: float
    seconds: float
    normal: float
    kv_growth: float  # of the usage, in the slice
    counted: float  # tokens in the slice, of prompts and answers

    @property
    def factor(self) -> float:
        """Return seconds / normal."""
        return self.seconds / self.normal


class Baseline:
    """Keeps the slices of one engine."""

    __slots__ = ("_begin", "_paces", "_slices", "level", "level_requests")

    def __init__(self) -> None:
        # Tokens per second at work without preemption (with it, if there was no other time); None while there
        # are too few slices.
        self.level: float | None = None
        self.level_requests = 0.0  # running requests at that level
        self._slices: deque[Slice] = deque(maxlen=KEEP_SLICES)
        self._paces: deque[Pace] = deque(maxlen=KEEP_PACES)
        self._begin: float | None = None

    def observe(self, history: History, *, frozen: bool) -> None:
        """Add the last poll; `frozen` keeps the level: trouble must not become the normal of an engine."""
        now = history.times[-1]
        if self._begin is None or now < self._begin:
            self._begin = now
        if now - self._begin < SLICE_SECONDS:
            return
        start = history.window_start(self._begin)
        if history.span(start) > 0 and not history.sources.by_turns(now):  # a mixture of sources has no pace
            self._take(_slice(history, start))
        self._begin = now
        if not frozen:
            self._settle(now)

    def _take(self, new: Slice) -> None:
        self._slices.append(new)
        normal = self.latency(new.running, new.kv_usage, new.prompt_rate)
        if normal and not math.isnan(new.inter_token_seconds):
            self._paces.append(Pace(new.at, new.inter_token_seconds, normal, new.kv_growth, new.counted))

    def _settle(self, now: float) -> None:
        recent = [
            each
            for each in self._slices
            if now - each.at <= LEVEL_SECONDS and each.running > 0 and not math.isnan(each.generation_rate)
        ]
        calm = [each for each in recent if not each.preemptions]
        if len(calm) < LEAST_CALM:
            calm = recent if len(recent) >= LEAST_BUSY else []
        self.level = median(each.generation_rate for each in calm) if calm else None
        self.level_requests = median(each.running for each in calm) if calm else 0.0

    def latency(self, running: float, kv_usage: float, prompt_rate: float) -> float | None:
        """Return the normal inter-token latency in seconds at about this load.

        It is the lower quartile, so that 15 slow minutes do not become normal. None if there were only a few
        minutes of such a load.
        """
        if not self._slices:
            return None
        newest = self._slices[-1].at
        like = sorted(
            each.inter_token_seconds
            for each in self._slices
            if newest - each.at >= LATENCY_MARGIN_SECONDS
            and abs(each.running - running) <= max(0.5, _LIKE_RUNNING * running)
            and abs(each.kv_usage - kv_usage) <= _LIKE_KV
            and prompt_rate <= _LIKE_PROMPTS * each.prompt_rate + 1
            and not math.isnan(each.inter_token_seconds)
        )
        return like[len(like) // 4] if len(like) >= LEAST_LIKE else None

    def calm_running(self) -> int:
        """Return the highest mean number of running requests in a slice without preemption."""
        calm = [
            each.running
            for each in self._slices
            if each.preemptions == 0 and each.kv_usage >= CALM_KV and not math.isnan(each.running)
        ]
        return int(max(calm, default=0.0))

    def paces(self, since: float) -> Sequence[Pace]:
        """Return the paces since a time; slices whose load was new have none."""
        return [pace for pace in self._paces if pace.at >= since]


def _slice(history: History, start: int) -> Slice:
    def or_nan(value: float | None) -> float:
        return math.nan if value is None else value

    return Slice(
        at=history.times[-1],
        generation_rate=or_nan(history.rate("generation_tokens", start)),
        prompt_rate=or_nan(history.rate("prompt_tokens", start)),
        inter_token_seconds=or_nan(history.ratio("inter_token_seconds", "inter_token_count", start)),
        running=or_nan(history.mean("requests_running", start)),
        kv_usage=or_nan(history.mean("kv_usage", start)),
        preemptions=or_nan(history.increase("preemptions", start)),
        kv_growth=history.columns["kv_usage"][-1] - history.columns["kv_usage"][start],
        counted=sum(history.increase(name, start) or 0.0 for name in ("generation_tokens", "prompt_tokens")),
    )
