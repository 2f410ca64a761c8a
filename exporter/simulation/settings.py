"""The settings of an engine that affect preemption, named after vLLM's flags."""

from dataclasses import dataclass, field
from typing import Literal

from exporter.simulation.timing import StepTime

__all__ = ["Engine"]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its pool, limits and step time; raises ValueError for a setting that vLLM would reject."""

    num_gpu_blocks: int  # including the null block, which is never used
    block_size: int = 16  # tokens
    blocks_per_request: int = 0  # held besides those of its tokens (the state of a hybrid model)
    max_num_seqs: int = 256  # seats: requests running at once
    max_num_batched_tokens: int = 2048  # scheduled in one step at most
    max_model_len: int | None = None  # longer outputs are cut, longer prompts rejected; None: no limit
    watermark: float = 0.0  # share of the pool kept free when one is admitted while others run (0.24+)
    enable_prefix_caching: bool = True  # full blocks stay cached after they are freed, until they are reused
    reserve_full_prompt: bool = True  # ``scheduler_reserve_full_isl`` (0.19+): the whole context must fit
    enable_chunked_prefill: bool = True  # a prompt may be computed over several steps
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = False  # a step is scheduled before the last one's output is known
    recovery: Literal["recompute", "swap"] = "recompute"  # V1, or V0's swap to host memory for comparison
    swap_blocks: int = 0  # of the swap space; a victim that does not fit is recomputed
    step_time: StepTime = field(default_factory=StepTime)

    def __post_init__(self) -> None:
        if self.num_gpu_blocks < 2:  # noqa: PLR2004 -- the null block and another
            raise ValueError(
                f"num_gpu_blocks: expected at least 2 (one is the null block), got {self.num_gpu_blocks}"
            )
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: expected at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: expected a share from 0 to below 1, got {self.watermark}")

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_gpu_blocks - 1

    @property
    def watermark_blocks(self) -> int:
        """Blocks that the watermark keeps free at admission."""
        return int(self.watermark * self.num_gpu_blocks)
