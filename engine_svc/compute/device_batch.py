"""The running batch of a device: what the host keeps of it, and how a step gets to the device.

The host plans by counts alone, so it need not know the tokens that are still being computed. A step
is written into pinned memory and sent by one copy; tokens and blocks are in tables on the device,
which the same copy brings up to date.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.device_tables import DeviceTables
from engine_svc.compute.devices import Device
from engine_svc.compute.packed_fields import Field, PackedFields
from engine_svc.compute.persistent_batch import PersistentBatch, StepLayout
from engine_svc.compute.sampling_rows import SamplingInputs
from engine_svc.compute.staging import StagingMemory
from engine_svc.compute.step_tensors import StepCounts, StepInputs
from engine_svc.planning.step import StepPlan

# Where a padding token's key and value go: nowhere.
_NO_SLOT = -1


class _Staged(NamedTuple):
    """What is sent of a step: arrays on the host, or tensors on the device. See StepInputs, and
    SamplingInputs for those of `s` tokens that are sampled."""

    token_places: Tensor  # int64 [T], in the table of tokens
    sampled_places: Tensor  # int64 [s], there: where the sampled tokens go
    top_k: Tensor  # int64 [s]
    seeds: Tensor
    sampled_positions: Tensor
    temperature: Tensor  # float32 [s]
    min_p: Tensor
    top_p: Tensor
    positions: Tensor  # int32 [T]
    slot_mapping: Tensor
    cu_seqlens: Tensor  # int32 [n + 1]
    rows: Tensor  # int32 [n]
    kept_indices: Tensor  # int32 [K]
    kept_positions: Tensor
    kept_cu_seqlens: Tensor  # int32 [k + 1]
    kept_rows: Tensor  # int32 [k]
    seq_lens: Tensor  # int32 [rows + 1]
    sample_places: Tensor  # int32 [s] of the K


def _staged_fields(counts: StepCounts, num_sampled: int, num_rows: int) -> list[Field]:
    tokens, kept, sequences, kept_sequences = counts
    return [
        (np.int64, (tokens,)),
        *[(np.int64, (num_sampled,))] * 4,
        *[(np.float32, (num_sampled,))] * 3,
        *[(np.int32, (tokens,))] * 2,
        (np.int32, (sequences + 1,)),
        (np.int32, (sequences,)),
        *[(np.int32, (kept,))] * 2,
        (np.int32, (kept_sequences + 1,)),
        (np.int32, (kept_sequences,)),
        (np.int32, (num_rows + 1,)),
        (np.int32, (num_sampled,)),
    ]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device."""

    inputs: StepInputs
    token_places: Tensor  # int64 [T]: where inputs.token_ids are taken from
    sample_places: Tensor  # int32 [s] of the K kept tokens: the one before each sampled one
    sampled_places: Tensor  # int64 [s]: where the sampled ones go
    sampling: SamplingInputs  # of those, without options


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step that is on its way to the device.

    `padded` is 0, or how many sequences of one token each the tensors are of, padding included.
    `sampling` is on the host, of the s tokens that are sampled.
    """

    layout: StepLayout
    tensors: StepTensors
    padded: int
    sampling: SamplingInputs


class DeviceBatch:
    """Rows [0, max_num_seqs). See PersistentBatch."""

    def __init__(
        self,
        device: Device,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        max_num_tokens: int,
    ) -> None:
        self.host = PersistentBatch(
            max_num_seqs,
            max_model_len,
            block_size,
            vocab_size,
            max_num_tokens,
            tokens_on_device=True,
        )
        max_blocks = -(-max_model_len // block_size)
        self.tables = DeviceTables(device.torch_device, max_num_seqs, max_model_len, max_blocks)
        self._device = device
        self._num_rows = max_num_seqs
        # Everything at its largest, then as many words of the tables as a step has tokens, and a
        # block for each row; a longer prompt that starts travels by itself.
        self._max_edits = max_num_tokens + max_num_seqs
        largest = StepCounts(max_num_tokens, max_num_tokens, max_num_seqs, max_num_seqs)
        fields = _staged_fields(largest, max_num_seqs, max_num_seqs)
        edits = _edit_fields(self._max_edits)
        self._memory = StagingMemory(device, PackedFields([*fields, *edits]).num_bytes + 64)
        self._token_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device.torch_device)
        self._counting = np.arange(max_num_tokens + 1)
        self._padded: dict[int, tuple[PackedFields, StepTensors]] = {}

    def apply(self, plan: StepPlan, padded_size: Callable[[int], int]) -> DeviceStep:
        """Takes over what the plan changes, and queues the copy of its step.

        Steps of n tokens that are all sampled after are padded to padded_size(n), unless that is 0.
        """
        layout = self.host.apply(plan)
        counts, num_sampled = layout.counts, len(layout.sampled_rows)
        sampling = self.host.sampling_inputs(layout.sampled_rows, layout.sampled_positions)
        padded = 0
        if counts.num_tokens == counts.num_sequences and layout.samples_after_all:
            padded = padded_size(counts.num_sequences)
        if padded:
            fields, tensors = self._of_padded(padded)
        else:
            fields = PackedFields(_staged_fields(counts, num_sampled, self._num_rows))
            tensors = self._tensors(fields, counts)
        memory = self._memory.next()
        staged = _Staged(*fields.on_host(memory))
        self._write(staged, layout, sampling)
        if padded:
            self._pad(staged, counts.num_sequences)
        self._send(memory, fields, *self.tables.edits(plan))
        return DeviceStep(layout, tensors, padded, sampling)

    def pad(self, size: int) -> StepTensors:
        """Sends a step of `size` sequences of which all are padding."""
        fields, tensors = self._of_padded(size)
        staged = _Staged(*fields.on_host(self._memory.next()))
        self._pad(staged, 0)
        staged.seq_lens[:] = 0
        self._memory.send(fields.num_bytes)
        return tensors

    def _of_padded(self, size: int) -> tuple[PackedFields, StepTensors]:
        """The fields and tensors of a step of `size` sequences of one token, always the same."""
        if size not in self._padded:
            counts = StepCounts(size, size, size, size)
            fields = PackedFields(_staged_fields(counts, size, self._num_rows))
            self._padded[size] = fields, self._tensors(fields, counts)
        return self._padded[size]

    def _tensors(self, fields: PackedFields, counts: StepCounts) -> StepTensors:
        staged = _Staged(*fields.on_device(self._memory.on_device))
        is_whole = counts.num_tokens == counts.num_kept_tokens
        inputs = StepInputs(
            token_ids=self._token_ids[: counts.num_tokens],
            positions=staged.positions,
            slot_mapping=staged.slot_mapping,
            cu_seqlens=staged.cu_seqlens,
            rows=staged.rows,
            kept_indices=staged.kept_indices,
            kept_positions=staged.kept_positions,
            kept_cu_seqlens=staged.kept_cu_seqlens,
            kept_rows=staged.kept_rows,
            seq_lens=staged.seq_lens,
            block_table=self.tables.block_table,
            keeps_every_token=is_whole,
        )
        sampling = SamplingInputs(
            temperature=staged.temperature,
            min_p=staged.min_p,
            top_p=staged.top_p,
            top_k=staged.top_k,
            seeds=staged.seeds,
            positions=staged.sampled_positions,
        )
        return StepTensors(
            inputs, staged.token_places, staged.sample_places, staged.sampled_places, sampling
        )

    def _write(self, staged: _Staged, layout: StepLayout, sampling: SamplingInputs) -> None:
        """The step of the host's batch, into the beginnings of the fields."""
        host, (tokens, kept, sequences, kept_sequences) = self.host.staged, layout.counts
        positions = host.positions[:tokens]
        token_rows = host.rows[:sequences]
        if tokens != sequences:
            token_rows = np.repeat(token_rows, np.diff(host.cu_seqlens[: sequences + 1]))
        sampled_rows, sampled_positions = layout.sampled_rows, layout.sampled_positions
        num_sampled = len(sampled_rows)
        places = self.tables.token_places
        staged.token_places[:tokens] = places(token_rows, positions)
        staged.sampled_places[:num_sampled] = places(sampled_rows, sampled_positions)
        staged.top_k[:num_sampled] = sampling.top_k.numpy()
        staged.seeds[:num_sampled] = sampling.seeds.numpy()
        staged.sampled_positions[:num_sampled] = sampled_positions
        staged.temperature[:num_sampled] = sampling.temperature.numpy()
        staged.min_p[:num_sampled] = sampling.min_p.numpy()
        staged.top_p[:num_sampled] = sampling.top_p.numpy()
        staged.positions[:tokens] = positions
        staged.slot_mapping[:tokens] = host.slot_mapping[:tokens]
        staged.cu_seqlens[: sequences + 1] = host.cu_seqlens[: sequences + 1]
        staged.rows[:sequences] = host.rows[:sequences]
        staged.kept_indices[:kept] = host.kept_indices[:kept]
        staged.kept_positions[:kept] = host.kept_positions[:kept]
        staged.kept_cu_seqlens[: kept_sequences + 1] = host.kept_cu_seqlens[: kept_sequences + 1]
        staged.kept_rows[:kept_sequences] = host.kept_rows[:kept_sequences]
        staged.seq_lens[:-1] = host.seq_lens
        # The padding row's: no keys at all.
        staged.seq_lens[-1] = 0
        staged.sample_places[:num_sampled] = layout.sample_places

    def _pad(self, staged: _Staged, first: int) -> None:
        """Makes padding of a step's sequences from `first` on: greedy, at position 0."""
        row = self.tables.padding_row
        place = self.tables.token_places(np.array([row]), np.array([0]))
        size = len(staged.rows)
        for field in (staged.cu_seqlens, staged.kept_cu_seqlens):
            field[first:] = self._counting[first : size + 1]
        for field in (staged.kept_indices, staged.sample_places):
            field[first:] = self._counting[first:size]
        for field, value in (
            (staged.token_places, place),
            (staged.sampled_places, place),
            (staged.rows, row),
            (staged.kept_rows, row),
            (staged.slot_mapping, _NO_SLOT),
            (staged.top_p, 1.0),
        ):
            field[first:] = value
        for field in (
            *(staged.positions, staged.kept_positions, staged.sampled_positions),
            *(staged.top_k, staged.seeds, staged.temperature, staged.min_p),
        ):
            field[first:] = 0

    def _send(
        self, memory: np.ndarray, fields: PackedFields, places: np.ndarray, words: np.ndarray
    ) -> None:
        """Queues the copy, and after it the edits of the tables."""
        size = len(places)
        if not size:
            self._memory.send(fields.num_bytes)
            return
        if size > self._max_edits:
            self._memory.send(fields.num_bytes)
            self.tables.edit(*self._device.upload([places, words]))
            return
        edits, first = PackedFields(_edit_fields(size)), fields.num_bytes
        for view, array in zip(edits.on_host(memory[first:]), (places, words), strict=True):
            view[:] = array
        self._memory.send(first + edits.num_bytes)
        self.tables.edit(*edits.on_device(self._memory.on_device[first:]))


def _edit_fields(size: int) -> list[Field]:
    return [(np.int64, (size,)), (np.int32, (size,))]
