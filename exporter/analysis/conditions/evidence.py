"""The types of a verdict's condition, and its evidence: numbers, each with its threshold. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from exporter.analysis.situation import Situation
from exporter.analysis.words import number

__all__ = ["Condition", "Evidence", "VerdictRule", "some"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that supports a verdict."""

    signal: str  # its name, that of a signal where there is one
    # The measured value; None where the missing value is the evidence, explained by `note`.
    value: float | None
    threshold: float | None = None  # the limit that it crossed; None for a fact that adds context
    note: str = ""  # why there is no value, in a few words
    ends: float | None = None  # the limit at which the verdict ends, where it is another one

    @property
    def limits(self) -> str:
        """The limits in words: ``threshold 0.80, ends below 0.40``; empty without one."""
        if self.threshold is None:
            return ""
        known = f"threshold {number(self.signal, self.threshold)}"
        if self.ends is None or self.ends == self.threshold:
            return known
        way = "below" if self.ends < self.threshold else "above"
        return f"{known}, ends {way} {number(self.signal, self.ends)}"


Condition = Callable[[Situation, bool], "tuple[Evidence, ...] | None"]


@dataclass(frozen=True, slots=True)
class VerdictRule:
    """One place in the order of verdicts."""

    verdict: str  # its name
    applies: Condition  # returns the evidence, or None where the verdict does not apply
    # For a verdict that is less than critical as a rule: whether it is critical here. Takes the situation and
    # whether it is critical already.
    is_critical: Callable[[Situation, bool], bool] | None = None
    # The same for a verdict that is less than a warning as a rule.
    is_warning: Callable[[Situation], bool] | None = None


def some(
    *evidence: tuple[str, float | None]
    | tuple[str, float | None, float | None]
    | tuple[str, float | None, float | None, float],
) -> tuple[Evidence, ...]:
    """Build evidence from (signal, value[, threshold[, ends]]), leaving out unknown values."""
    return tuple(
        Evidence(name, value, rest[0] if rest else None, ends=rest[1] if len(rest) > 1 else None)
        for name, value, *rest in evidence
        if value is not None
    )
