"""The counters of a scheduler, and a histogram of durations in bounded memory."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

__all__ = ["Counters", "LatencyHistogram"]

_BITS: Final = 7


@dataclass(slots=True)
class Counters:
    """Sums over all steps; times in nanoseconds."""

    steps: int = 0
    output_steps: int = 0  # steps that generated a token, as ``iteration_tokens_total_count``
    busy: int = 0  # time in steps
    scheduled_tokens: int = 0  # tokens computed, prefill and decode
    scheduled_sequences: int = 0  # sum over the steps of the requests running in each
    output_tokens: int = 0
    recomputed_tokens: int = 0  # tokens computed again after a preemption
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    preemptions: int = 0  # counted when they happen
    preemptions_counted: int = 0  # counted as in vLLM, with the victim's next output
    swapped_out: int = 0  # blocks
    swapped_in: int = 0
    refused: int = 0  # requests whose prompt exceeds the model length
    aborted: int = 0  # requests whose client gave up
    unfittable: int = 0  # requests whose full length exceeds the pool
    peak: int = 0  # most blocks held after a step, when victims and finished requests have left, as in vLLM
    held_time: int = 0  # blocks held, times duration
    running_time: int = 0
    waiting_time: int = 0

    def add_step(self, took: int, held: int, running: int, waiting: int) -> None:
        """Add the duration of a step, and the blocks held and requests running and waiting during it."""
        self.steps += 1
        self.busy += took
        self.scheduled_sequences += running
        self.held_time += held * took
        self.running_time += running * took
        self.waiting_time += waiting * took

    def add_outputs(self, tokens: int, outputs: int, held: int) -> None:
        """Add the tokens computed and generated in a step, and the blocks held after it."""
        self.scheduled_tokens += tokens
        self.output_tokens += outputs
        self.output_steps += outputs > 0
        self.peak = max(self.peak, held)

    def add_glide(self, steps: int, took: int, decoding: int, *, held: int, after: int, waiting: int) -> None:
        """Add steps of equal duration in which requests only decode.

        ``held`` is the sum over the steps of the blocks held, ``after`` the blocks held at the end.
        """
        self.steps += steps
        self.output_steps += steps
        self.busy += steps * took
        self.scheduled_tokens += steps * decoding
        self.scheduled_sequences += steps * decoding
        self.output_tokens += steps * decoding
        self.peak = max(self.peak, after)
        self.held_time += held * took
        self.running_time += steps * decoding * took
        self.waiting_time += steps * waiting * took


class LatencyHistogram:
    """Counts of values in buckets less than 1 % wide; the mean is exact.

    Values are whole numbers of at least 0 (nanoseconds). The values of a bucket have the same leading eight
    bits, so a hundred thousand latencies take a few hundred counts.
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = self.total = 0

    def add(self, value: int) -> None:
        """Count one value."""
        shift = max(0, value.bit_length() - _BITS - 1)
        least = value >> shift << shift
        self._buckets[least] += 1
        self.count += 1
        self.total += value

    @property
    def mean(self) -> float | None:
        """The exact mean, or None without values."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return a quantile (to 1 %), or None without values."""
        if not self.count:
            return None
        rank = max(1, -(-round(share * 1_000_000) * self.count // 1_000_000))
        for least in sorted(self._buckets):
            rank -= self._buckets[least]
            if rank <= 0:
                return least + ((1 << max(0, least.bit_length() - _BITS - 1)) - 1) / 2
        return float(max(self._buckets))
