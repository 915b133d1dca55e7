"""Who owns which block of the KV cache, and which blocks' content can be used again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Counts references to blocks and remembers full blocks' content by digest.

    A block is in one of three states: in use (one or more references), cached (no reference, but its content
    has a digest and may be wanted again), or empty. Empty blocks are given out first, then the cached block
    that was released the longest time ago.

    A block with a digest is full and never written again, so sharing it is safe; a block without one has at
    most one owner.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence refers to."""
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks that nobody else refers to; the caller has checked `num_available`."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Find the blocks of the longest known beginning; takes no reference."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_unused(self, blocks: Sequence[int]) -> int:
        """How many of these `num_available` would lose by `share`."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks that `match` found."""
        for block in blocks:
            assert self._digest_of[block] is not None, f"block {block} has no digest, so it may still change"
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def register(self, block: int, digest: bytes) -> None:
        """Name a full, computed block. If another block has that content already, that one stays the named
        one."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each. Later blocks of a sequence are evicted before earlier ones, which more
        sequences can share."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released twice"
            if self._references[block] == 0:
                if self._digest_of[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def discard(self, blocks: Sequence[int]) -> None:
        """`release`, and let nobody find these blocks' content again: it may be wrong."""
        for block in blocks:
            self._forget(block)
        self.release(blocks)

    def _forget(self, block: int) -> None:
        digest = self._digest_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._digest_of[block] = None
