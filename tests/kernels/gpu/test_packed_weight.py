"""Weights as kernels read them: blocks of files kept exactly, floats rounded once."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import KernelConfig, StoredKind
from kernels.gpu import linear
from kernels.gpu.packed_weight import PackedMatrix, packed_bytes
from tests.fakes.stored_weights import BLOCK_KINDS, columns_for, random_stored

INT8, FP8 = KernelConfig(weights="int8"), KernelConfig(weights="fp8")


def unpacked(part: object, config: KernelConfig, device: torch.device, rows: int) -> Tensor:
    """All rows of a packed table, in float32."""
    table = linear.pack_embedding(part, config, device)
    assert isinstance(table.matrix, PackedMatrix)
    out = torch.empty(rows, table.width, device=device)
    table(torch.arange(rows, device=device), out)
    return out.cpu()


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("rows", "is_reordered"), [(1, False), (7, True)])
def test_blocks_of_gguf_files_are_kept_exactly(device, kind, rows, is_reordered) -> None:
    stored, floats = random_stored(kind, rows, columns_for(kind, 352), is_reordered=is_reordered)
    # A device multiplies and adds with one rounding, numpy with two.
    torch.testing.assert_close(
        unpacked(stored, KernelConfig(), device, rows), floats, rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("columns", [32, 160])
def test_int8_is_the_nearest_multiple_of_a_float16_scale(device, columns) -> None:
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(0))
    weight[3, :32] = 0
    groups = weight.unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    steps = (groups / torch.where(scales == 0, 1, scales)).round().clamp(-127, 127)
    assert torch.equal(unpacked(weight, INT8, device, 7), (steps * scales).flatten(1))


def test_fp8_has_three_bits_after_the_first_and_a_scale_of_each_row(device) -> None:
    weight = torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-3, 3, 9)[:, None]
    weight[5] = 0
    weight[6] *= -1
    off = (unpacked(weight, FP8, device, 9) - weight).abs()
    smallest = weight.abs().amax(1, keepdim=True) / 448 * 2**-10
    assert torch.all(off <= torch.maximum(weight.abs() * 2**-4, smallest) * 1.001)


@pytest.mark.parametrize(("config", "spoilt"), [(INT8, 32), (FP8, 96)])
def test_a_weight_that_is_not_finite_spoils_its_scale_alone(device, config, spoilt) -> None:
    weight = torch.ones(3, 96)
    weight[1, 40] = torch.inf
    with np.errstate(invalid="ignore"):
        is_nan = unpacked(weight, config, device, 3).isnan()
    assert is_nan[1, 32:64].all() and is_nan.sum() == spoilt


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_matrix_takes_the_memory_that_was_promised(device, kind) -> None:
    columns = columns_for(kind, 416)
    stored, _ = random_stored(kind, 130, columns)
    packed = linear.pack_linear([stored], None, KernelConfig(), device)
    assert packed.num_bytes == linear.packed_bytes(kind, 130, columns)
    # A file takes as much but for padding, and a byte for each scale of Q4_K.
    assert (
        linear.packed_bytes(kind, 4096, 4096)
        <= 1.03 * 4096 * stored.data.nbytes / (130 * columns) * 4096
    )


def test_fp8_takes_a_byte_a_weight_and_a_scale_a_row(device) -> None:
    packed = linear.pack_linear([torch.ones(128, 256)], None, FP8, device)
    (matrix,) = packed.matrices
    assert packed.num_bytes == packed_bytes(matrix.format, 128, 256) == 128 * (256 + 4)


def test_the_kinds_that_are_kept_depend_on_the_weights_asked_for() -> None:
    assert linear.stored_kinds(KernelConfig()) == set(BLOCK_KINDS)
    assert linear.stored_kinds(INT8) == {StoredKind.Q8_0}
    for weights in ("fp8", "bfloat16", "float32"):
        assert not linear.stored_kinds(KernelConfig(weights=weights))
