"""Everything a scheduler counts while it runs."""

from typing import Final

__all__ = ["Totals"]

_NAMED: Final = 10


class Totals:
    """Sums over all steps so far.

    Attributes:
        steps: Engine steps.
        output_steps: Steps that put out a token: what ``iteration_tokens_total_count`` counts.
        busy: Nanoseconds in steps.
        scheduled_tokens: Tokens computed, prefill and decode.
        scheduled_sequences: Sum over the steps of the requests running in each.
        output_tokens: Tokens put out.
        recomputed_tokens: Tokens computed that had been computed before and were lost to a preemption.
        cached_tokens: Prompt tokens found in the prefix cache at first admission.
        preemptions: Preemptions when they happen.
        preemptions_counted: Preemptions when vLLM's counter moves: with the victim's next output.
        swapped_out, swapped_in: Blocks copied to and from the swap space.
        refused: Requests whose prompt exceeds the model length.
        aborted: Requests whose client gave up.
        unfittable: Requests that the whole pool cannot hold at their full length, and the first of them.
        peak: The most blocks held after a step (as vLLM's gauge: victims and finished ones are gone).
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

    def note_unfittable(self, number: int) -> None:
        """Count a request that can never fit; the first few are kept by number."""
        self.unfittable += 1
        if len(self.unfittable_ids) < _NAMED:
            self.unfittable_ids.append(number)

    def add_step(self, took: int, held: int, running: int, waiting: int) -> None:
        """Add one step's duration and what was held, running and waiting during it."""
        self.steps += 1
        self.busy += took
        self.scheduled_sequences += running
        self.held_time += held * took
        self.running_time += running * took
        self.waiting_time += waiting * took

    def add_outputs(self, tokens: int, outputs: int, held: int) -> None:
        """Add what a step computed and put out, and the blocks held after it."""
        self.scheduled_tokens += tokens
        self.output_tokens += outputs
        self.output_steps += outputs > 0
        self.peak = max(self.peak, held)

    def add_glide(self, steps: int, took: int, decoding: int, *, held: int, after: int, waiting: int) -> None:
        """Add steps of equal duration in which so many decode and nothing else happens.

        ``held`` is the sum over the steps of the blocks held, ``after`` what is held at the end.
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
