"""The sampler: logits to token ids in one to three readings, by four kernels.

1. scan: the largest logit of each row; and, where a row has no filters, the draw itself.
2. measure, for rows with filters: how many tokens lie above each of eight levels, and how likely
   they are together.
3. gather: those that can still be drawn are listed.
4. choose: the exact end of the ranking among these, and the draw; merges the parts of all rows.

The first three split a row into segments of the vocabulary, so that a small batch keeps a device
busy too. A row's token depends neither on other rows nor on its segments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.gpu.result_buffers import Scratch
from kernels.gpu.sampling_choice import choose_kernel
from kernels.gpu.sampling_passes import gather_kernel, measure_kernel, scan_kernel
from kernels.gpu.sampling_threshold import LEVELS, MOST_TILES
from kernels.gpu.variant import ModelShapes, Variant

_LEVELS = int(LEVELS.value)
# Room for those of a row: as many as any known vocabulary has, so that one form serves all models.
_SEGMENTS = 32
_ROW_TYPES = {
    "temperatures": "*fp32",
    "min_ps": "*fp32",
    "top_ks": "*i64",
    "top_ps": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
}
_PART_TYPES = {
    "maxima": "*fp32",
    "likeliest": "*i32",
    "scores": "*fp64",
    "winners": "*i32",
    "thresholds": "*fp32",
    "counts": "*i32",
    "masses": "*i64",
    "listed": "*fp32",
    "listed_ids": "*i32",
}
_TYPES = {
    "logits": "*fp32",
    "row_stride": "i32",
    "vocab_size": "i32",
    "first_token_id": "i32",
    "num_segments": "i32",
    "out": "*i64",
    **_ROW_TYPES,
    **_PART_TYPES,
}
_DTYPES = {
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*i32": torch.int32,
    "*i64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the work on a row is split; a row's token is the same for any of them."""

    segment: int = 16384
    # Tokens that are drawn from or listed at once, and tokens compared with all levels at once.
    tile: int = 2048
    measured_tile: int = 1024
    # Listed candidates of a row. A nucleus of more tokens is looked for in the row itself.
    capacity: int = 8192
    num_warps: int = 8

    def num_segments(self, vocab_size: int) -> int:
        return triton.cdiv(vocab_size, self.segment)


DEFAULT_TILES = Tiles()


def sample(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    out: Tensor,
    scratch: Scratch,
    tiles: Tiles = DEFAULT_TILES,
) -> None:
    """`Kernels.sample` into `out`, int64 [n]; logits may be rows of a wider buffer."""
    rows, vocab_size = logits.shape
    assert out.dtype == torch.int64 and out.is_contiguous()
    assert vocab_size <= MOST_TILES * tiles.measured_tile
    parts = scan(logits, temperature, min_p, top_k, top_p, seeds, positions, scratch, tiles)
    if rows == 0:
        return
    num_segments = tiles.num_segments(vocab_size)
    arguments = {
        **parts,
        "thresholds": scratch("sample_thresholds", (rows, _LEVELS), torch.float32),
        "counts": scratch("sample_counts", (rows, num_segments, _LEVELS), torch.int32),
        "masses": scratch("sample_masses", (rows, num_segments, _LEVELS), torch.int64),
        "listed": scratch("sample_listed", (rows, tiles.capacity), torch.float32),
        "listed_ids": scratch("sample_listed_ids", (rows, tiles.capacity), torch.int32),
        "num_segments": num_segments,
        "out": out,
    }
    for kernel in (measure_kernel, gather_kernel):
        _launch(kernel, (rows, num_segments), arguments, vocab_size, tiles)
    _launch(choose_kernel, (rows,), arguments, vocab_size, tiles)


def scan(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    scratch: Scratch,
    tiles: Tiles = DEFAULT_TILES,
    first_token_id: int = 0,
) -> Mapping[str, object]:
    """The first reading, by itself what a rank with a part of the vocabulary can tell of it.

    Its logits are those of the tokens from first_token_id on, a multiple of 4. Among the arguments
    of the kernels are then `maxima` and `likeliest` [n, segments], the largest logit and its first
    token, and `scores` and `winners`, the best noisy one, for rows without filters.
    """
    rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and first_token_id % 4 == 0
    options = (temperature, min_p, top_k, top_p, seeds, positions)
    assert all(option.shape == (rows,) and option.is_contiguous() for option in options)
    shape = (rows, tiles.num_segments(vocab_size))
    arguments = {
        "logits": logits,
        "row_stride": logits.stride(0),
        "vocab_size": vocab_size,
        "first_token_id": first_token_id,
        "temperatures": temperature,
        "min_ps": min_p,
        "top_ks": top_k,
        "top_ps": top_p,
        "seeds": seeds,
        "positions": positions,
    }
    for name in ("maxima", "likeliest", "scores", "winners"):
        arguments[name] = scratch(f"sample_{name}", shape, _DTYPES[_TYPES[name]])
    if rows:
        _launch(scan_kernel, shape, arguments, vocab_size, tiles)
    return arguments


def _launch(
    kernel: triton.JITFunction,
    grid: tuple[int, ...],
    arguments: Mapping[str, object],
    vocab_size: int,
    tiles: Tiles,
) -> None:
    values = {**arguments, **_constexprs(kernel, vocab_size, tiles)}
    kernel[grid](**{name: values[name] for name in kernel.arg_names}, num_warps=tiles.num_warps)


def _constexprs(kernel: triton.JITFunction, vocab_size: int, tiles: Tiles) -> dict[str, int]:
    values = {
        "SEGMENT": tiles.segment,
        "SEGMENTS": max(_SEGMENTS, triton.next_power_of_2(tiles.num_segments(vocab_size))),
        "CAPACITY": tiles.capacity,
        "TILE": tiles.tile if kernel in (scan_kernel, gather_kernel) else tiles.measured_tile,
    }
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def variants(shapes: ModelShapes) -> Iterator[Variant]:
    """What a model of these shapes launches."""
    is_even = shapes.vocab_size % 16 == 0
    for name, kernel in (
        ("scan", scan_kernel),
        ("measure", measure_kernel),
        ("gather", gather_kernel),
        ("choose", choose_kernel),
    ):
        constexprs = _constexprs(kernel, shapes.vocab_size, DEFAULT_TILES)
        yield Variant(
            kernel=kernel,
            label=f"sample: {name}, rows {'' if is_even else 'not '}aligned",
            signature={arg: _TYPES[arg] for arg in kernel.arg_names if arg not in constexprs},
            constexprs=constexprs,
            num_warps=DEFAULT_TILES.num_warps,
            # What one row takes at its end is little beside the readings of all.
            may_spill=kernel is choose_kernel,
            divisible_by_16=("row_stride", "vocab_size") if is_even else (),
        )
