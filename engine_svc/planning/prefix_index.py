"""The prefix index: which KV block holds a given run of tokens after a given prefix.

A block is named by a chained hash over (hash of the block before it, its token ids); the chain
begins with a hash of the request's salt, so requests of different salts never share a block. Only
full blocks have a name. SHA-256 makes a collision, which would answer one user with another's
context, out of reach of chance and of attack.
"""

import hashlib
from collections.abc import Sequence
from struct import Struct


class BlockHashes:
    """The hashes of one sequence's full blocks. Each is computed once, when first asked for."""

    __slots__ = ("_block_size", "_chain", "_pack")

    def __init__(self, block_size: int, salt: str) -> None:
        self._block_size = block_size
        # Fixed-width ids leave no two token lists with the same bytes.
        self._pack = Struct(f"<{block_size}I").pack
        # The chain's first element stands for "no block yet"; block i is named by element i + 1.
        self._chain = [hashlib.sha256(b"salt:" + salt.encode()).digest()]

    def of_block(self, index: int, token_ids: Sequence[int]) -> bytes:
        """The hash of block `index` of the sequence `token_ids`, which must fill that block.

        `token_ids` is always the same sequence, possibly longer than at the last call.
        """
        chain = self._chain
        while len(chain) <= index + 1:
            begin = (len(chain) - 1) * self._block_size
            content = self._pack(*token_ids[begin : begin + self._block_size])
            chain.append(hashlib.sha256(chain[-1] + content).digest())
        return chain[index + 1]


class PrefixIndex:
    """Block hash → block, one to one. It says what blocks hold, not whether they are in use."""

    def __init__(self) -> None:
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hash_of_block

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of_hash.get(block_hash)

    def insert(self, block_hash: bytes, block_id: int) -> None:
        """Makes a block findable; ignored when another block already holds the same tokens."""
        if block_hash not in self._block_of_hash:
            assert block_id not in self._hash_of_block, f"block {block_id} has a name already"
            self._block_of_hash[block_hash] = block_id
            self._hash_of_block[block_id] = block_hash

    def remove(self, block_id: int) -> None:
        """Forgets what a block holds, if anything is known of it."""
        block_hash = self._hash_of_block.pop(block_id, None)
        if block_hash is not None:
            del self._block_of_hash[block_hash]
