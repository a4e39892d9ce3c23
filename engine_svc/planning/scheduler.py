"""The scheduler: which requests run, what each step computes, and what its results mean.

There are no phases. A request has `num_computed_tokens` and `num_tokens`, and a step schedules some
of the difference under four limits: max_num_seqs, max_num_batched_tokens, max_model_len and the
free KV blocks. Prefill, chunked prefill, decode and resuming are all that one rule.

Requests are served in one total order, by priority and then arrival, and blocks are only ever taken
from a request by one that goes before it. So the first running request advances in every step, two
requests cannot evict each other in turns, and every request ends.
"""

from collections.abc import Hashable, Sequence
from typing import Final

from engine_svc.planning.block_tables import BlockTables
from engine_svc.planning.deadlines import Deadlines
from engine_svc.planning.errors import NoTokenLeft, SamplingFailed
from engine_svc.planning.limits import SchedulerConfig, SchedulerLoad
from engine_svc.planning.plan_builder import PlanBuilder
from engine_svc.planning.request import Finish, FinishReason, Request, RequestOutput
from engine_svc.planning.request_lists import insert, remove
from engine_svc.planning.rows import Rows
from engine_svc.planning.speculation import Drafter, Speculation
from engine_svc.planning.step import RowStep, SampledToken, SamplingError, StepPlan, StepResult

_TIMEOUT: Final = Finish(FinishReason.TIMEOUT)


