"""One compiled form of a kernel: what an op launches, and what is compiled ahead to be checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from kernels.gpu.kv_cache import KvFormat


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What of a model its kernels are compiled for: each op's `variants` makes its forms of it."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_format: KvFormat = KvFormat.BFLOAT16
    sliding_window: int = 0
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its types and compile-time values.

    `signature` has every argument that is not in `constexprs`, by name, as Triton writes types:
    "*bf16", "i32", "fp32", "u64".
    """

    kernel: triton.JITFunction[Any]
    label: str  # for people: the op, and what tells this variant from its others
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    # Attention, norm and rope keep all they hold in registers.
    may_spill: bool = False
    # Pointers are aligned to 16 bytes; these integers are multiples of 16 too.
    divisible_by_16: tuple[str, ...] = ()
    # Not for devices without this type: "fp8".
    needs: frozenset[str] = field(default_factory=frozenset)
    # Only for these, by their names in compilation.py; for all where there are none.
    devices: frozenset[str] = field(default_factory=frozenset)
