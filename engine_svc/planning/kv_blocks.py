"""The pool of KV blocks: who holds which, and which is taken next.

A block is held by as many requests as reference it. Free blocks stay in the prefix index until they
are taken for something else, so the free list is the cache, in the order of least recent use. Every
operation costs O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine_svc.planning.prefix_index import PrefixIndex


class BlockPool:
    """`num_blocks` blocks of KV storage, numbered from 0, all free at first."""

    def __init__(self, num_blocks: int, prefix_index: PrefixIndex) -> None:
        self._prefix_index = prefix_index
        self._num_references = [0] * num_blocks
        # An ordered dict is a linked list with O(1) removal by key. Its first entry is taken next.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._num_references)

    @property
    def num_free(self) -> int:
        """Blocks that no request references, those that the prefix index knows among them."""
        return len(self._free)

    def num_references(self, block_id: int) -> int:
        return self._num_references[block_id]

    def count_free(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are free, that is, how many `reference` would take."""
        return sum(not self._num_references[block_id] for block_id in block_ids)

    def allocate(self, count: int) -> list[int]:
        """Takes the `count` least recently used free blocks, whose former content is forgotten.

        The caller has seen that `num_free` suffices.
        """
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._prefix_index.remove(block_id)
            self._num_references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def reference(self, block_ids: Sequence[int]) -> None:
        """Adds one holder to each block, keeping its content."""
        for block_id in block_ids:
            if not self._num_references[block_id]:
                del self._free[block_id]
            self._num_references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes one holder from each of a request's blocks, given in the order of the sequence."""
        # The last block goes first, so that it is also reused first: a prefix is worth more than
        # what follows it, which cannot be found without it.
        for block_id in reversed(block_ids):
            assert self._num_references[block_id] > 0, f"block {block_id} is released twice"
            self._num_references[block_id] -= 1
            if not self._num_references[block_id]:
                self._free[block_id] = None
                if block_id not in self._prefix_index:
                    # Nothing is lost by reusing it at once.
                    self._free.move_to_end(block_id, last=False)
