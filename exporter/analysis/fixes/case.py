"""The types of advice, and the case that every fix is judged by. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from exporter.analysis.forecast import FixForecast
from exporter.analysis.kv_demand import KvContext, context_per_request, need, seats_that_fit
from exporter.analysis.lazy import lazy
from exporter.analysis.situation import Situation
from exporter.vllm.exposition import CacheConfig

__all__ = ["QUEUES", "Advice", "Answer", "Case", "FixAdvice", "FixRule", "Inputs", "RejectedFix"]

Inputs = dict[str, float | str]
QUEUES: Final = frozenset({"kv_bound", "seat_bound", "prefill_bound", "queue_not_kv", "deferred_wait"})
"""Under these verdicts requests wait for others, and a single one may hold what they need."""


@dataclass(frozen=True, slots=True)
class FixAdvice:
    """One thing to change."""

    fix: str  # its id in the catalogue
    value: float | int | str | None = None  # for the flag; None where none can be computed
    flag: str | None = None  # ready to paste, None where no flag does it
    # Tokens/s after the change / now, and whether preemptions and queue are then over: by a trusted forecast.
    gain: float | None = None
    suffices: bool | None = None
    # The numbers it was computed from, by name.
    inputs: Mapping[str, float | str] = field(default_factory=dict)
    # Settings or metrics that are needed to compute it, in words; empty if none are missing.
    missing: str = ""
    note: str = ""  # an assumption or a limit worth a sentence
    forecast: FixForecast | None = None  # its simulated effect, where that is trusted
    # Another fix, with the effect of both: together they suffice, where no fix does alone.
    together: FixForecast | None = None


@dataclass(frozen=True, slots=True)
class RejectedFix:
    """Something that will not help here, and why."""

    fix: str
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Fixes in order of rank, and those that will not help."""

    fixes: tuple[FixAdvice, ...] = ()
    rejected: tuple[RejectedFix, ...] = ()
    sentence: str = ""  # what the order rests on, and why there are no gains

    @property
    def heading(self) -> str:
        """The head of the fixes, which says what ranked them."""
        by_forecast = any(one.forecast is not None and one.forecast.helps for one in self.fixes)
        return f"What to change, {'best' if by_forecast else 'cheapest'} first"


Answer = FixAdvice | RejectedFix
FixRule = Callable[[str, "Case"], Answer]
"""Judges the fix of a name: advises it with what it can compute, or rejects it with a reason."""


@dataclass(frozen=True)
class Case:
    """An engine's situation with its verdict and findings; demand is computed once, on demand."""

    s: Situation
    verdict: str
    findings: tuple[str, ...]

    @lazy
    def context(self) -> KvContext | None:
        """Tokens per running request."""
        return context_per_request(self.s)

    @lazy
    def need(self) -> float | None:
        """Tokens that all requests would hold / KV capacity."""
        return need(self.s, self.context)

    @lazy
    def fit(self) -> int | None:
        """The most requests that run together without preemption."""
        return seats_that_fit(self.s, self.context)

    @property
    def memory(self) -> Inputs:
        """The inputs of every number about memory."""
        known = {"kv_capacity_tokens": self.s.signals.kv_capacity_tokens, "need_ratio": self.need}
        return {name: round(value, 3) for name, value in known.items() if value is not None}

    @property
    def cache(self) -> CacheConfig | None:
        """The labels of the engine's ``cache_config_info``."""
        return self.s.history.snapshot.cache if self.s.history.snapshot else None

    @property
    def kv_dtype(self) -> str | None:
        """The type of the KV cache: as set, else as its label has it."""
        fact = self.s.server_facts.get("kv_cache_dtype")
        return fact if isinstance(fact, str) else self.cache.cache_dtype if self.cache else None

    @property
    def readings(self) -> Mapping[str, float]:
        """The readings of the last poll."""
        return self.s.history.snapshot.values if self.s.history.snapshot else {}

    @property
    def version(self) -> tuple[int, ...]:
        """The oldest release of vLLM that prints these metrics."""
        return self.s.history.snapshot.version if self.s.history.snapshot else ()

    @property
    def minute(self) -> int:
        """Where the window of rates starts in the history."""
        return self.s.history.recent_start(self.s.thresholds.window)
