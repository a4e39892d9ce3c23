"""The running batch and the queue before it: who runs, with which row and blocks, and who waits."""

from engine_svc.planning.block_tables import BlockTables
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import Request
from engine_svc.planning.request_lists import insert, remove
from engine_svc.planning.rows import Rows


class Batch:
    """All requests that have not ended, in two lists sorted by `order`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.tables = BlockTables(config.num_blocks, config.block_size, config.prefix_cache)
        self.rows = Rows(config.max_num_seqs)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0

    def start_head(self, cached_block_ids: list[int]) -> list[int]:
        """Lets the head of the queue run; returns its blocks beyond the cached ones."""
        request = self.waiting.pop(0)
        self.rows.give(request)
        new_block_ids = self.tables.start(request, cached_block_ids)
        insert(self.running, request)
        return new_block_ids

    def preempt(self, request: Request) -> None:
        """Sends a running request back to its place in the queue, to be computed again.

        Its outputs are kept: after the restart they count as tokens to compute, like a prompt.
        """
        self.num_preemptions += 1
        request.num_preemptions += 1
        remove(self.running, request)
        self.release(request)
        insert(self.waiting, request)

    def release(self, request: Request) -> None:
        """Takes back the row and the blocks of a request that runs no more."""
        self.rows.take_back(request)
        self.tables.release(request)
