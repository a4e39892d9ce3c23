"""Weights and activations for the native library's linear layers, and plain arithmetic on them."""

import ctypes
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from kernels.cpu import library

Q4, Q4_WIDE, Q8, F16, BF16, F32 = range(6)
SOURCE_F32, SOURCE_F16, SOURCE_BF16, SOURCE_Q4_0, SOURCE_Q4_1, SOURCE_Q4_K, SOURCE_Q8_0 = range(7)
BLOCKS = {
    SOURCE_Q4_0: (GGMLQuantizationType.Q4_0, Q4),
    SOURCE_Q4_1: (GGMLQuantizationType.Q4_1, Q4),
    SOURCE_Q4_K: (GGMLQuantizationType.Q4_K, Q4_WIDE),
    SOURCE_Q8_0: (GGMLQuantizationType.Q8_0, Q8),
}
# What a matrix of each format is packed from here.
SOURCES = {
    Q4: SOURCE_Q4_1,
    Q4_WIDE: SOURCE_Q4_K,
    Q8: SOURCE_F32,
    F16: SOURCE_F32,
    BF16: SOURCE_F32,
    F32: SOURCE_F32,
}
FORMATS = list(SOURCES)
QUANTISED = (Q4, Q4_WIDE, Q8)
GROUP = 32


@dataclass(frozen=True)
class Native:
    """One build with a pool of its own."""

    library: ctypes.CDLL
    pool: int

    def run(self, num_rows: int, add: str, *arguments: object) -> None:
        """Runs a program of one op on `num_rows` rows."""
        program = self.library.tl_program_new()
        getattr(self.library, add)(program, 0, *arguments)
        self.library.tl_program_run(program, self.pool, (ctypes.c_int64 * 4)(num_rows))
        self.library.tl_program_delete(program)


def open_native(name: str, num_threads: int = 2) -> Native:
    native = library.load(name)
    return Native(native, native.tl_pool_new(num_threads))


def address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


@dataclass(frozen=True)
class Weight:
    """A packed matrix, and all that it points at."""

    format: int
    rows: int
    columns: int
    data: np.ndarray
    bias: np.ndarray | None = None

    @property
    def matrix(self) -> library.Matrix:
        return library.Matrix(
            self.format, self.rows, self.columns, address(self.data), address(self.bias)
        )

    def floats(self, native: Native) -> np.ndarray:
        out = np.empty((self.rows, self.columns), np.float32)
        native.library.tl_unpack(self.matrix, 0, self.rows, address(out))
        return out


def aligned(num_bytes: int) -> np.ndarray:
    room = np.full(num_bytes + 64, 0xAA, np.uint8)
    return room[-room.ctypes.data % 64 :][:num_bytes]


