"""Drives a scheduler and an executor step by step and collects what each request received."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import Finish, Request, RequestOutput
from engine_svc.planning.scheduler import Scheduler
from engine_svc.planning.speculation import Drafter
from engine_svc.planning.step import SamplingParameters, StepPlan, StepResult, TokenLogprobs


def greedy(max_tokens: int, **others: object) -> SamplingParameters:
    return SamplingParameters(max_tokens=max_tokens, temperature=0.0, **others)  # type: ignore[arg-type]


def seeded(max_tokens: int, seed: int, **others: object) -> SamplingParameters:
    return SamplingParameters(max_tokens=max_tokens, seed=seed, **others)  # type: ignore[arg-type]


@dataclass(slots=True)
class Received:
    """All outputs of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_starts: int = 0
    finish: Finish | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.finish is None, "an output came after the finish"
        if output.prompt_logprobs:
            assert not self.prompt_logprobs, "a prompt's log-probabilities came twice"
            assert not self.token_ids, "a prompt's log-probabilities came after its first token"
            self.prompt_logprobs += output.prompt_logprobs
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.num_starts += output.prefill_started
        self.finish = output.finish


class SchedulerDriver:
    """`execute` is an executor's. `received` and `requests` are by request key."""

    def __init__(
        self,
        config: SchedulerConfig,
        execute: Callable[[StepPlan], StepResult],
        drafter: Drafter | None = None,
    ) -> None:
        self.scheduler = Scheduler(config, drafter)
        self.requests: dict[Hashable, Request] = {}
        self.received: dict[Hashable, Received] = {}
        self.plans: list[StepPlan] = []
        # Requests that were in a step that failed.
        self.failed: set[Hashable] = set()
        self._execute = execute

    def add(
        self,
        key: Hashable,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParameters,
        *,
        output_token_ids: Sequence[int] = (),
        priority: int = 0,
        cache_salt: str = "",
        deadline: float = math.inf,
    ) -> Request:
        request = Request(
            key,
            [*prompt_token_ids, *output_token_ids],
            len(prompt_token_ids),
            sampling,
            priority,
            cache_salt,
            deadline,
        )
        self.scheduler.add(request)
        self.requests[key] = request
        self.received[key] = Received()
        return request

    def end_late(self, now: float) -> None:
        self._take(self.scheduler.end_late(now))

    def abort(self, key: Hashable) -> None:
        self._take(self.scheduler.abort(key))

    def step(self, while_executing: Callable[[], None] = lambda: None) -> StepPlan:
        """One step; `while_executing` is called between schedule and commit."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.plans.append(plan)
        self._take(self.scheduler.first_starts(plan))
        self.check(plan)
        while_executing()
        self._take(self.scheduler.commit(plan, self._execute(plan)))
        return plan

    def run(self, max_steps: int) -> int:
        """Steps until no request is left; returns how many steps that took."""
        num_steps = 0
        while self.scheduler.has_requests:
            assert num_steps < max_steps, f"requests are still there after {max_steps} steps"
            self.step()
            num_steps += 1
        return num_steps

    def check(self, plan: StepPlan) -> None:
        """For those who know what must hold between schedule and commit."""

    def will_answer(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """For those who want to know beforehand what a request will be answered, all of it."""

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.received[output.request.key].take(output)
