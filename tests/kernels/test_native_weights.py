"""Packing of weights: every stored kind against its dequantised values, groups, the disk."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kernels import StoredKind, StoredMatrix
from kernels.cpu.library import load, runnable
from kernels.cpu.native_weights import POLICIES, WeightPacker
from kernels.cpu.packed_weight import Format, PackedWeight
from tests.fakes.tiny_gguf import quantise

pytestmark = pytest.mark.skipif(not runnable(), reason="there is no library")
KIND = {kind: GGMLQuantizationType[kind.name] for kind in StoredKind}
FLOATS = {StoredKind.F32, StoredKind.F16, StoredKind.BF16}


@pytest.fixture(params=runnable())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load(request.param)


@pytest.fixture
def best() -> ctypes.CDLL:
    return load(runnable()[-1])


def stored(kind: StoredKind, rows: int, columns: int = 512, seed: int = 0) -> StoredMatrix:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return StoredMatrix(kind, quantise(values, KIND[kind]).view(np.uint8), columns)


def values_of(part: StoredMatrix) -> np.ndarray:
    rows = part.data if part.row_order is None else part.data[part.row_order]
    return part.decode(rows) if part.decode else dequantize(rows, KIND[part.kind])


def unpack(library: ctypes.CDLL, weight: PackedWeight) -> np.ndarray:
    result = np.empty((weight.rows, weight.columns), np.float32)
    for first, matrix in weight.structures():
        library.tl_unpack(ctypes.byref(matrix), 0, matrix.rows, result[first:].ctypes.data)
    return result


def assert_close(packed: np.ndarray, values: np.ndarray, target: Format) -> None:
    if target in (Format.Q4, Format.F32):
        assert np.array_equal(packed, values)
    elif target == Format.Q4_WIDE:
        np.testing.assert_allclose(packed, values, rtol=1e-5, atol=1e-6)
    elif target == Format.BF16:
        expected = torch.from_numpy(np.array(values)).bfloat16().float().numpy()
        assert np.array_equal(packed, expected)
    else:
        # Half a step of int8, and what float16 rounds of its scale.
        groups = np.abs(values).reshape(len(values), -1, 32).max(-1)
        errors = np.abs(packed - values).reshape(len(values), -1, 32).max(-1)
        assert (errors <= groups * (0.51 / 127 + 2**-11)).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [1, 16, 37, 1100])
def test_every_kind_is_packed_as_what_the_file_says(
    library: ctypes.CDLL, policy: str, rows: int
) -> None:
    packer = WeightPacker(library, policy, num_threads=2)
    assert packer.stored_kinds >= FLOATS
    for kind in packer.stored_kinds:
        part = stored(kind, rows)
        weight = packer.pack([part])
        (matrix,) = weight.matrices
        assert matrix.format == POLICIES[policy][kind]
        assert matrix.data.nbytes == packer.packed_bytes(kind, rows, 512)
        assert matrix.data.ctypes.data % 64 == 0
        packed = unpack(library, weight)
        if kind == StoredKind.Q8_0:
            assert np.array_equal(packed, values_of(part))
        else:
            assert_close(packed, values_of(part), matrix.format)


@pytest.mark.parametrize("kind", StoredKind)
def test_rows_in_another_order_are_put_right(best: ctypes.CDLL, kind: StoredKind) -> None:
    packer = WeightPacker(best, "auto", num_threads=1)
    part = stored(kind, 1200)
    order = np.random.default_rng(1).permutation(1200)
    permuted = StoredMatrix(kind, part.data, part.columns, order)
    straight = StoredMatrix(kind, np.ascontiguousarray(part.data[order]), part.columns)
    weights = [packer.pack([part]) for part in (permuted, straight)]
    assert np.array_equal(weights[0].matrices[0].data, weights[1].matrices[0].data)


def test_kinds_that_the_library_does_not_know_are_decoded_on_the_way(best: ctypes.CDLL) -> None:
    packer = WeightPacker(best, "auto", num_threads=2)
    kind = GGMLQuantizationType.Q6_K
    data = quantise(np.zeros((1500, 512), np.float32), kind)
    order = np.random.default_rng(1).permutation(1500)
    sizes = []

    def decode(rows: np.ndarray) -> np.ndarray:
        sizes.append(len(rows))
        return dequantize(rows, kind)

    part = StoredMatrix(StoredKind.F32, data, 512, order, decode)
    packed = unpack(best, packer.pack([part]))
    assert len(sizes) > 1 and sum(sizes) == 1500, "in pieces, so that little memory is taken"
    assert_close(packed, values_of(part), Format.Q8)


def test_parts_of_one_format_whose_panels_are_full_share_a_matrix(best: ctypes.CDLL) -> None:
    packer = WeightPacker(best, "auto", num_threads=2)

    def formats(*parts: tuple[StoredKind, int]) -> list[tuple[Format, int]]:
        matrices = [stored(kind, rows, seed=i) for i, (kind, rows) in enumerate(parts)]
        bias = torch.randn(sum(rows for _, rows in parts))
        weight = packer.pack(matrices, bias)
        expected = np.concatenate([values_of(part) for part in matrices])
        assert np.abs(unpack(best, weight) - expected).max() < 0.03
        for first, matrix in weight.structures():
            given = (ctypes.c_float * matrix.rows).from_address(matrix.bias)
            assert list(given) == bias[first : first + matrix.rows].tolist()
        return [(matrix.format, matrix.rows) for matrix in weight.matrices]

    kinds = StoredKind
    assert formats((kinds.Q4_1, 32), (kinds.Q4_0, 16), (kinds.Q4_1, 7)) == [(Format.Q4, 55)]
    assert formats((kinds.Q4_1, 7), (kinds.Q4_1, 32)) == [(Format.Q4, 7), (Format.Q4, 32)]
    assert formats((kinds.Q8_0, 16), (kinds.F16, 16)) == [(Format.Q8, 32)]
    # As in a Q4_K_M file, whose v is of a better type than q and k.
    assert formats((kinds.Q4_K, 64), (kinds.Q4_K, 16), (kinds.F32, 16)) == [
        (Format.Q4_WIDE, 80),
        (Format.Q8, 16),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_tensors_are_packed_like_the_same_rows_of_a_file(
    best: ctypes.CDLL, dtype: torch.dtype
) -> None:
    packer = WeightPacker(best, "float32", num_threads=1)
    tensor = torch.randn(20, 64).to(dtype)
    assert np.array_equal(unpack(best, packer.pack([tensor])), tensor.float().numpy())
    assert np.array_equal(unpack(best, packer.pack([tensor.T])), tensor.T.float().numpy())


def test_threads_do_not_show(best: ctypes.CDLL) -> None:
    part = stored(StoredKind.F32, 3000)
    packed = [
        WeightPacker(best, "auto", threads).pack([part]).matrices[0].data for threads in (1, 3)
    ]
    assert np.array_equal(*packed)


def test_what_is_written_by_one_instruction_set_is_read_by_all() -> None:
    for policy in POLICIES:
        packers = [WeightPacker(load(name), policy, 1) for name in runnable()]
        assert len({packer.layout for packer in packers}) == 1
    assert len({WeightPacker(packers[0].library, name, 1).layout for name in POLICIES}) == 4


def test_a_second_load_packs_nothing(
    best: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    parts = [stored(StoredKind.Q4_1, 64, seed=seed) for seed in range(3)]
    # Alike at both ends and in the middle, and yet another one.
    twin = parts[0].data.copy()
    twin[5] = parts[1].data[5]
    parts.append(StoredMatrix(StoredKind.Q4_1, twin, parts[0].columns))
    lines: list[str] = []

    def run() -> list[np.ndarray]:
        packer = WeightPacker(best, "auto", num_threads=2)
        with packer.kept_on_disk(model, "1", 10_000, lines.append, smallest_file=0):
            weights = [packer.pack([part]) for part in parts]
        return [unpack(best, weight) for weight in weights]

    first = run()
    for packed, part in zip(first, parts, strict=True):
        assert np.array_equal(packed, values_of(part))
    monkeypatch.setattr(WeightPacker, "_fill", lambda *arguments: pytest.fail("it was packed"))
    assert all(np.array_equal(*pair) for pair in zip(run(), first, strict=True))
    assert len(lines) == 1 and "are kept in" in lines[0]


def test_what_is_packed_by_copying_is_not_kept(best: ctypes.CDLL, tmp_path: Path) -> None:
    packer = WeightPacker(best, "float32", num_threads=1)
    with packer.kept_on_disk(tmp_path / "m", "1", 10_000, print, smallest_file=0):
        packer.pack([stored(StoredKind.F32, 16)])
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_fails_leaves_no_file(best: ctypes.CDLL, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    packer = WeightPacker(best, "auto", num_threads=2)
    with (
        pytest.raises(ZeroDivisionError),
        packer.kept_on_disk(model, "1", 10_000, print, smallest_file=0),
    ):
        packer.pack([stored(StoredKind.Q4_0, 16)])
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == [model]
    packer.pack([stored(StoredKind.Q4_0, 16)])
