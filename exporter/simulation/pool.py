"""The paged KV pool: counts of blocks, and the order in which cached blocks are evicted.

vLLM hands out blocks from the head of one free queue. Blocks without a cached text return to its head,
cached ones to its tail, a request's last block first; a cache hit takes a block out of the queue.
The identity of a private block does not matter, so a request's own blocks are only a count: a released
chain is one `Remnant` in the queue, evicted from its end. Blocks of a shared prefix are objects
(`SharedBlock`), because several requests can hold one.
"""

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

__all__ = ["Pool", "Remnant", "SharedBlock", "SharedText"]


@dataclass(slots=True, eq=False)
class Remnant:
    """The full private blocks that a request released and that are still cached."""

    blocks: int

    def lose(self, count: int) -> None:
        """Evict blocks from the end of the chain; a prefix remains."""
        self.blocks -= count


@dataclass(slots=True, eq=False)
class SharedBlock:
    """One block of a shared prefix."""

    text: "SharedText"
    index: int
    refs: int = 1
    registered: bool = False
    blocks: int = 1

    def lose(self, count: int) -> None:  # noqa: ARG002 -- it is one block
        """Evict the block."""
        self.text.drop(self)


@dataclass(slots=True, eq=False)
class SharedText:
    """A shared prefix, and the blocks that hold each part of it, including duplicates."""

    members: int = 0
    chain: dict[int, list[SharedBlock]] = field(default_factory=dict)

    def find(self, limit: int) -> list[SharedBlock]:
        """Return the cached blocks from the start up to the first gap, at most ``limit``."""
        indices = itertools.takewhile(self.chain.__contains__, range(limit))
        return [self.chain[index][0] for index in indices]

    def register(self, block: SharedBlock) -> None:
        """Make a full block findable."""
        if not block.registered:
            block.registered = True
            self.chain.setdefault(block.index, []).append(block)

    def drop(self, block: SharedBlock) -> None:
        """Remove an evicted block."""
        block.registered = False
        holders = self.chain[block.index]
        holders.remove(block)
        if not holders:
            del self.chain[block.index]


class Pool:
    """A pool of ``size`` usable blocks (without the null block)."""

    __slots__ = ("_blank", "_queue", "_texts", "_tidy_at", "caching", "free", "size")

    def __init__(self, size: int, *, caching: bool) -> None:
        # `free`: blocks that no request holds, cached or not; vLLM's usage gauge counts them as free.
        self.size = self.free = self._blank = size
        self.caching = caching
        self._queue: OrderedDict[Remnant | SharedBlock, None] = OrderedDict()
        self._texts: dict[str, SharedText] = {}
        self._tidy_at = 2 * size

    def take(self, count: int) -> None:
        """Take free blocks from the head of the queue; cached ones are evicted."""
        self.free -= count
        self._blank -= count
        if self._blank < 0:
            self._evict(-self._blank)
            self._blank = 0

    def _evict(self, count: int) -> None:
        queue = self._queue
        while count:
            oldest = next(iter(queue))
            blocks = oldest.blocks
            if blocks <= count:
                del queue[oldest]
                oldest.lose(blocks)
                count -= blocks
            else:
                oldest.lose(count)
                return

    def release(self, blank: int, full: int) -> Remnant | None:
        """Return private blocks; the ``full`` ones stay cached, as the remnant that is returned."""
        self.free += blank + full
        if not self.caching:
            self._blank += blank + full
            return None
        self._blank += blank
        if not full:
            return None
        remnant = Remnant(full)
        self._queue[remnant] = None
        return remnant

    def claim(self, remnant: Remnant) -> None:
        """Take the blocks of a remnant back into use."""
        if remnant.blocks:
            del self._queue[remnant]
            self.free -= remnant.blocks
            remnant.blocks = 0

    def text(self, name: str) -> SharedText:
        """Return the shared prefix of a name, and count another member."""
        text = self._texts.setdefault(name, SharedText())
        text.members += 1
        return text

    def leave(self, text: SharedText) -> None:
        """Remove a member of a shared prefix; forget prefixes that have no members and no blocks."""
        text.members -= 1
        if len(self._texts) > self._tidy_at:
            # Otherwise the names of finished conversations would pile up.
            self._texts = {n: t for n, t in self._texts.items() if t.members or t.chain}
            self._tidy_at = 2 * max(self.size, len(self._texts))

    def hold(self, blocks: list[SharedBlock]) -> None:
        """Add a holder to cached shared blocks."""
        for block in blocks:
            if not block.refs:
                del self._queue[block]
                self.free -= 1
            block.refs += 1

    def let_go(self, blocks: list[SharedBlock]) -> None:
        """Remove a holder from shared blocks, from the end of the chain; the last holder frees a block."""
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs:
                continue
            self.free += 1
            if block.registered:
                self._queue[block] = None
            else:
                self._blank += 1
