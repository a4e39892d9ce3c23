"""A step's plan while it is being put together, and what is left of the step's token budget."""

from collections.abc import Sequence

from engine_svc.planning.request import Request
from engine_svc.planning.step import RowStart, RowStep, StepPlan


class PlanBuilder:
    """Gathers what each row does. `budget` is how many more tokens the step may compute."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._starts: list[RowStart] = []
        self._steps: list[RowStep] = []

    def add_start(self, request: Request, cached_block_ids: list[int]) -> None:
        assert request.row is not None
        start = RowStart(
            request.row,
            # A copy: the plan stays what it was when the request gains tokens.
            list(request.token_ids),
            request.num_prompt_tokens,
            request.sampling,
            cached_block_ids,
        )
        self._starts.append(start)

    def add_decodes(self, decodes: list[RowStep], num_draft_tokens: int) -> None:
        """Steps of one token each, and drafts; the budget always has room for one per row."""
        self._steps += decodes
        self.budget -= len(decodes) + num_draft_tokens

    def add_chunk(self, request: Request, num_computed: int, new_block_ids: Sequence[int]) -> None:
        """As many of the request's tokens from `num_computed` on as the budget allows."""
        assert request.row is not None and self.budget
        num_left = len(request.token_ids) - num_computed
        num_scheduled = min(num_left, self.budget)
        samples = num_scheduled == num_left
        step = RowStep(
            request.row,
            num_computed,
            num_scheduled,
            new_block_ids,
            samples,
            # What a step in flight finds is not taken in yet.
            request.lacks_prompt_logprobs and num_computed < request.num_prompt_tokens - 1,
        )
        self._steps.append(step)
        self.budget -= num_scheduled

    def build(self) -> StepPlan:
        return StepPlan(self._starts, self._steps)
