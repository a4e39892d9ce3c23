"""A fake executor that computes a step when it is waited for, from tokens that it alone knows.

It checks what must hold while a step is in flight: nothing that this works on is given to others,
and no plan needs to know on the host what the step samples.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from engine_svc.planning.step import RowStart, RowStep, SamplingParameters, StepPlan, StepResult
from tests.fakes.fake_executor import FakeExecutor


class StepFailed(Exception):
    """As the test wanted."""


class ContractBroken(BaseException):
    """Not an error of a step, which planning would take in its stride."""


@contextmanager
def _as_contract() -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise ContractBroken(str(error)) from error


class OverlappingExecutor:
    """A `FakeExecutor` behind a queue of two, as a device is.

    Of the steps, counted by launches from 0, those in `failing_launches` raise when they are
    launched, and those in `failing_steps` when they are waited for, with all that were launched
    meanwhile. `before_wait` is called with a step's number when it is waited for, and may block.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        vocab_size: int = 64,
        max_model_len: int = 4096,
        nan_token_id: int | None = None,
        failing_launches: Collection[int] = (),
        failing_steps: Collection[int] = (),
        before_wait: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_steps_in_flight = 2
        self.num_launched = 0
        self.num_launched_ahead = 0
        self.num_waited_for = 0
        self._device = FakeExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            nan_token_id=nan_token_id,
        )
        self._failing_launches = failing_launches
        self._failing_steps = failing_steps
        self._before_wait = before_wait
        self._in_flight: deque[_Pending] = deque()
        self._starts: dict[int, RowStart] = {}
        self._block_tables: dict[int, list[int]] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def launch(self, plan: StepPlan) -> "_Pending":
        number = self.num_launched
        self.num_launched += 1
        self.num_launched_ahead += bool(self._in_flight)
        with _as_contract():
            assert len(self._in_flight) < self.max_steps_in_flight
            self._check(plan)
        if number in self._failing_launches:
            raise StepFailed(f"launch {number}")
        pending = _Pending(self, plan, number)
        self._in_flight.append(pending)
        return pending

    def land(self, pending: "_Pending") -> StepResult:
        with _as_contract():
            assert pending is self._in_flight[0], "steps are waited for in another order"
        self.num_waited_for += 1
        self._before_wait(pending.number)
        self._in_flight.popleft()
        if pending.is_lost or pending.number in self._failing_steps:
            for later in self._in_flight:
                later.is_lost = True
            raise StepFailed(f"step {pending.number}")
        with _as_contract():
            return self._device.execute(pending.plan)

    def _check(self, plan: StepPlan) -> None:
        steps_in_flight = [step for pending in self._in_flight for step in pending.plan.steps]
        busy_rows = {step.row for step in steps_in_flight}
        for start in plan.starts:
            assert start.row not in busy_rows, "a row is given away while a step works on it"
            self._starts[start.row] = start
            self._block_tables[start.row] = list(start.block_ids)
        for step in plan.steps:
            self._block_tables[step.row] += step.new_block_ids
        self._check_tokens(plan, {step.row for step in steps_in_flight if step.samples})
        rows = busy_rows | {step.row for step in plan.steps}
        for step in (*steps_in_flight, *plan.steps):
            for block_id in self._written_blocks(step):
                holders = [row for row in rows if block_id in self._block_tables[row]]
                assert holders == [step.row], f"block {block_id} is written for {holders}"

    def _check_tokens(self, plan: StepPlan, rows_unknown: Collection[int]) -> None:
        """rows_unknown: those for which a step in flight samples."""
        for step in plan.steps:
            start = self._starts[step.row]
            assert not step.draft_token_ids, "drafts need the tokens before them"
            if not step.samples:
                continue
            end = step.num_computed_tokens + step.num_scheduled_tokens
            max_tokens = start.sampling.max_tokens
            assert end < start.num_prompt_tokens + max_tokens, "a token beyond the last"
            if _needs_tokens_on_host(start.sampling):
                assert step.row not in rows_unknown, "a mask is made of tokens nobody knows"

    def _written_blocks(self, step: RowStep) -> Iterator[int]:
        end = step.num_computed_tokens + step.num_scheduled_tokens
        for index in range(step.num_computed_tokens // self.block_size, -(-end // self.block_size)):
            yield self._block_tables[step.row][index]


def _needs_tokens_on_host(sampling: SamplingParameters) -> bool:
    return sampling.grammar is not None or max(map(len, sampling.bad_words), default=0) > 1


class _Pending:
    def __init__(self, executor: OverlappingExecutor, plan: StepPlan, number: int) -> None:
        self._executor = executor
        self.plan = plan
        self.number = number
        self.is_lost = False

    def wait(self) -> StepResult:
        return self._executor.land(self)
