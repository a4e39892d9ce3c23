"""Runs the decoder on a step that the batch has staged: op by op, or as the backend captured it."""

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

    def forward(self, counts: StepCounts) -> None:
        """Computes the staged step, up to the kept tokens' last hidden states."""

    def logits(self, places: np.ndarray) -> Tensor:
        """After kept tokens `places`, int64 [s] -> float32 [s, vocab_size], s of 1 to max_rows.

        The next call may overwrite the result, and so may whoever gets it.
        """

    def profile_ops(self) -> None:
        """Begins to add up the time of each op, where that can be told."""

    def take_op_seconds(self) -> Mapping[str, Mapping[str, float]]:
        """By kind of op, of the "layers" and of the "head", since it was called last."""


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
    assert head is not None, "what captures one run captures another"
    return CapturedRunner(forward, head, places)


class EagerRunner:
    """Calls each op in each step."""

    def __init__(
        self, decoder: Decoder, kv: KvStorage, staged: StagedInputs, max_rows: int
    ) -> None:
        self.max_rows = max_rows
        self._decoder = decoder
        self._kv = kv
        self._staged = staged
        self._hidden = torch.empty(0)

    def forward(self, counts: StepCounts) -> None:
        self._hidden = self._decoder.forward(self._staged.of_step(counts), self._kv)

    def logits(self, places: np.ndarray) -> Tensor:
        return self._decoder.logits(self._hidden, torch.from_numpy(places))

    def profile_ops(self) -> None:
        """Ops on torch tensors are not told apart."""

    def take_op_seconds(self) -> Mapping[str, Mapping[str, float]]:
        return {}


class CapturedRunner:
    """Replays the model's ops: one call for the layers, one for the head."""

    def __init__(self, forward: CapturedRun, head: CapturedRun, places: Tensor) -> None:
        self.max_rows = len(places)
        self._forward = forward
        self._head = head
        self._places = places.numpy()

    def forward(self, counts: StepCounts) -> None:
        self._forward(*counts)

    def logits(self, places: np.ndarray) -> Tensor:
        num_rows = len(places)
        self._places[:num_rows] = places
        self._head(num_rows)
        return self._head.result[:num_rows]

    def profile_ops(self) -> None:
        for run in (self._forward, self._head):
            run.set_profiling(True)

    def take_op_seconds(self) -> Mapping[str, Mapping[str, float]]:
        seconds = {"layers": self._forward.op_seconds(), "head": self._head.op_seconds()}
        self.profile_ops()
        return seconds
