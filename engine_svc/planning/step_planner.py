"""What the next step computes: a token of each request that decodes, and chunks of other ones.

There are no phases. A request has `num_computed_tokens` and `num_tokens`, and a step schedules some
of the difference under four limits: max_num_seqs, max_num_batched_tokens, max_model_len and the
free KV blocks. Prefill, chunked prefill, decode and resuming are all that one rule.

A step that is planned while another is in flight takes that for computed: its requests then have
computed what it schedules, and one token more where it samples, which nobody here knows yet.
"""

from collections.abc import Mapping, Sequence

from engine_svc.planning.batch import Batch
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.plan_builder import PlanBuilder
from engine_svc.planning.request import Request
from engine_svc.planning.speculation import Speculation
from engine_svc.planning.step import RowStep, StepPlan


class StepPlanner:
    """Moves requests between the queue and the batch, and gives them blocks, as it plans."""

    def __init__(self, config: SchedulerConfig, batch: Batch, speculation: Speculation) -> None:
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._block_size = config.block_size
        self._batch = batch
        self._tables = batch.tables
        self._speculation = speculation
        # The head of the queue, and the number of free blocks with which it did not fit. Looking a
        # request up in the cache costs time in its length, so it waits until more are free.
        self._blocked: tuple[Request, int] | None = None

    def plan(self) -> StepPlan:
        """The next step, with none in flight. Empty only without requests."""
        builder = PlanBuilder(self._max_num_batched_tokens)
        for request in self._add_decodes(builder):
            # The blocks of an unfinished prefill are all its own already.
            if builder.budget:
                builder.add_chunk(request, request.num_computed_tokens, ())
        self._start_waiting(builder)
        return builder.build()

    def plan_ahead(self, in_flight: Mapping[int, RowStep]) -> StepPlan | None:
        """The step after the one in flight, whose steps are given by row.

        None when nothing can be done before that has landed, or when a request lacks a block: which
        one must give way is settled while no step works on any.
        """
        decodes: list[RowStep] = []
        lacking_block: list[tuple[int, Request]] = []
        prefills: list[tuple[Request, int]] = []
        block_size = self._block_size
        for request in self._batch.running:
            assert request.row is not None
            num_computed, num_tokens = request.num_computed_tokens, len(request.token_ids)
            step = in_flight.get(request.row)
            if step is not None:
                num_computed += step.num_scheduled_tokens
                if step.samples:
                    num_tokens += 1
                    if num_tokens >= request.max_num_tokens or request.needs_tokens_on_host:
                        continue
            if num_tokens - num_computed != 1:
                prefills.append((request, num_computed))
                continue
            if num_computed == len(request.block_ids) * block_size:
                lacking_block.append((len(decodes), request))
            decodes.append(RowStep(request.row, num_computed, 1, (), True))
        if len(lacking_block) > self._tables.num_free:
            return None
        for place, request in lacking_block:
            decodes[place] = decodes[place]._replace(new_block_ids=self._tables.grow(request))
        builder = PlanBuilder(self._max_num_batched_tokens)
        builder.add_decodes(decodes, 0)
        for request, num_computed in prefills:
            if builder.budget:
                builder.add_chunk(request, num_computed, ())
        self._start_waiting(builder)
        plan = builder.build()
        return plan if plan.steps else None

    def _add_decodes(self, builder: PlanBuilder) -> list[Request]:
        """Schedules every request with one token to go; returns those with more."""
        block_size = self._block_size
        running = self._batch.running
        decodes = []
        unfinished_prefills = []
        # Preemption takes requests off the end of this list while it is gone through.
        for request in running:
            num_computed = request.num_computed_tokens
            new_block_ids: Sequence[int] = ()
            if len(request.token_ids) - num_computed != 1:
                unfinished_prefills.append(request)
                continue
            if num_computed == len(request.block_ids) * block_size:
                new_block_ids = self._take_block_for(request)
                if not new_block_ids:
                    continue
            assert request.row is not None
            decodes.append(RowStep(request.row, num_computed, 1, new_block_ids, True))
        num_draft_tokens = self._speculation.add_drafts(
            decodes,
            self._batch.rows,
            builder.budget - len(decodes),
            len(running),
            len(self._batch.waiting),
        )
        builder.add_decodes(decodes, num_draft_tokens)
        return unfinished_prefills

    def _take_block_for(self, request: Request) -> list[int]:
        """One more block, if need be from a request that comes later in the order.

        Empty when `request` is itself the last: it then keeps what it has and sits out this step.
        It goes on when any other gives a block back, and alone it always fits (limits.py saw to
        that).
        """
        while not self._tables.num_free:
            last = self._batch.running[-1]
            if last is request:
                return []
            self._batch.preempt(last)
        return self._tables.grow(request)

    def _start_waiting(self, builder: PlanBuilder) -> None:
        """Starts requests from the head of the queue while rows, blocks and budget last.

        A head that does not fit holds up the rest, or small requests could overtake it for ever.
        """
        batch = self._batch
        while batch.waiting and batch.rows.has_free and builder.budget:
            request = batch.waiting[0]
            if self._blocked is not None:
                blocked_request, num_free = self._blocked
                if request is blocked_request and self._tables.num_free <= num_free:
                    return
            cached_block_ids = self._tables.find_cached(request)
            if not self._tables.has_room_for(request, cached_block_ids, len(batch.running)):
                self._blocked = (request, self._tables.num_free)
                return
            self._blocked = None
            new_block_ids = batch.start_head(cached_block_ids)
            builder.add_start(request, cached_block_ids)
            builder.add_chunk(request, request.num_computed_tokens, new_block_ids)