class Scheduler:
    """Owns all requests and their blocks. Not thread-safe; `schedule` and `commit` alternate."""

    def __init__(self, config: SchedulerConfig, drafter: Drafter | None = None) -> None:
        self._config = config
        self._block_size = config.block_size
        self._tables = BlockTables(config.num_blocks, config.block_size, config.prefix_cache)
        self._speculation = Speculation(config, self._tables, drafter)
        self._requests: dict[Hashable, Request] = {}
        # Both sorted by `order`.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._rows = Rows(config.max_num_seqs)
        # Set between schedule and commit. Compute then works on rows and blocks of all that was
        # running; a request that ends in between keeps them until the commit.
        self._in_flight: StepPlan | None = None
        self._ended_in_flight: list[Request] = []
        # The head of the queue, and the number of free blocks with which it did not fit. Looking a
        # request up in the cache costs time in its length, so it waits until more are free.
        self._blocked: tuple[Request, int] | None = None
        self._deadlines = Deadlines()
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_preemptions = 0

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def load(self) -> SchedulerLoad:
        return SchedulerLoad(
            len(self._running),
            len(self._waiting),
            self._tables.num_free,
            self._tables.num_blocks,
            self._num_preemptions,
            self._tables.num_query_tokens,
            self._tables.num_hit_tokens,
            self._num_steps,
            self._speculation.num_draft_tokens,
            self._speculation.num_accepted_tokens,
        )

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queues a request. One whose outputs are already complete is finished when this returns.

        Raises RequestRefused for a request that could never finish, or when too many wait.
        """
        request.finish = request.finish_by_rules()
        if request.finish is not None:
            return
        self._config.check(request, len(self._waiting))
        assert request.key not in self._requests, f"request {request.key} is live already"
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.key] = request
        self._deadlines.note(request)
        insert(self._waiting, request)

    def abort(self, key: Hashable) -> list[RequestOutput]:
        """Ends a request in any state; nothing for a key that is not live."""
        request = self._requests.get(key)
        return [] if request is None else [self._end(request, Finish(FinishReason.CANCELLED))]

    def end_late(self, now: float) -> list[RequestOutput]:
        """Ends the requests whose deadline has come, before a step is spent on them."""
        late = self._deadlines.late(now, self._requests.values())
        return [self._end(request, _TIMEOUT) for request in late]

    def fail_all(self, error: Exception, *, running: bool = True) -> list[RequestOutput]:
        """Ends every request with `error`; or only those that wait."""
        finish = Finish(FinishReason.ERROR, error=error)
        requests = list(self._requests.values()) if running else self._waiting[:]
        return [self._end(request, finish) for request in requests]

    def _end(self, request: Request, finish: Finish) -> RequestOutput:
        """Takes a live request out; its row and blocks come free once no step works on them."""
        request.finish = finish
        del self._requests[request.key]
        if request.row is None:
            remove(self._waiting, request)
        else:
            remove(self._running, request)
            if self._in_flight is None:
                self._release(request)
            else:
                self._ended_in_flight.append(request)
        return RequestOutput(request, finish=finish)

    def _release(self, request: Request) -> None:
        self._rows.take_back(request)
        self._tables.release(request)

    # A step is planned

    def schedule(self) -> StepPlan:
        """Plans the next step; `commit` or `fail` must follow. Empty only without requests."""
        assert self._in_flight is None, "the former step is not committed"
        builder = PlanBuilder(self._config.max_num_batched_tokens)
        for request in self._schedule_decodes(builder):
            # The blocks of an unfinished prefill are all its own already.
            if builder.budget:
                builder.add_chunk(request, ())
        self._start_waiting(builder)
        self._in_flight = builder.build()
        assert self._in_flight.steps or not self._requests, "no request can go on"
        self._num_steps += 1
        return self._in_flight

    def _schedule_decodes(self, builder: PlanBuilder) -> list[Request]:
        """Schedules every request with one token to go; returns those with more."""
        block_size = self._block_size
        decodes = []
        unfinished_prefills = []
        # Preemption takes requests off the end of this list while it is gone through.
        for request in self._running:
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
        num_running, num_waiting = len(self._running), len(self._waiting)
        num_draft_tokens = self._speculation.add_drafts(
            decodes, self._rows, builder.budget - len(decodes), num_running, num_waiting
        )
        builder.add_decodes(decodes, num_draft_tokens)
        return unfinished_prefills

    def _take_block_for(self, request: Request) -> list[int]:
        """One more block, if need be from a request that comes later in the order.

        Empty when `request` is itself the last: it then keeps what it has and sits out this step.
        It goes on when any other gives a block back, and alone it always fits (`add` saw to that).
        """
        while not self._tables.num_free:
            last = self._running[-1]
            if last is request:
                return []
            self._preempt(last)
        return self._tables.grow(request)

    def _preempt(self, request: Request) -> None:
        """Sends a running request back to its place in the queue, to be computed again.

        Its outputs are kept: after the restart they count as tokens to compute, like a prompt.
        """
        self._num_preemptions += 1
        request.num_preemptions += 1
        remove(self._running, request)
        self._release(request)
        insert(self._waiting, request)

    def _start_waiting(self, builder: PlanBuilder) -> None:
        """Starts requests from the head of the queue while rows, blocks and budget last.

        A head that does not fit holds up the rest, or small requests could overtake it for ever.
        """
        while self._waiting and self._rows.has_free and builder.budget:
            request = self._waiting[0]
            if self._blocked is not None:
                blocked_request, num_free = self._blocked
                if request is blocked_request and self._tables.num_free <= num_free:
                    return
            cached_block_ids = self._tables.find_cached(request)
            if not self._tables.has_room_for(request, cached_block_ids, len(self._running)):
                self._blocked = (request, self._tables.num_free)
                return
            self._blocked = None
            del self._waiting[0]
            new_block_ids = self._start(request, cached_block_ids)
            builder.add_start(request, cached_block_ids)
            builder.add_chunk(request, new_block_ids)

    def _start(self, request: Request, cached_block_ids: list[int]) -> list[int]:
        """Puts a request into the batch; returns its blocks beyond the cached ones."""
        self._rows.give(request)
        new_block_ids = self._tables.start(request, cached_block_ids)
        insert(self._running, request)
        return new_block_ids

    # A step is under way, and done

    def first_starts(self, plan: StepPlan) -> list[RequestOutput]:
        """A notice for each request that `plan` takes out of the queue for the first time."""
        return [
            RequestOutput(request, prefill_started=True)
            for request in self._rows.of(plan.starts)
            if not request.num_preemptions
        ]

    def commit(
        self, plan: StepPlan, result: StepResult, seconds: float = 0.0
    ) -> list[RequestOutput]:
        """Takes in what the step computed, in `seconds` (0: unknown); returns what each gained."""
        self._land(plan)
        self._speculation.observe(plan, seconds)
        outputs = []
        rows, advance = self._rows.requests, self._tables.advance
        sampled = iter(result.sampled)
        prompt_logprobs = dict(result.prompt_logprobs)
        for row, num_computed, num_scheduled, _, samples, _, draft_token_ids in plan.steps:
            token = next(sampled) if samples else None
            request = rows[row]
            assert request is not None
            if request.finish is not None:
                continue
            new = prompt_logprobs.get(row, ())
            of_prompt = request.take_prompt_logprobs(num_computed, new) if new else ()
            if token is None:
                advance(request, num_scheduled)
                if of_prompt:
                    outputs.append(RequestOutput(request, prompt_logprobs=of_prompt))
                continue
            _, token_id, logprobs, error, completes, following = token
            if error is not None:
                outputs.append(self._end_unsampled(request, error))
                continue
            if draft_token_ids:
                outputs.append(self._take_several(request, (token, *following)))
                continue
            advance(request, num_scheduled)
            request.token_ids.append(token_id)
            finish = request.finish_by_rules(completes)
            if finish is not None:
                self._end(request, finish)
            listed = () if logprobs is None else (logprobs,)
            outputs.append(RequestOutput(request, (token_id,), listed, False, finish, of_prompt))
        self._release_ended()
        return outputs

    def _take_several(self, request: Request, tokens: Sequence[SampledToken]) -> RequestOutput:
        """Takes in the tokens of a step with drafts, of which the first comes without."""
        token_ids, logprobs, finish = request.take_several(tokens)
        self._tables.advance(request, len(token_ids))
        self._speculation.num_accepted_tokens += len(token_ids) - 1
        if finish is not None:
            self._end(request, finish)
        return RequestOutput(request, token_ids, logprobs, False, finish)

    def _end_unsampled(self, request: Request, error: SamplingError) -> RequestOutput:
        """Ends a request that has no next token. Its KV may be at fault, so nobody reuses it."""
        self._tables.distrust(request)
        kind = SamplingFailed if error is SamplingError.BAD_LOGITS else NoTokenLeft
        return self._end(request, Finish(FinishReason.ERROR, error=kind(error.value)))

    def fail(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        """Takes in that the step raised: ends its requests with `error`. Others go on."""
        self._land(plan)
        finish = Finish(FinishReason.ERROR, error=error)
        live = [request for request in self._rows.of(plan.steps) if request.finish is None]
        outputs = [self._end(request, finish) for request in live]
        self._release_ended()
        return outputs

    def _land(self, plan: StepPlan) -> None:
        assert plan is self._in_flight, "this is not the plan in flight"
        self._in_flight = None

    def _release_ended(self) -> None:
        for request in self._ended_in_flight:
            self._release(request)
        self._ended_in_flight.clear()
