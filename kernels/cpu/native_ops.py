"""The ops of a program as they are recorded, and how each becomes one of the native library's."""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kernels.cpu.native_buffers import Buffer, Span
from kernels.cpu.native_lowering import (
    AttentionPlan,
    KvLayer,
    Lowering,
    Rotary,
    rows_of,
    rows_of_span,
)
from kernels.cpu.packed_weight import Format, PackedWeight

_QUANTISED_FORMATS = (Format.Q4, Format.Q4_WIDE, Format.Q8)
# A multiple of so many rows, or there is no op for the product and silu · mul in one.
_GATED_ROWS = 64


def is_quantised(weight: PackedWeight) -> bool:
    """Whether the product takes quantised rows. Matrices of one weight are alike in that."""
    return weight.matrices[0].format in _QUANTISED_FORMATS


def can_be_gated(weight: PackedWeight) -> bool:
    """Whether `GatedLinear` takes it."""
    is_one = len(weight.matrices) == 1 and weight.bias is None
    return is_one and weight.rows % _GATED_ROWS == 0


class Op:
    """One op on as many rows as `count` says.

    `out` is the buffer it writes, in all forms that are wanted, if it writes one whole. READS and
    UPDATES name the spans whose floats it reads, and those that it changes in place.
    """

    READS: ClassVar[Sequence[str]] = ()
    UPDATES: ClassVar[Sequence[str]] = ()
    count: int

    @property
    def reads(self) -> Sequence[Span]:
        return [getattr(self, name) for name in self.READS]

    @property
    def updates(self) -> Sequence[Span]:
        return [getattr(self, name) for name in self.UPDATES]

    def add(self, to: Lowering) -> None:
        """Adds it to a program; all buffers have their memory."""
        raise AssertionError


@dataclass(frozen=True, slots=True, eq=False)
class Embedding(Op):
    count: int
    ids: Tensor
    table: PackedWeight
    out: Buffer

    def add(self, to: Lowering) -> None:
        table = self.table.matrices[0].structure()
        to.library.tl_add_embedding(
            to.program, self.count, self.ids.data_ptr(), byref(table), rows_of(self.out)
        )
        to.label("embedding")


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm(Op):
    count: int
    x: Span
    weight: Tensor
    eps: float
    out: Buffer

    READS: ClassVar = ("x",)

    def add(self, to: Lowering) -> None:
        to.library.tl_add_rms_norm(
            *(to.program, self.count, self.x.address, self.x.stride, self.x.width),
            *(self.weight.data_ptr(), self.eps, rows_of(self.out)),
        )
        to.label("norm")


@dataclass(frozen=True, slots=True, eq=False)
class AddRmsNorm(Op):
    count: int
    x: Span
    residual: Span
    weight: Tensor
    eps: float
    out: Buffer

    READS: ClassVar = ("x",)
    UPDATES: ClassVar = ("residual",)

    def add(self, to: Lowering) -> None:
        to.library.tl_add_add_rms_norm(
            *(to.program, self.count, self.x.address, self.x.stride),
            *(self.residual.address, self.residual.stride, self.x.width),
            *(self.weight.data_ptr(), self.eps, rows_of(self.out)),
        )
        to.label("norm")


@dataclass(frozen=True, slots=True, eq=False)
class TakeRows(Op):
    """In the forms that `out` has; x has them too."""

    count: int
    x: Span
    indices: Tensor
    out: Buffer

    def add(self, to: Lowering) -> None:
        to.library.tl_add_take_rows(
            *(to.program, self.count, self.indices.data_ptr(), rows_of_span(self.x), self.x.width),
            rows_of(self.out),
        )
        to.label("take rows")


@dataclass(frozen=True, slots=True, eq=False)
class Quantise(Op):
    count: int
    x: Span
    out: Buffer

    READS: ClassVar = ("x",)

    def add(self, to: Lowering) -> None:
        to.library.tl_add_quantise(
            *(to.program, self.count, self.x.address, self.x.stride, self.x.width),
            rows_of(self.out),
        )
        to.label("quantise")


@dataclass(frozen=True, slots=True, eq=False)
class SiluAndMul(Op):
    count: int
    gate_up: Span
    out: Buffer

    READS: ClassVar = ("gate_up",)

    def add(self, to: Lowering) -> None:
        to.library.tl_add_silu_and_mul(
            *(to.program, self.count, self.gate_up.address, self.gate_up.stride),
            *(self.out.width, rows_of(self.out)),
        )
        to.label("silu and mul")


@dataclass(frozen=True, slots=True, eq=False)
class Linear(Op):
    """Writes floats to the columns of `product`, or adds to what is there."""

    count: int
    x: Span
    weight: PackedWeight
    product: Span
    adds: bool = False

    UPDATES: ClassVar = ("product",)

    def add(self, to: Lowering) -> None:
        for first, matrix in self.weight.structures():
            to.library.tl_add_linear(
                *(to.program, self.count, rows_of_span(self.x), byref(matrix), int(self.adds)),
                *(self.product.address + 4 * first, self.product.stride),
            )
        to.label(f"linear {self.weight.rows} x {self.weight.columns}")


@dataclass(frozen=True, slots=True, eq=False)
class GatedLinear(Op):
    count: int
    x: Span
    weight: PackedWeight
    out: Buffer

    def add(self, to: Lowering) -> None:
        ((_, matrix),) = self.weight.structures()
        to.library.tl_add_gated_linear(
            to.program, self.count, rows_of_span(self.x), byref(matrix), rows_of(self.out)
        )
        to.label(f"gated linear {self.weight.rows} x {self.weight.columns}")


@dataclass(frozen=True, slots=True, eq=False)
class Rope(Op):
    count: int
    query: Span
    head_dim: int
    rotary: Rotary

    UPDATES: ClassVar = ("query",)

    def add(self, to: Lowering) -> None:
        to.library.tl_add_rope(
            *(to.program, self.count, self.query.address, self.query.stride),
            *(self.query.width // self.head_dim, self.head_dim, self.rotary.structure),
        )
        to.label("rope")


@dataclass(frozen=True, slots=True, eq=False)
class RopeAndCache(Op):
    count: int
    key: Span
    value: Span
    rotary: Rotary
    kv_layer: KvLayer
    slot_mapping: Tensor

    READS: ClassVar = (
        "key",
        "value",
    )

    def add(self, to: Lowering) -> None:
        to.library.tl_add_rope_and_cache(
            *(to.program, self.count, self.key.address, self.key.stride),
            *(self.value.address, self.value.stride, self.rotary.structure),
            *(self.kv_layer.structure, self.slot_mapping.data_ptr()),
        )
        to.label("rope and cache")


@dataclass(frozen=True, slots=True, eq=False)
class Attention(Op):
    count: int
    plan: AttentionPlan
    num_sequences: int  # a count, too
    query: Span
    num_heads: int
    kv_layer: KvLayer
    scale: float
    sliding_window: int
    out: Buffer

    READS: ClassVar = ("query",)

    def add(self, to: Lowering) -> None:
        to.library.tl_add_attention(
            *(to.program, self.count, to.plan(self.plan, self.num_sequences)),
            *(self.query.address, self.query.stride, self.num_heads, self.kv_layer.structure),
            *(self.scale, self.sliding_window, rows_of(self.out)),
        )
        to.label("attention")
