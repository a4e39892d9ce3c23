"""Quantised weights as the GPU's kernels read them, laid out once when a model is loaded.

Columns come in groups of 32 with a scale each, and groups in steps: 8 groups of 4-bit codes or 4
groups of 8-bit codes, 128 bytes of an output either way. The codes of a step and of all outputs lie
side by side, so that a program reads one stretch of memory: 32 words an output,

- 4 bits: word 16 (g div 4) + i holds columns 2i and 2i + 1 of the groups g with g div 4 alike, in
  its halves, four bits each: one mask takes two neighbouring columns out of a word;
- 8 bits: word i holds column i of the four groups.

Scales are words too, [steps, words, outputs]. Outputs and steps are padded with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.gpu.stored_blocks import Codes

GROUP = 32
# A multiple of every tile's outputs.
PADDED_OUTPUTS = 128
_WORD_BYTES = 4
_STEP_BYTES = 128
# Values laid out at once: bounds what the temporaries take.
_CHUNK_VALUES = 1 << 24


class CodeFormat(StrEnum):
    """What a group's 32 codes q and its scales stand for."""

    Q4 = "q4"  # scale · (q - 8), scale in float16
    Q4_MINIMUM = "q4_minimum"  # scale · q + minimum, both in float16
    Q4_WIDE = "q4_wide"  # as above, of 6 bits each, times two float16 numbers of the step
    INT8 = "int8"  # scale · q, scale in float16
    FP8 = "fp8"  # q in e4m3, times a scale of the output, in float32

    @property
    def groups_per_step(self) -> int:
        return 4 if self in (CodeFormat.INT8, CodeFormat.FP8) else 8

    @property
    def scale_words(self) -> int:
        """Words of scales that a step has for each output."""
        return _SCALE_WORDS[self]


_SCALE_WORDS = {
    CodeFormat.Q4: 4,
    CodeFormat.Q4_MINIMUM: 8,
    CodeFormat.Q4_WIDE: 5,
    CodeFormat.INT8: 2,
    CodeFormat.FP8: 0,
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A weight [num_outputs, num_columns] and its bias, on one device."""

    format: CodeFormat
    num_outputs: int
    num_columns: int
    codes: Tensor  # int32 [steps, padded outputs, 32]
    scales: Tensor  # int32 [steps, words, padded outputs]; fp8: float32 [padded outputs]
    bias: Tensor  # float32 [padded outputs]

    @property
    def num_steps(self) -> int:
        return self.codes.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def padded_outputs(num_outputs: int) -> int:
    return -(-num_outputs // PADDED_OUTPUTS) * PADDED_OUTPUTS


def num_steps(code_format: CodeFormat, num_columns: int) -> int:
    return -(-num_columns // (GROUP * code_format.groups_per_step))


def packed_bytes(code_format: CodeFormat, num_outputs: int, num_columns: int) -> int:
    """Memory that a matrix takes, its bias apart."""
    per_step = _STEP_BYTES + _WORD_BYTES * code_format.scale_words
    row_scale = _WORD_BYTES if code_format is CodeFormat.FP8 else 0
    steps = num_steps(code_format, num_columns)
    return padded_outputs(num_outputs) * (steps * per_step + row_scale)


def pack_matrix(
    code_format: CodeFormat, parts: Sequence[Codes], bias: Tensor | None, device: torch.device
) -> PackedMatrix:
    """The rows of all parts, one below the other; bias [outputs], of any floating type."""
    num_columns = parts[0].num_columns
    outputs = sum(part.num_rows for part in parts)
    steps, padded = num_steps(code_format, num_columns), padded_outputs(outputs)
    codes = torch.zeros(steps, padded, GROUP, dtype=torch.int32, device=device)
    if code_format is CodeFormat.FP8:
        scales = torch.zeros(padded, device=device)
    else:
        shape = (steps, code_format.scale_words, padded)
        scales = torch.zeros(shape, dtype=torch.int32, device=device)
    first = 0
    chunk = max(1, _CHUNK_VALUES // num_columns)
    for part in parts:
        assert part.num_columns == num_columns
        for start in range(0, part.num_rows, chunk):
            values, row_scales = part.read(start, min(start + chunk, part.num_rows), device)
            rows = slice(first + start, first + start + len(values))
            codes[:, rows] = _words(code_format, values, steps).transpose(0, 1)
            if code_format is CodeFormat.FP8:
                scales[rows] = row_scales[:, 0].view(torch.float32)
            else:
                missing = steps * code_format.scale_words - row_scales.shape[1]
                by_step = pad(row_scales, (0, missing)).unflatten(1, (steps, -1))
                scales[:, :, rows] = by_step.permute(1, 2, 0)
        first += part.num_rows
    padded_bias = torch.zeros(padded, device=device)
    if bias is not None:
        padded_bias[:outputs] = bias
    return PackedMatrix(code_format, outputs, num_columns, codes, scales, padded_bias)


def _words(code_format: CodeFormat, codes: Tensor, steps: int) -> Tensor:
    """codes uint8 [rows, columns] -> int32 [rows, steps, 32]."""
    groups = code_format.groups_per_step
    codes = pad(codes, (0, steps * groups * GROUP - codes.shape[1]))
    words = torch.zeros(len(codes), steps, GROUP, dtype=torch.int32, device=codes.device)
    if groups == 4:
        by_group = codes.view(-1, steps, 4, GROUP)
        for group in range(4):
            words |= by_group[:, :, group].int() << 8 * group
        return words
    halves = codes.view(-1, steps, 2, 4, GROUP // 2, 2)
    by_half = words.view(-1, steps, 2, GROUP // 2)
    for group in range(4):
        for half in range(2):
            by_half |= halves[:, :, :, group, :, half].int() << (16 * half + 4 * group)
    return words
