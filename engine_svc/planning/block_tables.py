"""Block tables: the KV blocks that each running request holds, and those it shares."""

from engine_svc.planning.kv_blocks import BlockPool
from engine_svc.planning.prefix_index import BlockHashes, PrefixIndex
from engine_svc.planning.request import Request


class BlockTables:
    """Gives requests their blocks and keeps `block_ids` and `num_computed_tokens` of a Request.

    The caller sees to it that blocks are free before it takes them.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        self._prefix_index = PrefixIndex()
        self._pool = BlockPool(num_blocks, self._prefix_index)
        # Over first starts: tokens of the sequences, and those of them that the cache held.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def find_cached(self, request: Request) -> list[int]:
        """The longest run of cached blocks that begins the sequence and leaves a token to compute.

        A request that still asks for log-probabilities of its prompt has that computed.
        Blocks that are still being computed are not found: two requests that start in the same step
        both compute a prefix they share.
        """
        if not self._prefix_cache:
            return []
        hashes = self._hashes(request)
        block_ids = []
        for index in range(request.max_num_cached_tokens // self._block_size):
            block_id = self._prefix_index.find(hashes.of_block(index, request.token_ids))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def has_room_for(self, request: Request, cached_block_ids: list[int], num_running: int) -> bool:
        """Whether a request can start: with blocks for all its tokens, and one to spare for each
        request that runs. So at least a block's worth of decode steps follows before anything must
        be preempted, and recomputing cannot eat up the progress made.
        """
        num_new = self._num_blocks_for(request.num_tokens) - len(cached_block_ids)
        num_taken = num_new + self._pool.count_free(cached_block_ids)
        return num_taken + num_running <= self._pool.num_free

    def start(self, request: Request, cached_block_ids: list[int]) -> list[int]:
        """Gives a request blocks for all its tokens; returns those beyond the cached ones."""
        self._pool.reference(cached_block_ids)
        num_new = self._num_blocks_for(request.num_tokens) - len(cached_block_ids)
        new_block_ids = self._pool.allocate(num_new)
        request.block_ids = cached_block_ids + new_block_ids
        num_cached = len(cached_block_ids) * self._block_size
        request.num_computed_tokens = num_cached
        if not request.num_preemptions:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            self.num_query_tokens += request.num_tokens
            self.num_hit_tokens += num_cached
        return new_block_ids

    def grow(self, request: Request) -> list[int]:
        """Gives a request one more block, and returns it."""
        block_ids = self._pool.allocate(1)
        request.block_ids += block_ids
        return block_ids

    def advance(self, request: Request, num_tokens: int) -> None:
        """Counts tokens as computed, and lets others find the blocks that this filled."""
        num_computed = request.num_computed_tokens + num_tokens
        request.num_computed_tokens = num_computed
        if num_computed % self._block_size < num_tokens and self._prefix_cache:
            hashes = self._hashes(request)
            first = (num_computed - num_tokens) // self._block_size
            for index in range(first, num_computed // self._block_size):
                block_hash = hashes.of_block(index, request.token_ids)
                self._prefix_index.insert(block_hash, request.block_ids[index])

    def distrust(self, request: Request) -> None:
        """Lets nobody find the blocks that a request holds."""
        for block_id in request.block_ids:
            self._prefix_index.remove(block_id)

    def release(self, request: Request) -> None:
        """Takes all blocks back. Those that are cached stay findable until they are reused."""
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _hashes(self, request: Request) -> BlockHashes:
        if request.block_hashes is None:
            request.block_hashes = BlockHashes(self._block_size, request.cache_salt)
        return request.block_hashes
