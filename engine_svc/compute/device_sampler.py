"""From logits to tokens on a device: the stages of sampler.py, of which the host hears later.

A step without options takes one op and the appending of its tokens, both of which can be captured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.device_batch import DeviceStep, StepTensors
from engine_svc.compute.device_tables import DeviceTables
from engine_svc.compute.devices import Device
from engine_svc.compute.parallel_device_sampling import DeviceParallelSampling, filtered_rows
from engine_svc.compute.sampler import list_logprobs
from engine_svc.compute.sampling_rows import (
    Penalties,
    SamplingInputs,
    TokenMask,
    WantedLogprobs,
)
from engine_svc.compute.token_biases import TokenBiases
from engine_svc.planning.step import SamplingError, TokenLogprobs
from kernels import Kernels

# What `Kernels.sample` gives for a row that no token can be chosen for.
_UNUSABLE = -1


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Results of `Kernels.token_logprobs` on their way to the host: [n], and [n, most] each."""

    num_top: Sequence[int]
    logprobs: Tensor
    top_ids: Tensor
    top: Tensor

    def listed(self) -> list[TokenLogprobs]:
        """Once they are there."""
        return list_logprobs(self.num_top, self.logprobs, self.top_ids, self.top)


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """What is sampled of `s` rows, on its way to the host."""

    token_ids: Tensor  # int64 [s]
    # The largest logit of each row that options changed, and which rows those are.
    largest: Tensor | None = None  # float32 [s]
    edited: frozenset[int] = frozenset()
    logprobs: PendingLogprobs | None = None
    logprob_rows: Sequence[int] = ()

    def listed(
        self,
    ) -> tuple[list[int], list[SamplingError | None], list[TokenLogprobs | None]]:
        """Ids, errors and log-probabilities [s] each, once they are there.

        A row with an error has token 0.
        """
        ids = self.token_ids.tolist()
        errors: list[SamplingError | None] = [None] * len(ids)
        if _UNUSABLE in ids:
            largest = [0.0] * len(ids) if self.largest is None else self.largest.tolist()
            for row, token_id in enumerate(ids):
                if token_id == _UNUSABLE:
                    is_empty = row in self.edited and largest[row] == -math.inf
                    errors[row] = (
                        SamplingError.NO_TOKEN_LEFT if is_empty else SamplingError.BAD_LOGITS
                    )
                    ids[row] = 0
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if self.logprobs is not None:
            for row, entry in zip(self.logprob_rows, self.logprobs.listed(), strict=True):
                logprobs[row] = entry
        return ids, errors, logprobs


