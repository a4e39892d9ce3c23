"""What recorded ops refer to beside activations, and the program of the library they go into."""

from ctypes import CDLL
from dataclasses import dataclass, field

from torch import Tensor

from kernels.cpu import library as native
from kernels.cpu.native_buffers import Buffer, Span


@dataclass(frozen=True, slots=True, eq=False)
class KvLayer:
    """One layer of the cache; `memory` holds what `structure` points at."""

    structure: native.KvLayer
    memory: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """A batch's layout, int32 tensors, as `Kernels.plan_attention` has them."""

    cu_seqlens: Tensor
    seq_lens: Tensor
    block_table: Tensor
    rows: Tensor | None
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """How heads are rotated: rows `positions` of the table, after `norm` where there is one."""

    cos_sin_table: Tensor
    positions: Tensor
    norm: Tensor | None
    eps: float

    @property
    def structure(self) -> native.Rotary:
        norm = None if self.norm is None else self.norm.data_ptr()
        return native.Rotary(
            self.cos_sin_table.data_ptr(), self.positions.data_ptr(), norm, self.eps
        )


@dataclass(slots=True)
class Lowering:
    """A program of the library that is being put together."""

    library: CDLL
    program: int
    labels: list[str] = field(default_factory=list)
    plans: dict[AttentionPlan, int] = field(default_factory=dict)

    def label(self, name: str) -> None:
        """Names the ops that were added since the last time."""
        num_new = self.library.tl_program_num_ops(self.program) - len(self.labels)
        self.labels += [name] * num_new

    def plan(self, plan: AttentionPlan, num_sequences: int) -> int:
        """The library's plan, made in the program before its first use, for so many sequences as
        the count `num_sequences` says."""
        if plan not in self.plans:
            self.plans[plan] = self.library.tl_add_attention_plan(
                *(self.program, num_sequences, plan.cu_seqlens.data_ptr()),
                *(plan.seq_lens.data_ptr(), plan.block_table.data_ptr()),
                *(plan.block_table.shape[1], None if plan.rows is None else plan.rows.data_ptr()),
                plan.block_size,
            )
            self.label("attention plan")
        return self.plans[plan]


def rows_of(buffer: Buffer) -> native.Rows:
    """TlRows of all the forms that a buffer has."""
    return native.Rows(
        buffer.values or None,
        buffer.width,
        buffer.quantised or None,
        buffer.scales or None,
        buffer.sums or None,
        buffer.halves,
    )


def rows_of_span(span: Span) -> native.Rows:
    if span.buffer is not None and span.is_whole:
        return rows_of(span.buffer)
    return native.Rows(span.address, span.stride)
