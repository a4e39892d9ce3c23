"""What one launch of attention is given, and the form of a kernel that this asks for.

Kernels are launched and compiled ahead through the same functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention_plan import GpuAttentionPlan
from kernels.gpu.attention_tiles import AttentionForm, AttentionTiles
from kernels.gpu.kv_cache import GpuKvLayer, KvFormat
from kernels.gpu.pointer_types import pointer_type
from kernels.gpu.variant import Variant

# (purpose, shape, dtype) -> a tensor of arbitrary contents.
Scratch = Callable[[str, tuple[int, ...], torch.dtype], Tensor]

_TRITON_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of `paged_attention`, checked."""

    query: Tensor
    kv_layer: GpuKvLayer
    plan: GpuAttentionPlan
    scale: float
    sliding_window: int
    soft_cap: float
    out: Tensor

    def __post_init__(self) -> None:
        head_dim = self.kv_layer.head_dim
        for tensor in (self.query, self.out):
            assert tensor.shape[2] == head_dim and tensor.stride()[1:] == (head_dim, 1)
        assert self.out.shape == self.query.shape
        assert self.query.shape[1] % self.kv_layer.num_kv_heads == 0
        assert self.plan.block_size == self.kv_layer.block_size
        assert self.scale > 0

    @cached_property
    def form(self) -> AttentionForm:
        kv_layer = self.kv_layer
        return AttentionForm(
            *(self.query.shape[1], kv_layer.num_kv_heads, kv_layer.head_dim, kv_layer.block_size),
            *(self.query.dtype, kv_layer.format, self.sliding_window, self.soft_cap),
        )

    def cache_arguments(self) -> tuple[Tensor | None, ...]:
        """keys, values, key_scales, value_scales."""
        scales = self.kv_layer.scales
        halves = (None, None) if scales is None else (scales[0], scales[1])
        return self.kv_layer.data[0], self.kv_layer.data[1], *halves

    def layout_arguments(self) -> tuple[Tensor, ...]:
        """cu_seqlens, seq_lens, rows, block_table; any tensor for `rows` where there are none."""
        plan = self.plan
        rows = plan.seq_lens if plan.rows is None else plan.rows
        return plan.cu_seqlens, plan.seq_lens, rows, plan.block_table

    def strides_and_scale(self) -> tuple[int, int, int, float]:
        """query_stride, out_stride, table_stride, scale."""
        query_stride, out_stride = self.query.stride(0), self.out.stride(0)
        return query_stride, out_stride, self.plan.block_table.stride(0), self.scale


def form_constexprs(form: AttentionForm, tiles: AttentionTiles) -> dict[str, object]:
    """What the kernels that read the cache have in common."""
    return {
        "GROUP": form.group,
        "NUM_KV_HEADS": form.num_kv_heads,
        "HEAD_DIM": form.head_dim,
        "PADDED_DIM": triton.next_power_of_2(form.head_dim),
        "BLOCK_SIZE": form.block_size,
        "BLOCK_M": tiles.rows,
        "TILE": tiles.keys,
        "WINDOW": form.sliding_window,
        "SOFT_CAP": form.soft_cap,
        "PRODUCT_TYPE": _TRITON_TYPES[form.product_dtype],
        "VALUE_TYPE": _TRITON_TYPES[form.value_dtype],
    }


def form_variant(
    kernel: triton.JITFunction[Any],
    label: str,
    form: AttentionForm,
    tiles: AttentionTiles,
    device_name: str,
    counts: Sequence[str],
    constexprs: dict[str, object],
) -> Variant:
    """Of a kernel that reads the cache; `counts` are its integers of any value."""
    element = pointer_type(form.dtype)
    cache = pointer_type(form.kv_format.dtype)
    signature = {"query": element, "out": element, "keys": cache, "values": cache}
    signature |= dict.fromkeys(("cu_seqlens", "seq_lens", "rows", "block_table"), "*i32")
    signature |= dict.fromkeys((*counts, "query_stride", "out_stride", "table_stride"), "i32")
    signature["scale"] = "fp32"
    if form.kv_format.has_scales:
        signature |= {"key_scales": "*fp32", "value_scales": "*fp32"}
    else:
        constexprs = constexprs | {"key_scales": None, "value_scales": None}
    return Variant(
        kernel,
        f"{label}, {form}",
        signature,
        constexprs,
        tiles.num_warps,
        tiles.num_stages,
        divisible_by_16=("query_stride", "out_stride"),
        needs=frozenset({"fp8"} if form.kv_format == KvFormat.FP8 else ()),
        devices=frozenset({device_name}),
    )
