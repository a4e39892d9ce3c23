"""Runs the decoder on a step that the batch has staged: op by op, or as the backend captured it."""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.kv_storage import KvStorage
from engine_svc.compute.model.decoder import Decoder
from engine_svc.compute.step_tensors import StagedInputs, StepCounts
from kernels import CapturedRun, Kernels


class ModelRunner(Protocol):
    """A model in the middle of a step."""

    # How many rows of logits are given at once.
    max_rows: int
    # Whether ops on torch tensors do the work.
    uses_torch: bool

    def forward(self, counts: StepCounts, wants_all: bool) -> None:
        """Computes the staged step, up to the kept tokens' last hidden states.

        `wants_all` when the logits after all of these are asked for next, and no others.
        """

    def logits(self, places: np.ndarray) -> Tensor:
        """After kept tokens `places`, int64 [s] -> float32 [s, vocab_size], s of 1 to max_rows.

        The next call may overwrite the result, and so may whoever gets it.
        """

    def profile_ops(self) -> None:
        """Begins to add up the time of each op, where that can be told."""

    def take_op_seconds(self) -> Mapping[str, float]:
        """By kind of op, since it was called last."""


def make_runner(
    kernels: Kernels, decoder: Decoder, kv: KvStorage, staged: StagedInputs, max_rows: int
) -> ModelRunner:
    """The quickest way that `kernels` has; it always reads `staged`."""
    inputs = staged.whole
    forward = kernels.capture(lambda: decoder.forward(inputs, kv), inputs.counted)
    if forward is None:
        return EagerRunner(decoder, kv, staged, max_rows)
    places = torch.zeros(max_rows, dtype=torch.int32)
    head = kernels.capture(lambda: decoder.logits(forward.result, places), [[places]])
    every_place = torch.arange(max_rows, dtype=torch.int32)
    counted = list(inputs.counted)
    counted[1] = (*counted[1], every_place)
    step = kernels.capture(
        lambda: decoder.logits(decoder.forward(inputs, kv), every_place), counted
    )
    assert head is not None and step is not None, "what captures one run captures others"
    return CapturedRunner(forward, head, places, step, every_place)


class EagerRunner:
    """Calls each op in each step."""

    uses_torch = True

    def __init__(
        self, decoder: Decoder, kv: KvStorage, staged: StagedInputs, max_rows: int
    ) -> None:
        self.max_rows = max_rows
        self._decoder = decoder
        self._kv = kv
        self._staged = staged
        self._hidden = torch.empty(0)

    def forward(self, counts: StepCounts, wants_all: bool) -> None:
        self._hidden = self._decoder.forward(self._staged.of_step(counts), self._kv)

    def logits(self, places: np.ndarray) -> Tensor:
        return self._decoder.logits(self._hidden, torch.from_numpy(places))

    def profile_ops(self) -> None:
        """Ops on torch tensors are not told apart."""

    def take_op_seconds(self) -> Mapping[str, float]:
        return {}


class CapturedRunner:
    """Replays the model's ops: `step` whole, or `forward` and then `head` for some of the tokens.

    `head` reads `places`, and `step` `every_place`: int32 [max_rows].
    """

    uses_torch = False

    def __init__(
        self,
        forward: CapturedRun,
        head: CapturedRun,
        places: Tensor,
        step: CapturedRun,
        every_place: Tensor,
    ) -> None:
        self.max_rows = len(places)
        self._forward = forward
        self._head = head
        self._places = places.numpy()
        self._step = step
        self._every_place = every_place
        self._has_logits = False
        # A view is made once: what torch does for one is a good part of a step's Python.
        self._step_logits = [step.result[:num_rows] for num_rows in range(self.max_rows + 1)]

    def forward(self, counts: StepCounts, wants_all: bool) -> None:
        self._has_logits = wants_all and counts.num_kept_tokens <= self.max_rows
        (self._step if self._has_logits else self._forward)(*counts)

    def logits(self, places: np.ndarray) -> Tensor:
        num_rows = len(places)
        if self._has_logits:
            return self._step_logits[num_rows]
        self._places[:num_rows] = places
        self._head(num_rows)
        return self._head.result[:num_rows]

    def profile_ops(self) -> None:
        for run in (self._forward, self._head, self._step):
            run.set_profiling(True)

    def take_op_seconds(self) -> Mapping[str, float]:
        seconds: Counter[str] = Counter()
        for run in (self._forward, self._head, self._step):
            seconds.update(run.op_seconds())
        self.profile_ops()
        return {op: spent for op, spent in seconds.items() if spent}
