"""Makes a program of recorded ops shorter: joins neighbours, and settles who writes which form."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kernels.cpu.native_buffers import Buffer, Span
from kernels.cpu.native_ops import (
    AddRmsNorm,
    Attention,
    GatedLinear,
    Linear,
    Op,
    Quantise,
    RmsNorm,
    SiluAndMul,
    TakeRows,
    can_be_gated,
    is_quantised,
)

# These write their result quantised as readily as they write floats.
_QUANTISING = (RmsNorm, AddRmsNorm, SiluAndMul, GatedLinear, Attention)


def fuse(ops: Iterable[Op], result: Buffer | None) -> list[Op]:
    """A product goes right into the residual that it is added to, or through silu · mul."""
    ops = list(ops)
    num_readers = Counter(span.owner for op in ops for span in _inputs(op))
    num_readers[result] += 1
    fused: list[Op] = []
    for op in ops:
        before = fused[-1] if fused else None
        if isinstance(before, Linear) and num_readers[before.product.owner] == 1:
            product = before.product.owner
            if isinstance(op, AddRmsNorm) and op.x.owner is product and not before.adds:
                fused[-1] = replace(before, product=op.residual, adds=True)
                fused.append(RmsNorm(op.count, op.residual, op.weight, op.eps, op.out))
                continue
            if (
                isinstance(op, SiluAndMul)
                and op.gate_up.owner is product
                and can_be_gated(before.weight)
            ):
                fused[-1] = GatedLinear(op.count, before.x, before.weight, op.out)
                continue
        fused.append(op)
    return fused


def settle_forms(ops: Sequence[Op], result: Buffer | None, halves: int) -> list[Op]:
    """Marks in which forms each buffer is written: those that somebody reads.

    What a quantised product reads is written so by the op before, or else quantised in between, to
    `halves`.
    """
    producers = {op.out: op for op in ops if _writes_whole(op)}
    changed = {span.owner for op in ops for span in op.updates}
    settled: list[Op] = []
    if result is not None:
        result.has_values = True

    def comes_quantised(span: Span) -> bool:
        producer = producers.get(span.buffer) if span.is_whole else None
        if producer is None or span.buffer in changed:
            return False
        if isinstance(producer, TakeRows):
            return comes_quantised(producer.x)
        return isinstance(producer, _QUANTISING)

    # From the end, so that all readers of a buffer come before who writes it.
    for op in reversed(ops):
        _want_values((*op.reads, *op.updates))
        if isinstance(op, Linear | GatedLinear):
            if not is_quantised(op.weight):
                _want_values([op.x])
            elif comes_quantised(op.x):
                op.x.buffer.is_quantised = True
            else:
                quantised = Buffer(op.count, _num_rows(op.x), op.x.width, halves, is_quantised=True)
                settled.append(replace(op, x=Span.of(quantised)))
                op = Quantise(op.count, op.x, quantised)
                _want_values(op.reads)
        elif isinstance(op, TakeRows):
            if op.out.is_quantised:
                op.x.buffer.is_quantised = True
            if op.out.has_values:
                _want_values([op.x])
        settled.append(op)
    settled.reverse()
    return settled


def lifetimes(ops: Sequence[Op]) -> dict[Buffer, tuple[int, int]]:
    """The first and the last op that touch each buffer, in the order of the first."""
    result: dict[Buffer, tuple[int, int]] = {}
    for index, op in enumerate(ops):
        owners = [span.owner for span in (*_inputs(op), *op.updates)]
        if _writes_whole(op):
            owners.append(op.out)
        for owner in owners:
            if isinstance(owner, Buffer):
                result[owner] = (result.get(owner, (index,))[0], index)
    return result


def _inputs(op: Op) -> list[Span]:
    """All that an op reads, in whichever form."""
    return [*op.reads, op.x] if isinstance(op, Linear | GatedLinear | TakeRows) else [*op.reads]


def _writes_whole(op: Op) -> bool:
    return hasattr(op, "out")


def _num_rows(span: Span) -> int:
    return span.owner.num_rows if isinstance(span.owner, Buffer) else len(span.owner)


def _want_values(spans: Iterable[Span]) -> None:
    for span in spans:
        if span.buffer is not None:
            span.buffer.has_values = True
