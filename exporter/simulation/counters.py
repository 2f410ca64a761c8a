"""The counters of a scheduler."""

from typing import Final

__all__ = ["Counters"]

_NAMED: Final = 10


class Counters:
    """Sums over all steps.

    Attributes:
        steps: Engine steps.
        output_steps: Steps that generated a token, as ``iteration_tokens_total_count``.
        busy: Nanoseconds in steps.
        scheduled_tokens: Tokens computed, prefill and decode.
        scheduled_sequences: Sum over the steps of the requests running in each.
        output_tokens: Tokens generated.
        recomputed_tokens: Tokens computed again after a preemption.
        cached_tokens: Prompt tokens found in the prefix cache at first admission.
        preemptions: Preemptions, counted when they happen.
        preemptions_counted: Preemptions, counted as in vLLM, with the victim's next output.
        swapped_out, swapped_in: Blocks copied to and from the swap space.
        refused: Rejected requests, whose prompt exceeds the model length.
        aborted: Requests whose client gave up.
        unfittable, unfittable_ids: Requests whose full length exceeds the pool, and the first of them.
        peak: The most blocks held after a step, when victims and finished requests have left, as in vLLM.
        held_time, running_time, waiting_time: Blocks held, requests running and waiting, times nanoseconds.
    """

    __slots__ = (
        "aborted",
        "busy",
        "cached_tokens",
        "held_time",
        "output_steps",
        "output_tokens",
        "peak",
        "preemptions",
        "preemptions_counted",
        "recomputed_tokens",
        "refused",
        "running_time",
        "scheduled_sequences",
        "scheduled_tokens",
        "steps",
        "swapped_in",
        "swapped_out",
        "unfittable",
        "unfittable_ids",
        "waiting_time",
    )

    def __init__(self) -> None:
        self.steps = self.output_steps = self.busy = 0
        self.scheduled_tokens = self.scheduled_sequences = self.output_tokens = 0
        self.recomputed_tokens = self.cached_tokens = 0
        self.preemptions = self.preemptions_counted = 0
        self.swapped_out = self.swapped_in = 0
        self.refused = self.aborted = self.unfittable = 0
        self.unfittable_ids: list[int] = []
        self.peak = 0
        self.held_time = self.running_time = self.waiting_time = 0

    def count_unfittable(self, number: int) -> None:
        """Count a request that can never fit, and keep the first few by number."""
        self.unfittable += 1
        if len(self.unfittable_ids) < _NAMED:
            self.unfittable_ids.append(number)

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
