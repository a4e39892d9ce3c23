"""Rows of a file, or of floats, as codes and the words of their scales (packed_weight.py).

Blocks are those of GGUF files (github.com/ggml-org/ggml, src/ggml-common.h); nothing of them is
rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.stored_matrix import StoredKind, StoredMatrix

_GROUP = 32
_INT8_LARGEST = 127.0
_FP8_LARGEST = 448.0  # of e4m3

# uint8 codes [rows, columns] and int32 words of scales [rows, words], of some rows.
CodesAndScales = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Codes:
    """The rows of one part of a matrix, read a few at a time."""

    num_rows: int
    num_columns: int
    read: Callable[[int, int, torch.device], CodesAndScales]


def stored_codes(part: StoredMatrix) -> Codes:
    """Of 4- or 8-bit blocks."""
    decode = _BLOCKS[part.kind]

    def read(start: int, stop: int, device: torch.device) -> CodesAndScales:
        return decode(stored_rows(part, start, stop).to(device))

    return Codes(num_stored_rows(part), part.columns, read)


def int8_codes(weight: Tensor) -> Codes:
    """Groups of 32 rounded to multiples of max / 127, which is held in float16."""

    def read(start: int, stop: int, device: torch.device) -> CodesAndScales:
        groups = weight[start:stop].to(device, torch.float32).unflatten(1, (-1, _GROUP))
        scales = (groups.abs().amax(-1) / _INT8_LARGEST).half()
        steps = torch.where(scales == 0, 1, scales).float()
        codes = (groups / steps[..., None]).round().clamp(-_INT8_LARGEST, _INT8_LARGEST)
        return _with_128_added(codes.nan_to_num()).flatten(1), _pairs(scales, 4)

    return Codes(*weight.shape, read)


def fp8_codes(weight: Tensor) -> Codes:
    """e4m3, of rows whose largest value becomes that of the format (Micikevicius et al., 2022)."""

    def read(start: int, stop: int, device: torch.device) -> CodesAndScales:
        rows = weight[start:stop].to(device, torch.float32)
        scales = rows.abs().amax(-1, keepdim=True) / _FP8_LARGEST
        steps = torch.where(scales == 0, 1, scales)
        codes = (rows / steps).clamp(-_FP8_LARGEST, _FP8_LARGEST).nan_to_num()
        codes = codes.to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), steps.view(torch.int32)

    return Codes(*weight.shape, read)


def num_stored_rows(part: StoredMatrix) -> int:
    return len(part.data if part.row_order is None else part.row_order)


def stored_rows(part: StoredMatrix, start: int, stop: int) -> Tensor:
    """Some rows as the bytes of a file, in the matrix's order; a copy, uint8 [rows, bytes]."""
    data = (
        part.data[start:stop] if part.row_order is None else part.data[part.row_order[start:stop]]
    )
    return torch.from_numpy(np.array(data))


def _q4_0(rows: Tensor) -> CodesAndScales:
    blocks = rows.unflatten(1, (-1, 18))
    return _nibbles(blocks[..., 2:]), _pairs(_halves(blocks, 0), 8)


def _q4_1(rows: Tensor) -> CodesAndScales:
    blocks = rows.unflatten(1, (-1, 20))
    words = _bits(_halves(blocks, 0)) | _bits(_halves(blocks, 2)) << 16
    return _nibbles(blocks[..., 4:]), words


def _q4_k(rows: Tensor) -> CodesAndScales:
    """Of 8 groups, whose 6-bit scales and minima lie in 12 bytes: the last four of each in the four
    lower bits of bytes 8 to 11 or the four upper ones, and in two upper bits of the first eight."""
    blocks = rows.unflatten(1, (-1, 144))
    packed = blocks[..., 4:16].int()
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (last & 15) | (first >> 6) << 4], -1)
    minima = torch.cat([second & 63, last >> 4 | (second >> 6) << 4], -1)
    of_groups = (scales | minima << 8).unflatten(-1, (4, 2))
    of_pairs = of_groups[..., 0] | of_groups[..., 1] << 16
    of_step = _bits(_halves(blocks, 0)) | _bits(_halves(blocks, 2)) << 16
    words = torch.cat([of_pairs, of_step[..., None]], -1).flatten(1)
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))), words


def _q8_0(rows: Tensor) -> CodesAndScales:
    blocks = rows.unflatten(1, (-1, 34))
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return _with_128_added(codes).flatten(1), _pairs(_halves(blocks, 0), 4)


_BLOCKS: dict[StoredKind, Callable[[Tensor], CodesAndScales]] = {
    StoredKind.Q4_0: _q4_0,
    StoredKind.Q4_1: _q4_1,
    StoredKind.Q4_K: _q4_k,
    StoredKind.Q8_0: _q8_0,
}


def _nibbles(packed: Tensor) -> Tensor:
    """Lower halves of bytes, then upper ones, of each last axis -> uint8 [rows, columns]."""
    return torch.stack([packed & 15, packed >> 4], -2).flatten(1)


def _halves(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at a place of each block [rows, blocks]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0]


def _bits(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.int16).int() & 0xFFFF


def _pairs(scales: Tensor, groups_per_step: int) -> Tensor:
    """float16 scales [rows, groups] two to a word, steps filled up."""
    missing = -scales.shape[1] % groups_per_step
    bits = _bits(pad(scales, (0, missing))).unflatten(1, (-1, 2))
    return bits[..., 0] | bits[..., 1] << 16


def _with_128_added(codes: Tensor) -> Tensor:
    return (codes.to(torch.int16) + 128).to(torch.uint8)
