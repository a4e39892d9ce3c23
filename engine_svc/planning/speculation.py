"""Speculation: a step computes drafts of a request's next tokens, and keeps those that come true.

Drafts are scheduled tokens like others. Compute samples after each of them as if the ones before it
were the request's, and planning takes what it would have sampled without them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine_svc.planning.block_tables import BlockTables
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.request import Request
from engine_svc.planning.rows import Rows
from engine_svc.planning.step import RowStep, StepPlan


class Draft(NamedTuple):
    """`token_ids` may be the next tokens of request `place` of those asked about."""

    place: int
    token_ids: Sequence[int]


class Drafter(Protocol):
    """Guesses. What it says changes how fast requests end, and never what they answer."""

    def draft(self, requests: Sequence[Request], limit: int) -> Sequence[Draft]:
        """For requests that get a token in the next step: one each at most, of no more tokens than
        the request's `max_num_draft_tokens`, and `limit` in all, which may be negative."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step whose every token was sampled after, drafts included."""


class Speculation:
    """Puts drafts into steps, where there is room for them; without a drafter there are none."""

    def __init__(
        self, config: SchedulerConfig, tables: BlockTables, drafter: Drafter | None
    ) -> None:
        assert drafter is None or config.max_steps_in_flight == 1, "drafts follow known tokens"
        self._block_size = config.block_size
        self._max_num_seqs = config.max_num_seqs
        self._max_num_sampled_tokens = config.max_num_sampled_tokens
        self._tables = tables
        self._drafter = drafter
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def add_drafts(
        self, decodes: list[RowStep], rows: Rows, budget: int, num_running: int, num_waiting: int
    ) -> int:
        """Adds drafts to some of `decodes`; returns how many tokens that adds.

        Nobody goes without for a guess: they take at most half of `budget`, which is what else the
        step may compute, and leave a block and a place to sample for each request that may run.
        """
        if self._drafter is None or not decodes:
            return 0
        requests = rows.of(decodes)
        num_rows = min(num_running + num_waiting, self._max_num_seqs)
        limit = min(budget // 2, self._max_num_sampled_tokens - num_rows)
        num_added = 0
        for place, token_ids in self._drafter.draft(requests, limit):
            step = self._with_draft(decodes[place], requests[place], token_ids, num_running)
            num_added += len(step.draft_token_ids)
            decodes[place] = step
        self.num_draft_tokens += num_added
        return num_added

    def _with_draft(
        self, step: RowStep, request: Request, token_ids: Sequence[int], num_spare_blocks: int
    ) -> RowStep:
        """As much of a draft as the request has blocks for, or there are free ones."""
        new_block_ids = list(step.new_block_ids)
        first = step.num_computed_tokens + 1
        num_slots = len(request.block_ids) * self._block_size
        while num_slots < first + len(token_ids) and self._tables.num_free > num_spare_blocks:
            new_block_ids += self._tables.grow(request)
            num_slots += self._block_size
        draft_token_ids = token_ids[: num_slots - first]
        assert len(draft_token_ids) <= request.max_num_draft_tokens
        return step._replace(
            num_scheduled_tokens=1 + len(draft_token_ids),
            new_block_ids=new_block_ids,
            draft_token_ids=draft_token_ids,
        )

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Tells the drafter how long a step took, if it is one to learn from; 0: not known."""
        if self._drafter is None or not seconds:
            return
        num_tokens = plan.num_scheduled_tokens
        num_sampled = sum(step.samples + len(step.draft_token_ids) for step in plan.steps)
        if num_tokens == num_sampled:
            self._drafter.observe(num_tokens, seconds)
