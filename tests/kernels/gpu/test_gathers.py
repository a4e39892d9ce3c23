"""Rows by their index: any type and width, ids outside the table, strided rows."""

import pytest
import torch

from kernels.gpu import gathers
from kernels.gpu.variant import ModelShapes
from tests.fakes.gpu_tensors import assert_launched_as_compiled, overhear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 33, 576, 2050])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_embedding_and_take_rows(device, randn, dtype, width, index_dtype) -> None:
    table = randn(19, width, dtype=dtype)
    ids = torch.tensor([18, 0, 0, 7], device=device)
    for gather in (
        lambda ids, out: gathers.embedding(ids, table, out),
        lambda ids, out: gathers.take_rows(table, ids, out),
    ):
        out = randn(4, width, dtype=dtype)
        gather(ids.to(index_dtype), out)
        assert torch.equal(out, table[ids])


def test_ids_outside_the_table_give_zeros(device, randn) -> None:
    table, out = randn(19, 33), randn(4, 33)
    gathers.embedding(torch.tensor([-1, 19, 5, 2**40], device=device), table, out)
    assert torch.equal(out[2], table[5])
    assert not out[[0, 1, 3]].any()


def test_a_part_of_a_wider_table_and_no_rows_at_all(device, randn) -> None:
    table, out = randn(7, 64)[1:, 8:48], randn(3, 64)[:, 16:56]
    ids = torch.tensor([5, 0, 3], device=device)
    gathers.take_rows(table, ids, out)
    assert torch.equal(out, table[ids])
    gathers.take_rows(table, ids[:0], out[:0])


@pytest.mark.parametrize(("width", "dtype"), [(576, torch.bfloat16), (40, torch.float32)])
def test_what_is_compiled_ahead_is_what_is_launched(
    monkeypatch, device, randn, width, dtype
) -> None:
    launches = overhear(monkeypatch, gathers, "_gather_kernel")
    ids = torch.tensor([5, 0, 3], device=device)
    for indices in (ids.int(), ids):
        gathers.embedding(indices, randn(7, width, dtype=dtype), randn(3, width, dtype=dtype))
    shapes = ModelShapes(width, 9, 3, 64, 1536, 100, dtype=dtype)
    for launched, variant in zip(launches.seen, gathers.variants(shapes), strict=True):
        assert_launched_as_compiled(launched, variant)
