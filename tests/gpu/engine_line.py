"""Drives a device's executor by hand: rows with blocks of their own, steps one after the other or
two in flight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.step import (
    PendingStep,
    RowStart,
    RowStep,
    SampledToken,
    SamplingParameters,
    StepPlan,
)
from tests.fakes.device_decoding import StepLine

Requests = Sequence[tuple[Sequence[int], SamplingParameters]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests in rows of an executor, with blocks for `num_tokens` more tokens."""

    executor: DeviceExecutor
    requests: Requests
    num_tokens: int

    @property
    def blocks_per_row(self) -> int:
        longest = max(len(prompt) for prompt, _ in self.requests)
        return -(-(longest + self.num_tokens) // self.executor.block_size)

    @property
    def fits(self) -> bool:
        return len(self.requests) * self.blocks_per_row <= self.executor.num_blocks

    def plans(self, num_computed: int | None = None) -> list[StepPlan]:
        """All steps up to the last token: the first computes each prompt from there on, at once.

        With `num_computed` that many tokens of the prompts are said to be in the cache.
        """
        starts, steps = [], []
        for row, (prompt, sampling) in enumerate(self.requests):
            first = row * self.blocks_per_row
            blocks = list(range(first, first + self.blocks_per_row))
            computed = num_computed or 0
            starts.append(RowStart(row, prompt, len(prompt), sampling, blocks))
            steps.append(RowStep(row, computed, len(prompt) - computed, [], True))
        plans = [StepPlan(starts, steps)]
        for index in range(self.num_tokens - 1):
            steps = [
                RowStep(row, len(prompt) + index, 1, [], True)
                for row, (prompt, _) in enumerate(self.requests)
            ]
            plans.append(StepPlan([], steps))
        return plans

    def run(self, in_flight: int = 1) -> list[list[SampledToken]]:
        """What each row samples, by steps of which so many are queued at once."""
        sampled: list[list[SampledToken]] = [[] for _ in self.requests]
        for tokens in run_plans(self.executor.launch, self.plans(), in_flight):
            for token in tokens:
                sampled[token.row].append(token)
        return sampled


def run_plans(
    launch: Callable[[StepPlan], PendingStep], plans: Sequence[StepPlan], in_flight: int
) -> list[Sequence[SampledToken]]:
    pending: list[PendingStep] = []
    results = []
    for plan in plans:
        pending.append(launch(plan))
        if len(pending) == in_flight:
            results.append(pending.pop(0).wait().sampled)
    results += [step.wait().sampled for step in pending]
    return results


def ids_by_scheduler(
    executor: DeviceExecutor,
    requests: Requests,
    *,
    in_flight: int,
    num_batched_tokens: int,
    num_blocks: int = 0,
    num_steps_between: int = 0,
) -> list[list[int]]:
    """The tokens of each request, as a scheduler plans them."""
    config = SchedulerConfig(
        max_num_seqs=len(requests),
        max_num_batched_tokens=num_batched_tokens,
        max_model_len=executor.max_model_len,
        max_waiting=len(requests),
        num_blocks=num_blocks or executor.num_blocks,
        block_size=executor.block_size,
        max_steps_in_flight=in_flight,
    )
    received = StepLine(config, executor.launch).run(requests, num_steps_between=num_steps_between)
    return [list(entry.token_ids) for entry in received]


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()
