"""Layers of any weights: parts held differently, biases, tables that are heads too."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import KernelConfig, StoredKind, StoredMatrix
from kernels.gpu import linear, quantised_embedding
from kernels.gpu.dense_linear import DenseMatrix
from kernels.gpu.packed_weight import CodeFormat, PackedMatrix
from kernels.gpu.result_buffers import ResultBuffers
from kernels.gpu.variant import ModelShapes
from tests.fakes.gpu_tensors import assert_close, assert_launched_as_compiled, overhear
from tests.fakes.stored_weights import random_stored

WEIGHTS = ("auto", "int8", "fp8", "bfloat16", "float32")


def product(packed: linear.PackedLinear, x: Tensor) -> Tensor:
    out = torch.full((len(x), packed.out_features), torch.nan, dtype=x.dtype, device=x.device)
    packed(x, out, ResultBuffers(x.device).scratch)
    return out


def formats(packed: linear.PackedLinear) -> list[CodeFormat | None]:
    return [getattr(matrix, "format", None) for matrix in packed.matrices]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_rows", [3, 65])
def test_parts_of_different_kinds_and_a_bias(
    device, randn, reference, batch_invariant, num_rows
) -> None:
    config = KernelConfig(batch_invariant=batch_invariant)
    first, first_floats = random_stored(StoredKind.Q4_1, 32, 96)
    second, second_floats = random_stored(StoredKind.Q4_1, 17, 96, seed=1, is_reordered=True)
    third, third_floats = random_stored(StoredKind.Q8_0, 16, 96)
    last, bias = randn(5, 96, dtype=torch.bfloat16), randn(70, dtype=torch.bfloat16)
    packed = linear.pack_linear([first, second, third, last], bias, config, device)
    assert formats(packed) == [CodeFormat.Q4_MINIMUM, CodeFormat.INT8, None]
    floats = [first_floats, second_floats, third_floats]
    weight = torch.cat([*(part.to(device) for part in floats), last.float()])
    x = randn(num_rows, 96, dtype=torch.bfloat16)
    assert_close(product(packed, x), reference.linear(x, (weight, bias)))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("num_rows", [1, 17])
def test_floats_become_what_is_asked_for(device, randn, reference, weights, num_rows) -> None:
    config = KernelConfig(weights=weights)
    weight, bias = randn(33, 96), randn(33)
    packed = linear.pack_linear([weight[:20], weight[20:]], bias, config, device)
    expected = {"int8": CodeFormat.INT8, "fp8": CodeFormat.FP8}.get(weights)
    assert formats(packed) == [expected]
    x = randn(num_rows, 96, dtype=linear.activation_dtype(config))
    actual = product(packed, x)
    exact = reference.linear(x, (weight, bias)).double()
    magnitudes = x.double().abs() @ weight.double().abs().T
    # A weight's rounding, and the result's.
    tolerance = {"fp8": 2**-4, "float32": 1e-6}.get(weights, 2**-6)
    assert torch.all((actual - exact).abs() <= tolerance * magnitudes)


def test_columns_that_are_no_whole_groups_stay_dense(device, randn) -> None:
    for weights in ("int8", "fp8"):
        packed = linear.pack_linear([randn(8, 40)], None, KernelConfig(weights=weights), device)
        assert formats(packed) == [None]


def test_stored_floats_and_decoded_ones_are_read_in_order(device, randn) -> None:
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    order = np.array([5, 0, 3, 1, 2, 4])
    for kind, dtype in ((StoredKind.F16, torch.float16), (StoredKind.BF16, torch.bfloat16)):
        stored = StoredMatrix(kind, values.to(dtype).view(torch.uint8).numpy(), 8, order)
        (matrix,) = linear.pack_linear([stored], None, KernelConfig(), device).matrices
        assert torch.equal(matrix.weight.cpu(), values.to(dtype)[order].bfloat16())
    codes = np.arange(48, dtype=np.uint8).reshape(6, 8)
    decoded = StoredMatrix(StoredKind.F32, codes, 8, order, lambda rows: rows * np.float32(0.5))
    (matrix,) = linear.pack_linear([decoded], None, KernelConfig(), device).matrices
    assert torch.equal(matrix.weight.cpu().float(), torch.from_numpy(codes)[order] * 0.5)


def test_stored_and_rounded_int8_become_one_matrix(device, randn, reference) -> None:
    stored, floats = random_stored(StoredKind.Q8_0, 16, 96)
    config = KernelConfig(weights="int8")
    packed = linear.pack_linear([stored, floats.to(device)], None, config, device)
    assert formats(packed) == [CodeFormat.INT8]
    x = randn(3, 96, dtype=torch.bfloat16)
    actual = product(packed, x)
    assert_close(actual[:, :16], reference.linear(x, (floats.to(device), None)))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_a_table_is_a_head_in_the_same_memory(
    device, randn, reference, weights, index_dtype
) -> None:
    config = KernelConfig(weights=weights)
    dtype = linear.activation_dtype(config)
    part = randn(45, 96)
    if weights == "auto":
        part, _ = random_stored(StoredKind.Q4_0, 45, 96)
    table = linear.pack_embedding(part, config, device)
    ids = torch.tensor([44, 0, 7, 7], device=device)
    rows = torch.full((4, 96), torch.nan, dtype=dtype, device=device)
    table(ids.to(index_dtype), rows)
    head = linear.tied_head(table, config)
    assert head.matrices == (table.matrix,)
    # Rows of the identity pick columns of the head's weight: the table again.
    out = product(head, torch.eye(96, dtype=dtype, device=device))
    assert_close(rows, out.T[ids])


@pytest.mark.parametrize("weights", ["auto", "int8", "fp8", "bfloat16"])
def test_ids_outside_a_table_give_zeros(device, randn, weights) -> None:
    part = randn(45, 96)
    if weights == "auto":
        part, _ = random_stored(StoredKind.Q4_0, 45, 96)
    table = linear.pack_embedding(part, KernelConfig(weights=weights), device)
    out = randn(4, 96, dtype=torch.bfloat16)
    table(torch.tensor([-1, 45, 5, 2**40], device=device), out)
    assert not out[[0, 1, 3]].any() and out[2].any()
    table(torch.tensor([], dtype=torch.int64, device=device), out[:0])


@pytest.mark.parametrize("code_format", CodeFormat)
def test_the_look_up_that_is_compiled_ahead_is_what_is_launched(
    monkeypatch, device, code_format
) -> None:
    launches = overhear(monkeypatch, quantised_embedding, "_look_up_kernel")
    matrix = PackedMatrix(
        code_format,
        48,
        256,
        torch.zeros(2, 128, 32, dtype=torch.int32),
        torch.zeros(2, 8, 128, dtype=torch.float32 if code_format == "fp8" else torch.int32),
        torch.zeros(128),
    )
    out = torch.zeros(3, 256, dtype=torch.bfloat16)
    for dtype in (torch.int32, torch.int64):
        quantised_embedding.look_up(torch.zeros(3, dtype=dtype), matrix, out)
    forms = quantised_embedding.variants(ModelShapes(256, 9, 3, 64, 1536, 100))
    own = [form for form in forms if form.constexprs["FORMAT"] == code_format]
    for launched, variant in zip(launches.seen, own, strict=True):
        assert_launched_as_compiled(launched, variant)


def test_dense_weights_are_kept_in_the_type_of_activations(device, randn) -> None:
    for weights, dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):
        config = KernelConfig(weights=weights)
        packed = linear.pack_linear([randn(8, 40)], None, config, device)
        (matrix,) = packed.matrices
        assert isinstance(matrix, DenseMatrix) and matrix.weight.dtype == dtype
        assert packed.num_bytes == 8 * 40 * dtype.itemsize
