"""Sentences about an engine that its readings prove, in their numbers. Pure.

The catalogue's sentences hold whatever the readings are; what depends on a reading is said here and nowhere
else: how much is preempted, whether tokens per second fell, how much work is done twice.
"""

from collections.abc import Mapping
from typing import Final

from exporter.analysis.signals import Signals

__all__ = ["measured", "refusal"]

_PREEMPTING: Final = frozenset({"preemption_thrash", "preemption_light", "preemption_not_kv"})
_OF_THROUGHPUT: Final = frozenset({"preemption_thrash", "preemption_light", "decode_slow"})
# From this percentage of the usual rate on, tokens per second have not fallen.
_FELL: Final = 90
_LEAST_RECOMPUTED: Final = 0.05
_NUMBERS: Final = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
# A ratio within these is one; from the second on it is a number of its own, below the first a share.
_ABOUT_ONE: Final = (0.9, 1.15)
_CLOSE: Final = 0.15


def measured(verdict: str, signals: Signals) -> tuple[str, ...]:
    """Return the sentences that the signals of an engine in a verdict prove; unknown signals prove none."""
    ratio, again = signals.preemptions_per_finished_request, signals.recomputed_ratio
    sentences = []
    if verdict in _PREEMPTING and ratio:
        sentences.append(_per_finished(ratio))
    if verdict in _PREEMPTING and again is not None and again >= _LEAST_RECOMPUTED:
        sentences.append(f"Up to {again:.0%} of the computed tokens are work done twice.")
    now, usual = signals.generation_tokens_per_second, signals.generation_tokens_per_second_recent
    if verdict in _OF_THROUGHPUT and now is not None and usual:
        share = round(100 * now / usual)
        fell = "fell to" if share < _FELL else "have not fallen:"
        sentences.append(f"Tokens per second {fell} {share}% of this engine's usual {usual:.0f}.")
    return tuple(sentences)


def refusal(rates: Mapping[str, float]) -> str:
    """Say how many requests per second a server refuses, by which limit; empty if none."""
    parts = [f"{rate:.2g} requests/s by {limit}" for limit, rate in rates.items() if rate]
    return f"The server refuses {' and '.join(parts)}." if parts else ""


def _per_finished(ratio: float) -> str:
    """Put preemptions per finished request into words, such as: One preemption for every two of them."""
    least, most = _ABOUT_ONE
    if ratio >= most:
        return f"{ratio:.1f} preemptions for each finished request."
    if ratio >= least:
        return "About one preemption for each finished request."
    requests = round(1 / ratio)
    if requests >= len(_NUMBERS) + 2:
        return f"One preemption for every {requests} finished requests."
    if requests > 1 and abs(1 / ratio - requests) <= _CLOSE * requests:
        return f"One preemption for every {_NUMBERS[requests - 2]} finished requests."
    return f"{_NUMBERS[round(10 * ratio) - 2].capitalize()} preemptions for every ten finished requests."
