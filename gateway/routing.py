"""Which engine runs a prompt: the one whose prefix cache likely holds its beginning.

Rendezvous hashing (Thaler and Ravishankar, 1998) of the leading prompt blocks gives every gateway
the same order of engines without shared state; bounded loads (Mirrokni et al., 2016) keep a
popular prefix from burying one engine while others idle.
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final

# A conversation keeps its first blocks from turn to turn; a longer key would part conversations
# that share a system prompt, a shorter one would put all of them on one engine.
_KEY_BLOCKS: Final = 4
_LOAD_FACTOR: Final = 1.25


def prefix_key(token_ids: Sequence[int], block_size: int, cache_salt: str) -> bytes:
    """What prompts with the same leading blocks share; prompts under a block are their own key."""
    whole_blocks = min(_KEY_BLOCKS, len(token_ids) // max(1, block_size))
    head = token_ids[: whole_blocks * block_size] if whole_blocks else token_ids
    return array("Q", head).tobytes() + cache_salt.encode()


def choose_engine(key: bytes, addresses: Iterable[str], load: Callable[[str], int]) -> str:
    """The first engine in `key`'s order whose load, with this request, is within the bound.

    `load` is the number of sequences an engine has. `addresses` must not be empty.
    """
    ranked = sorted(
        addresses,
        key=lambda address: hashlib.blake2b(key, key=_hash_key(address), digest_size=8).digest(),
        reverse=True,
    )
    loads = {address: load(address) for address in ranked}
    bound = math.ceil(_LOAD_FACTOR * (sum(loads.values()) + 1) / len(ranked))
    return next(address for address in ranked if loads[address] < bound)


def _hash_key(address: str) -> bytes:
    return hashlib.blake2b(address.encode(), digest_size=32).digest()
