"""The native library's row ops, every build against plain arithmetic.

Builds give the same bits, and so does a row alone, in any batch and by any thread.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import Rows, runnable
from kernels.reference import ReferenceKernels
from tests.fakes.native_ops import (
    NativeOps,
    QuantisedRows,
    matrix,
    plain_rows,
)

BUILDS = runnable()
WIDTHS = [1, 15, 16, 31, 32, 33, 64, 100, 576]
NUM_ROWS = [1, 5, 150]
EPS = 1e-5
TOLERANCE = 2e-6
TOKENS = 0
F32 = 5
GROUP = 32

# What an op adds to a program, given where its results go.
Op = Callable[[Any, int, Rows], None]


@pytest.fixture(params=BUILDS)
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    with NativeOps(request.param, num_threads=2) as opened:
        yield opened


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_op(x: Tensor, weight: Tensor) -> Op:
    def add(library: Any, program: int, out: Rows) -> None:
        library.tl_add_rms_norm(
            *(program, TOKENS, x.data_ptr(), x.stride(0), len(weight)),
            *(weight.data_ptr(), EPS, out),
        )

    return add


def add_norm_op(x: Tensor, residual: Tensor, weight: Tensor) -> Op:
    def add(library: Any, program: int, out: Rows) -> None:
        library.tl_add_add_rms_norm(
            *(program, TOKENS, x.data_ptr(), x.stride(0), residual.data_ptr()),
            *(residual.stride(0), len(weight), weight.data_ptr(), EPS, out),
        )

    return add


def silu_op(gate_up: Tensor) -> Op:
    def add(library: Any, program: int, out: Rows) -> None:
        library.tl_add_silu_and_mul(
            program, TOKENS, gate_up.data_ptr(), gate_up.stride(0), gate_up.shape[1] // 2, out
        )

    return add


def quantise_op(x: Tensor) -> Op:
    def add(library: Any, program: int, out: Rows) -> None:
        library.tl_add_quantise(program, TOKENS, x.data_ptr(), x.stride(0), x.shape[1], out)

    return add


def in_all_forms(
    ops: NativeOps, op: Op, num_rows: int, width: int, halves: int
) -> tuple[Tensor, QuantisedRows]:
    values = torch.full((num_rows, width + 3), 7.0)
    quantised = QuantisedRows(num_rows, width, halves)
    ops.run(lambda *program: op(*program, quantised.rows(values)), num_rows)
    assert (values[:, width:] == 7.0).all()
    return values[:, :width].clone(), quantised


def quantised_plainly(x: Tensor, halves: int) -> QuantisedRows:
    """What quantise.h says."""
    num_rows, width = x.shape
    expected = QuantisedRows(num_rows, width, halves)
    groups = torch.nn.functional.pad(x, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    most = groups.abs().amax(-1)
    is_small = most < 1e-30
    most_q = torch.tensor(127.0 if halves == 1 else 32512.0)
    inverse = torch.where(is_small, 0.0, most_q / most)
    rounded = torch.round(groups * inverse[..., None])
    parts = [rounded.flatten(1)]
    if halves == 2:
        high = torch.round(parts[0] / 255)
        parts = [high, parts[0] - 255 * high]
    expected.quantised[:] = torch.stack(parts, 1).to(torch.int8)
    expected.scales[:] = torch.where(is_small, 0.0, most / most_q)
    expected.sums[:] = expected.scales * rounded.sum(-1)
    return expected


def assert_same(actual: QuantisedRows, expected: QuantisedRows) -> None:
    assert torch.equal(actual.quantised, expected.quantised)
    assert torch.equal(actual.scales, expected.scales)
    assert torch.equal(actual.sums, expected.sums)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    most = max(1.0, float(expected.abs().max()))
    assert (actual.double() - expected.double()).abs().max() <= TOLERANCE * most


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_norms_follow_the_reference(ops, num_rows, width, halves) -> None:
    x, residual, weight = randn(num_rows, width), randn(num_rows, width, seed=1), randn(width)
    values, quantised = in_all_forms(ops, norm_op(x, weight), num_rows, width, halves)
    assert_close(values, ReferenceKernels().rms_norm(x, weight, EPS))
    assert_same(quantised, quantised_plainly(values, halves))
    expected_residual = residual + x
    expected = ReferenceKernels().rms_norm(expected_residual, weight, EPS)
    values, quantised = in_all_forms(ops, add_norm_op(x, residual, weight), num_rows, width, halves)
    assert torch.equal(residual, expected_residual)
    assert_close(values, expected)
    assert_same(quantised, quantised_plainly(values, halves))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_silu_and_mul_follows_the_reference(ops, num_rows, width, halves) -> None:
    gate_up = randn(num_rows, 2 * width) * 4
    gate_up[0, 0], gate_up[-1, width - 1] = -1000.0, 1000.0
    values, quantised = in_all_forms(ops, silu_op(gate_up), num_rows, width, halves)
    assert_close(values, ReferenceKernels().silu_and_mul(gate_up))
    assert_same(quantised, quantised_plainly(values, halves))


@pytest.mark.parametrize("width", WIDTHS)
def test_quantised_groups_have_a_scale_each(ops, width, halves) -> None:
    x = randn(9, width) * torch.logspace(-28, 30, 9)[:, None]
    x[3], x[4] = 0.0, 1e-35
    quantised = QuantisedRows(len(x), width, halves)
    ops.run(lambda *program: quantise_op(x)(*program, quantised.rows()), len(x))
    assert_same(quantised, quantised_plainly(x, halves))
    padded = torch.nn.functional.pad(x, (0, -width % GROUP))
    rounding = quantised.scales.repeat_interleave(GROUP, dim=1) * 0.501 + 1e-30
    assert ((quantised.dequantised() - padded).abs() <= rounding).all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_group_alone(ops, wrong, halves) -> None:
    x = randn(4, 100)
    clean = QuantisedRows(4, 100, halves)
    ops.run(lambda *program: quantise_op(x)(*program, clean.rows()), 4)
    x[2, 40] = wrong
    spoilt = QuantisedRows(4, 100, halves)
    ops.run(lambda *program: quantise_op(x)(*program, spoilt.rows()), 4)
    assert spoilt.scales[2, 1].isnan()
    assert spoilt.sums[2, 1].isnan()
    spoilt.scales[2, 1], spoilt.sums[2, 1] = clean.scales[2, 1], clean.sums[2, 1]
    spoilt.quantised[2, :, 32:64] = clean.quantised[2, :, 32:64]
    assert_same(spoilt, clean)


def test_a_row_of_nan_leaves_others_as_they_are(ops, halves) -> None:
    x, weight = randn(3, 70), randn(70)
    gate_up = randn(3, 140)
    for data, op in [(x, norm_op(x, weight)), (gate_up, silu_op(gate_up))]:
        clean, clean_quantised = in_all_forms(ops, op, 3, 70, halves)
        data[1, 3] = torch.nan
        values, quantised = in_all_forms(ops, op, 3, 70, halves)
        assert values[1, 3].isnan()
        assert quantised.scales[1, 0].isnan()
        for row in (0, 2):
            assert torch.equal(values[row], clean[row])
            assert torch.equal(quantised.scales[row], clean_quantised.scales[row])


@pytest.mark.parametrize("num_rows", [1, 3, 100])
def test_rows_are_taken_in_the_forms_that_both_have(ops, num_rows, halves) -> None:
    width = 70
    x = randn(40, width)
    indices = torch.randint(0, 40, (num_rows,), generator=torch.Generator().manual_seed(1)).int()
    _, taken_from = in_all_forms(ops, quantise_op(x), 40, width, halves)
    values, quantised = torch.zeros(num_rows, width), QuantisedRows(num_rows, width, halves)

    def take(source: Rows, out: Rows) -> None:
        def add(library: Any, program: int) -> None:
            library.tl_add_take_rows(program, TOKENS, indices.data_ptr(), source, width, out)

        ops.run(add, num_rows)

    take(taken_from.rows(x), quantised.rows(values))
    assert torch.equal(values, x[indices])
    assert torch.equal(quantised.quantised, taken_from.quantised[indices])
    assert torch.equal(quantised.scales, taken_from.scales[indices])
    assert torch.equal(quantised.sums, taken_from.sums[indices])
    values.zero_()
    take(plain_rows(x), quantised.rows(values))
    assert torch.equal(values, x[indices])


def test_embedding_looks_rows_up(ops) -> None:
    rows, width = 37, 64
    table = randn(rows, width)
    packed = torch.empty(ops.library.tl_packed_bytes(F32, rows, width), dtype=torch.uint8)
    status = ops.library.tl_pack(
        *(F32, 0, table.data_ptr(), width * 4, None, 0, rows, rows, width, packed.data_ptr())
    )
    assert status == 0
    ids = torch.tensor([36, 0, 0, 7]).int()
    out = torch.zeros(4, width)

    def add(library: Any, program: int) -> None:
        library.tl_add_embedding(
            *(program, TOKENS, ids.data_ptr(), matrix(F32, rows, width, packed, None)),
            plain_rows(out),
        )

    ops.run(add, 4)
    assert torch.equal(out, table[ids])


@pytest.mark.parametrize("width", WIDTHS)
def test_builds_give_the_same_bits_alone_and_together(width, halves) -> None:
    num_rows = 70
    scale = torch.logspace(-12, 12, num_rows)[:, None]
    x, weight = randn(num_rows, width) * scale, randn(width)
    gate_up = randn(num_rows, 2 * width) * 20
    results = []
    for build in BUILDS:
        for num_threads in (1, 2):
            with NativeOps(build, num_threads) as ops:
                for op in [norm_op(x, weight), silu_op(gate_up)]:
                    results.append(in_all_forms(ops, op, num_rows, width, halves))
    for i, (values, quantised) in enumerate(results):
        assert torch.equal(values, results[i % 2][0])
        assert_same(quantised, results[i % 2][1])
    if BUILDS:
        with NativeOps(BUILDS[-1]) as ops:
            for row in (0, 33, 69):
                one = slice(row, row + 1)
                alone, _ = in_all_forms(ops, norm_op(x[one], weight), 1, width, halves)
                assert torch.equal(alone, results[0][0][one])
