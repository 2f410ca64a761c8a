"""The blocks of each request: vLLM's KV cache manager, and the swap space of the classic recovery."""

from exporter.simulation.counters import Counters
from exporter.simulation.in_flight import InFlight
from exporter.simulation.pool import Pool, SharedBlock
from exporter.simulation.settings import Engine

__all__ = ["KvManager"]


class KvManager:
    """The blocks of the requests of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.pool = Pool(engine.usable_blocks, caching=engine.enable_prefix_caching)  # The blocks
        self.moved = 0  # Blocks swapped since the caller last set it to 0; they take time
        self._size = engine.block_size
        self._fixed = engine.blocks_per_request
        self._swapping = engine.recovery == "swap"
        self._swap_free = engine.swap_blocks

    def blocks(self, tokens: int) -> int:
        """Return how many blocks a request with this many tokens holds; none before the first token."""
        return -(-tokens // self._size) + self._fixed if tokens else 0

    def growth(self, live: InFlight, new: int) -> int:
        """Return the blocks that a running request needs to compute this many more tokens."""
        return self.blocks(live.computed + new) - self.blocks(live.computed)

    def enter(self, live: InFlight) -> None:
        """Find the shared prefix of a new request."""
        request = live.request
        if request.prefix is not None and self.pool.caching:
            live.text = self.pool.text(request.prefix)
            live.shared_blocks = request.prefix_tokens // self._size

    def look_up(self, live: InFlight) -> tuple[list[SharedBlock], int]:
        """Return the cached blocks of the shared prefix, and how many of its own a request finds again.

        The last token is always computed, so its block is never a hit. A request's own blocks are evicted
        before the shared ones in front of them, so they are hits only if all shared blocks are.
        """
        found: list[SharedBlock] = []
        if live.text is not None:
            found = live.text.find(min(live.shared_blocks, (live.tokens - 1) // self._size))
        own = live.remnant.blocks if live.remnant and len(found) == live.shared_blocks else 0
        return found, own

    def give(self, live: InFlight, found: list[SharedBlock], own: int, tokens: int, totals: Counters) -> None:
        """Give an admitted request its cached blocks, and new ones up to this many tokens."""
        self.pool.hold(found)
        if live.remnant and own:
            self.pool.claim(live.remnant)
        live.remnant, live.shared = None, found
        held = len(found) + own
        if live.swapped:
            back = max(0, self.blocks(live.swapped) - held)
            self.moved += back
            totals.swapped_in += back
            self._return_swap(live)
        self.pool.take(self.blocks(tokens) - held)
        if live.admitted is None:
            live.cached_tokens = held * self._size
            totals.cached_tokens += live.cached_tokens

    def share(self, live: InFlight, known: int) -> bool:
        """Make the full blocks of a shared prefix findable; ``known`` of them already were.

        Returns:
            Whether more of the prefix can be found now.
        """
        text = live.text
        if text is None:
            return False
        held = min(-(-live.computed // self._size), live.shared_blocks)
        live.shared += [SharedBlock(text, i) for i in range(len(live.shared), held)]
        full = live.shared[known : live.computed // self._size]
        for block in full:
            text.register(block)
        return bool(full)

    def swap_out(self, live: InFlight, computed: int, totals: Counters) -> None:
        """Copy a victim's blocks to the swap space if swapping is on and there is room."""
        held = self.blocks(computed)
        if self._swapping and 0 < held <= self._swap_free:
            self._swap_free -= held
            self.moved += held
            totals.swapped_out += held
            live.swapped = computed

    def free(self, live: InFlight, computed: int, took: int = 0) -> None:
        """Return a request's blocks to the pool: its own, then the shared ones.

        ``took`` of its blocks are from this step, for tokens that will not be computed.
        """
        shared = len(live.shared)
        own = max(0, computed // self._size - shared)
        live.remnant = self.pool.release(self.blocks(computed) + took - shared - own, own)
        if shared:
            self.pool.let_go(live.shared)
            live.shared = []

    def forget(self, live: InFlight) -> None:
        """Drop what is kept for a request that left the engine."""
        if live.swapped:
            self._return_swap(live)
        if live.text is not None:
            self.pool.leave(live.text)

    def _return_swap(self, live: InFlight) -> None:
        self._swap_free += self.blocks(live.swapped)
        live.swapped = 0
