"""What speaks for a verdict: numbers, each beside the threshold it was held against."""

from collections.abc import Callable
from dataclasses import dataclass

from exporter.analysis.situation import Situation

__all__ = ["Condition", "Evidence", "some"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that speaks for a verdict.

    Attributes:
        signal: what it is, in the words of the signals where there is one.
        value: what was seen; None where just that speaks for it, and `note` says what is the matter.
        threshold: what it was held against, None where it is a fact beside.
        note: in a few words why there is no value.
    """

    signal: str
    value: float | None
    threshold: float | None = None
    note: str = ""


Condition = Callable[[Situation, bool], "tuple[Evidence, ...] | None"]


def some(
    *evidence: tuple[str, float | None] | tuple[str, float | None, float | None],
) -> tuple[Evidence, ...]:
    """Evidence, without what is unknown."""
    return tuple(
        Evidence(name, value, rest[0] if rest else None)
        for name, value, *rest in evidence
        if value is not None
    )
