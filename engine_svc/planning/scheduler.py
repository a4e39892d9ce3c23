"""The scheduler: which requests there are, what each step computes, and what its results mean.

Requests are served in one total order, by priority and then arrival, and blocks are only ever taken
from a request by one that goes before it. So the first running request always advances, two
requests cannot evict each other in turns, and every request ends.

Where two steps may be in flight, a step is planned before the results of the one before it are
known (step_planner.py). What is not known then is dropped when it turns out: that a token ends its
request is seen at its commit, and whatever the next step computes for that request is of no use.
"""

from collections.abc import Hashable, Sequence
from typing import Final

from engine_svc.planning.batch import Batch
from engine_svc.planning.deadlines import Deadlines
from engine_svc.planning.errors import NoTokenLeft, SamplingFailed
from engine_svc.planning.limits import SchedulerConfig, SchedulerLoad
from engine_svc.planning.request import Finish, FinishReason, Request, RequestOutput
from engine_svc.planning.request_lists import insert, remove
from engine_svc.planning.speculation import Drafter, Speculation
from engine_svc.planning.step import SampledToken, SamplingError, StepPlan, StepResult
from engine_svc.planning.step_planner import StepPlanner
from engine_svc.planning.steps_in_flight import StepsInFlight

_TIMEOUT: Final = Finish(FinishReason.TIMEOUT)


class Scheduler:
    """Owns all requests and their blocks. Not thread-safe.

    `schedule` and `commit` alternate; with `max_steps_in_flight` 2 a second `schedule` may come
    before the `commit` of the first.
    """

    def __init__(self, config: SchedulerConfig, drafter: Drafter | None = None) -> None:
        self._config = config
        self._batch = Batch(config)
        self._tables = self._batch.tables
        self._speculation = Speculation(config, self._tables, drafter)
        self._planner = StepPlanner(config, self._batch, self._speculation)
        self._in_flight = StepsInFlight()
        self._requests: dict[Hashable, Request] = {}
        self._deadlines = Deadlines()
        self._num_arrivals = 0
        self._num_steps = 0

    @property
    def max_steps_in_flight(self) -> int:
        return self._config.max_steps_in_flight

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def load(self) -> SchedulerLoad:
        return SchedulerLoad(
            len(self._batch.running),
            len(self._batch.waiting),
            self._tables.num_free,
            self._tables.num_blocks,
            self._batch.num_preemptions,
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
        self._config.check(request, len(self._batch.waiting))
        assert request.key not in self._requests, f"request {request.key} is live already"
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.key] = request
        self._deadlines.note(request)
        insert(self._batch.waiting, request)

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
        requests = list(self._requests.values()) if running else self._batch.waiting[:]
        return [self._end(request, finish) for request in requests]

    def _end(self, request: Request, finish: Finish) -> RequestOutput:
        """Takes a live request out; its row and blocks come free once no step works on them."""
        request.finish = finish
        del self._requests[request.key]
        if request.row is None:
            remove(self._batch.waiting, request)
        else:
            remove(self._batch.running, request)
            if not self._in_flight.keep(request):
                self._batch.release(request)
        return RequestOutput(request, finish=finish)

    # A step is planned, under way, and done

    def schedule(self) -> StepPlan | None:
        """Plans the next step, which `commit` or `fail` must follow, in the order of the plans.

        With a step in flight, None says that no other can be planned before that has landed. Else
        there is always a plan, which is empty only without requests.
        """
        in_flight = self._in_flight
        if in_flight.plans:
            assert len(in_flight.plans) < self._config.max_steps_in_flight, "commit comes first"
            ahead = self._planner.plan_ahead(in_flight.steps_by_row(in_flight.plans[-1]))
            if ahead is None:
                return None
            plan = ahead
        else:
            plan = self._planner.plan()
            assert plan.steps or not self._requests, "no request can go on"
        in_flight.plans.append(plan)
        self._num_steps += 1
        return plan

    def first_starts(self, plan: StepPlan) -> list[RequestOutput]:
        """A notice for each request that `plan` takes out of the queue for the first time."""
        if not plan.starts:
            return []
        return [
            RequestOutput(request, prefill_started=True)
            for request in self._batch.rows.of(plan.starts)
            if not request.num_preemptions
        ]

    def commit(
        self, plan: StepPlan, result: StepResult, seconds: float = 0.0
    ) -> list[RequestOutput]:
        """Takes in what the step computed, in `seconds` (0: unknown); returns what each gained."""
        self._in_flight.land(plan)
        self._speculation.observe(plan, seconds)
        outputs = []
        rows, advance = self._batch.rows.requests, self._tables.advance
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
        """Takes in that the oldest step in flight raised: ends its requests with `error`.

        So it does with those of a step planned after it, which would build on what was not
        computed; the caller has waited for that, and no step is in flight any more. Others go on.
        """
        failed = self._in_flight.plans[:]
        self._in_flight.land(plan)
        self._in_flight.plans.clear()
        finish = Finish(FinishReason.ERROR, error=error)
        outputs = []
        for each in failed:
            requests = self._batch.rows.of(each.steps)
            outputs += [self._end(request, finish) for request in requests if not request.finish]
        self._release_ended()
        return outputs

    def _release_ended(self) -> None:
        for request in self._in_flight.take_landed():
            self._batch.release(request)