def pack(
    native: Native,
    format_code: int,
    source_kind: int,
    source: np.ndarray,
    columns: int,
    order: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> Weight:
    rows = len(source) if order is None else len(order)
    data = aligned(native.library.tl_packed_bytes(format_code, rows, columns))
    result = native.library.tl_pack(
        *(format_code, source_kind, address(source), source.strides[0], address(order)),
        *(0, rows, rows, columns, address(data)),
    )
    assert result == 0
    return Weight(format_code, rows, columns, data, bias)


def random_blocks(
    random: np.random.Generator, source_kind: int, rows: int, columns: int
) -> np.ndarray:
    """Rows as a GGUF file holds them, uint8."""
    if source_kind == SOURCE_Q4_K:
        blocks = random.integers(0, 256, (rows, columns // 256, 144)).astype(np.uint8)
        scales = random.uniform(1e-4, 0.01, (rows, columns // 256, 2)).astype(np.float16)
        blocks[..., :4] = scales.view(np.uint8)
        return blocks.reshape(rows, -1)
    values = random.standard_normal((rows, columns), np.float32)
    return quantize(values, BLOCKS[source_kind][0])


def random_weight(
    native: Native,
    format_code: int,
    rows: int,
    columns: int,
    bias: np.ndarray | None = None,
    seed: int = 0,
) -> Weight:
    random = np.random.default_rng(seed)
    source_kind = SOURCES[format_code]
    if source_kind == SOURCE_F32:
        source = random.standard_normal((rows, columns), np.float32)
    else:
        source = random_blocks(random, source_kind, rows, columns)
    return pack(native, format_code, source_kind, source, columns, bias=bias)


def columns_for(format_code: int, columns: int) -> int:
    """As many, up to what the format's blocks need; floats get a ragged end."""
    if SOURCES[format_code] == SOURCE_Q4_K:
        return -(-columns // 256) * 256
    return columns if SOURCES[format_code] != SOURCE_F32 else columns - 3


@dataclass(frozen=True)
class Activations:
    """Rows in every form that TlRows has."""

    values: np.ndarray
    quantised: np.ndarray  # [rows, halves, columns]
    scales: np.ndarray
    sums: np.ndarray

    @property
    def rows(self) -> library.Rows:
        return library.Rows(
            address(self.values),
            self.values.strides[0] // 4,
            *map(address, (self.quantised, self.scales, self.sums)),
            self.quantised.shape[1],
        )

    def part(self, rows: slice) -> "Activations":
        return Activations(
            self.values[rows], self.quantised[rows], self.scales[rows], self.sums[rows]
        )

    def floats(self, is_quantised: bool) -> np.ndarray:
        """What a linear layer reads, in float64."""
        if not is_quantised:
            return self.values.astype(np.float64)
        num_rows, columns = self.values.shape
        halves = self.quantised.astype(np.float64).swapaxes(0, 1)
        whole = halves[0] if len(halves) == 1 else 255 * halves[0] + halves[1]
        groups = whole.reshape(num_rows, -1, GROUP)
        return (groups * self.scales[..., None]).reshape(num_rows, -1)[:, :columns]


def most_quantised(halves: int) -> int:
    return 127 if halves == 1 else 32512


def quantised(values: np.ndarray, halves: int) -> Activations:
    """As api.h says of TlRows."""
    num_rows, columns = values.shape
    padded = np.zeros((num_rows, -(-columns // GROUP), GROUP), np.float32)
    padded.reshape(num_rows, -1)[:, :columns] = values
    most = np.abs(padded).max(-1)
    most_q = np.float32(most_quantised(halves))
    scales = most / most_q
    inverse = np.divide(most_q, most, out=np.zeros_like(most), where=most > 0)
    steps = np.rint(padded * inverse[..., None])
    sums = scales * steps.sum(-1, dtype=np.float32)
    steps = steps.reshape(num_rows, -1)
    parts = [steps]
    if halves == 2:
        high = np.rint(steps / 255)
        parts = [high, steps - 255 * high]
    return Activations(values, np.stack(parts, 1).astype(np.int8), scales, sums)


def random_activations(num_rows: int, columns: int, halves: int) -> Activations:
    random = np.random.default_rng(1)
    return quantised(random.standard_normal((num_rows, columns), np.float32), halves)


def empty_activations(num_rows: int, columns: int, halves: int) -> Activations:
    groups = columns // GROUP
    return Activations(
        np.empty((num_rows, columns), np.float32),
        np.empty((num_rows, halves, columns), np.int8),
        np.empty((num_rows, groups), np.float32),
        np.empty((num_rows, groups), np.float32),
    )


def linear(native: Native, weight: Weight, x: Activations) -> np.ndarray:
    out = np.full((len(x.values), weight.rows), np.nan, np.float32)
    native.run(len(out), "tl_add_linear", x.rows, weight.matrix, 0, address(out), weight.rows)
    return out


def gated_linear(native: Native, weight: Weight, x: Activations) -> Activations:
    out = empty_activations(len(x.values), weight.rows // 2, x.quantised.shape[1])
    native.run(len(out.values), "tl_add_gated_linear", x.rows, weight.matrix, out.rows)
    return out


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.tobytes() == right.tobytes()


def assert_close(actual: np.ndarray, weight: np.ndarray, x: np.ndarray) -> None:
    """`actual` is x · weightᵀ up to the rounding of sums in float32."""
    expected = x @ weight.T.astype(np.float64)
    magnitudes = np.abs(x) @ np.abs(weight.T.astype(np.float64))
    assert np.all(np.abs(actual - expected) <= 4e-6 * magnitudes + 1e-30)