class DeviceSampler:
    """Chooses a token for each row of at most `max_rows`, and appends it to the row's tokens."""

    def __init__(
        self, kernels: Kernels, device: Device, tables: DeviceTables, max_rows: int
    ) -> None:
        self._kernels = kernels
        self._device = device
        self._tables = tables
        self._sampled = torch.zeros(max_rows, dtype=torch.int64, device=device.torch_device)
        # As they are appended: a row without a token gets token 0, which later steps can read.
        self._appended = torch.zeros(max_rows, dtype=torch.int32, device=device.torch_device)

    def takes_options(self, inputs: SamplingInputs) -> bool:
        """Whether a step takes more than `draw`; `inputs` of the host."""
        return has_options(inputs) or self._filtered(inputs) is not None

    def draw(
        self, logits: Tensor, tensors: StepTensors, num_rows: int, filtered: Tensor | None = None
    ) -> None:
        """Samples and appends the first rows of a step; logits float32 [num_rows, vocab_size].

        `filtered` are the rows that are drawn apart, where kernels do that.
        """
        inputs = tensors.sampling
        parameters = {
            "temperature": inputs.temperature[:num_rows],
            "min_p": inputs.min_p[:num_rows],
            "top_k": inputs.top_k[:num_rows],
            "top_p": inputs.top_p[:num_rows],
            "seeds": inputs.seeds[:num_rows],
            "positions": inputs.positions[:num_rows],
            "out": self._sampled[:num_rows],
        }
        self._kernels.sample(logits, **parameters)
        if filtered is not None:
            self._kernels.draw_filtered(logits, filtered, **parameters)
        appended = self._appended[:num_rows]
        appended.copy_(self._sampled[:num_rows]).clamp_(min=0)
        self._tables.put_tokens(tensors.sampled_places[:num_rows], appended)

    def drawn(self, num_rows: int) -> PendingTokens:
        """Queues the copy of what `draw` sampled last."""
        return PendingTokens(self._device.download(self._sampled[:num_rows]))

    def draw_with_options(
        self, logits: Tensor, step: DeviceStep, grammar_mask: TokenMask | None
    ) -> PendingTokens:
        """As `draw` and `drawn`, where rows ask for more. Overwrites logits [s, vocab_size]."""
        options = self._upload(step, grammar_mask)
        num_rows = len(step.layout.sampled_rows)
        raw = None
        if options.logprobs is not None:
            raw = logits.index_select(0, options.logprobs.rows)
        self._edit(logits, options)
        edited = _edited_rows(step.sampling, grammar_mask)
        largest = self._device.download(self._kernels.largest(logits)) if edited else None
        filtered = self._filtered(step.sampling)
        if filtered is not None:
            (filtered,) = self._device.upload([filtered])
        self.draw(logits, step.tensors, num_rows, filtered)
        pending = replace(self.drawn(num_rows), largest=largest, edited=edited)
        wanted = step.sampling.logprobs
        if wanted is None or raw is None:
            return pending
        chosen = self._appended[:num_rows].index_select(0, options.logprobs.rows).long()
        return replace(
            pending,
            logprobs=self.score(raw, chosen, wanted.num_top),
            logprob_rows=wanted.rows.tolist(),
        )

    def score(self, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> PendingLogprobs:
        """As Sampler.score: of given tokens, int64 [n], under raw logits [n, vocab_size]."""
        results = self._kernels.token_logprobs(logits, token_ids, max(num_top))
        return PendingLogprobs(num_top, *map(self._device.download, results))

    def _filtered(self, inputs: SamplingInputs) -> np.ndarray | None:
        """The rows that are drawn apart, if any."""
        if not isinstance(self._kernels, DeviceParallelSampling):
            return None
        rows = filtered_rows(inputs)
        return rows if len(rows) else None

    def _upload(self, step: DeviceStep, grammar_mask: TokenMask | None) -> SamplingInputs:
        """The options of a step on the device, by one copy."""
        options = step.sampling
        masks = ([] if grammar_mask is None else [grammar_mask]) + list(options.masks)
        arrays: list[np.ndarray] = []
        for mask in masks:
            arrays += [mask.rows.numpy(), mask.allowed.numpy()]
        if options.biases is not None:
            arrays += [part.numpy() for part in options.biases]
        if options.penalties is not None:
            rows = step.layout.sampled_rows[options.penalties.rows.numpy()]
            parts = options.penalties._replace(token_ids=torch.from_numpy(rows))
            arrays += [np.ascontiguousarray(part.numpy()) for part in parts]
        if options.logprobs is not None:
            arrays.append(options.logprobs.rows.numpy())
        sent = iter(self._device.upload(arrays))

        def take(kind: type, size: int) -> tuple[Tensor, ...]:
            return kind(*(next(sent) for _ in range(size)))

        masks = tuple(take(TokenMask, 2) for _ in masks)
        biases = None if options.biases is None else take(TokenBiases, 3)
        penalties = None
        if options.penalties is not None:
            longest = int(options.penalties.seq_lens.max())
            penalties = take(Penalties, len(Penalties._fields))
            tokens = self._tables.tokens_of(penalties.token_ids, longest)
            penalties = penalties._replace(token_ids=tokens)
        logprobs = options.logprobs
        if logprobs is not None:
            logprobs = WantedLogprobs(next(sent), logprobs.num_top)
        return replace(
            step.tensors.sampling,
            masks=masks,
            biases=biases,
            penalties=penalties,
            logprobs=logprobs,
        )

    def _edit(self, logits: Tensor, options: SamplingInputs) -> None:
        """See Sampler."""
        for mask in options.masks:
            self._kernels.mask_logits(logits, mask.rows, mask.allowed)
        if options.biases is not None and len(options.biases.rows):
            self._kernels.bias_logits(logits, *options.biases)
        if options.penalties is not None:
            self._kernels.penalize(logits, *options.penalties)


def has_options(inputs: SamplingInputs) -> bool:
    """Whether a step takes more than `DeviceSampler.draw`."""
    return bool(inputs.masks) or not (inputs.biases is inputs.penalties is inputs.logprobs is None)


def _edited_rows(inputs: SamplingInputs, grammar_mask: TokenMask | None) -> frozenset[int]:
    """The rows that a mask or a bias may have left without a token."""
    rows = [mask.rows for mask in inputs.masks]
    if grammar_mask is not None:
        rows.append(grammar_mask.rows)
    if inputs.biases is not None:
        rows.append(inputs.biases.rows)
    # A request may have hundreds of biases.
    return frozenset(row for part in rows for row in np.unique(part.numpy()).tolist())
