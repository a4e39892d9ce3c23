"""The native backend: each op against the reference, and captured ops against single ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import KernelConfig, Kernels, select_kernels
from kernels.cpu.library import runnable
from kernels.cpu.native_fusion import fuse, lifetimes, settle_forms
from kernels.cpu.native_ops import (
    GatedLinear,
    Linear,
    Quantise,
    RmsNorm,
    SiluAndMul,
    TakeRows,
)
from kernels.cpu.native_program import NativeProgram, Recorder
from kernels.reference import ReferenceKernels

EPS = 1e-5
BLOCK_SIZE = 16
HIDDEN, INTERMEDIATE = 96, 160
HEADS, KV_HEADS, DIM = 4, 2, 16
MAX_TOKENS = 40

pytestmark = pytest.mark.skipif(not runnable(), reason="there is no library")


def native(
    weights: str = "float32",
    activations: str = "auto",
    kv: str = "auto",
    num_threads: int = 2,
) -> Kernels:
    build = runnable()[-1]
    config = KernelConfig(
        weights=weights,
        activations=activations,
        kv=kv,
        implementation=build,
        num_threads=num_threads,
    )
    return select_kernels(torch.device("cpu"), config)


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 3e-6) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    difference = float((actual.double() - expected.double()).abs().max())
    assert difference <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("num_rows", [1, 2, 17, 65])
@pytest.mark.parametrize(("weights", "tolerance"), [("float32", 3e-6), ("int8", 2e-2)])
def test_linear_follows_the_reference(randn, num_rows: int, weights: str, tolerance: float) -> None:
    kernels, reference = native(weights), ReferenceKernels()
    x, bias = randn(num_rows, 70), randn(60)
    parts = [randn(32, 70), randn(28, 70)]
    packed = kernels.pack_linear(parts, bias)
    expected = reference.linear(x, reference.pack_linear(parts, bias))
    assert_close(kernels.linear(x, packed), expected, tolerance)


@pytest.mark.parametrize("num_rows", [1, 5, 33])
def test_ops_on_rows_follow_the_reference(randn, num_rows: int) -> None:
    kernels, reference = native(), ReferenceKernels()
    x, weight, gate_up = randn(num_rows, 33), randn(33), randn(num_rows, 2 * 33)
    assert_close(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    residual = randn(num_rows, 33)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, EPS)
    assert_close(kernels.add_rms_norm(x, residual, weight, EPS), expected)
    assert_close(residual, expected_residual)
    assert_close(kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    indices = torch.arange(num_rows).flip(0)
    assert torch.equal(kernels.take_rows(x, indices), x[indices])
    table, ids = randn(19, 33), torch.tensor([18, 0, 7])
    packed = kernels.pack_embedding(table)
    assert torch.equal(kernels.embedding(ids, packed), table[ids])
    assert_close(kernels.linear(x, kernels.tied_head(packed)), x @ table.T)


@pytest.mark.parametrize(
    ("kv", "tolerance"), [("float32", 3e-6), ("float16", 2e-3), ("int8", 2e-2)]
)
@pytest.mark.parametrize("sliding_window", [0, 7])
@pytest.mark.parametrize("has_norms", [False, True])
def test_what_is_rotated_and_cached_is_attended_to(
    randn, kv: str, tolerance: float, sliding_window: int, has_norms: bool
) -> None:
    seq_lens, num_tokens = torch.tensor([20, 33]), 53
    projected = randn(num_tokens, HEADS + 2 * KV_HEADS, DIM)
    angles = randn(64, DIM // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.cat([torch.arange(int(length)) for length in seq_lens])
    blocks = torch.tensor([[4, 1, 0], [0, 3, 2]])
    rows = torch.tensor([0] * 20 + [1] * 33)
    slots = blocks[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    norms = [randn(DIM), randn(DIM)] if has_norms else [None, None]

    def run(kernels: Kernels) -> Tensor:
        query, key, value = projected.clone().split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        cache = kernels.allocate_kv(2, 5, BLOCK_SIZE, KV_HEADS, DIM)
        assert len(cache) == 2
        rotated = kernels.rope_and_cache(
            query, positions, key, value, positions, table, cache[1], slots, *norms, EPS
        )
        plan = kernels.plan_attention(torch.tensor([0, 20, 53]), seq_lens, blocks, BLOCK_SIZE)
        return kernels.paged_attention(rotated, cache[1], plan, DIM**-0.5, sliding_window)

    assert_close(run(native(kv=kv)), run(ReferenceKernels()), tolerance)


def test_a_cache_takes_what_its_blocks_do() -> None:
    for kv, num_bytes in (("float32", 4), ("float16", 2)):
        kernels = native(kv=kv)
        values = 2 * 3 * BLOCK_SIZE * KV_HEADS * DIM
        assert kernels.kv_block_bytes(3, BLOCK_SIZE, KV_HEADS, DIM) == values * num_bytes
    cache = kernels.allocate_kv(3, 10, BLOCK_SIZE, KV_HEADS, DIM)
    assert cache.memory.numel() == 10 * kernels.kv_block_bytes(3, BLOCK_SIZE, KV_HEADS, DIM)


class Mlp:
    """Norm, gate and up, silu · mul, down, added to a residual, norm; then some of the rows."""

    def __init__(self, kernels: Kernels, randn: Callable[..., Tensor]) -> None:
        self.kernels = kernels
        self.table = kernels.pack_embedding(randn(50, HIDDEN))
        self.norm = randn(HIDDEN)
        self.gate_up = kernels.pack_linear([randn(INTERMEDIATE, HIDDEN) for _ in range(2)])
        self.down = kernels.pack_linear([randn(HIDDEN, INTERMEDIATE) / 10])
        self.head = kernels.pack_linear([randn(30, HIDDEN)])

    def __call__(self, ids: Tensor, kept: Tensor) -> Tensor:
        kernels = self.kernels
        residual = kernels.embedding(ids, self.table)
        normed = kernels.rms_norm(residual, self.norm, EPS)
        for _ in range(2):
            activated = kernels.silu_and_mul(kernels.linear(normed, self.gate_up))
            output = kernels.linear(activated, self.down)
            normed = kernels.add_rms_norm(output, residual, self.norm, EPS)
        return kernels.linear(kernels.take_rows(normed, kept), self.head)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_captured_run_gives_what_its_ops_give_one_by_one(randn, weights: str) -> None:
    kernels = native(weights)
    mlp = Mlp(kernels, randn)
    ids, kept = (torch.zeros(MAX_TOKENS, dtype=torch.int32) for _ in range(2))
    run = kernels.capture(lambda: mlp(ids, kept), [[ids], [kept]])
    assert run is not None
    for num_tokens, num_kept in [(1, 1), (7, 3), (MAX_TOKENS, MAX_TOKENS), (2, 0), (9, 1)]:
        ids[:num_tokens] = torch.randint(50, (num_tokens,), dtype=torch.int32)
        kept[:num_kept] = torch.randint(num_tokens, (num_kept,), dtype=torch.int32)
        run(num_tokens, num_kept)
        if num_kept:
            expected = mlp(ids[:num_tokens], kept[:num_kept])
            assert_close(run.result[:num_kept], expected, 1e-5)


def test_a_captured_run_tells_what_its_ops_took(randn) -> None:
    kernels = native("int8")
    mlp = Mlp(kernels, randn)
    ids, kept = (torch.zeros(MAX_TOKENS, dtype=torch.int32) for _ in range(2))
    run = kernels.capture(lambda: mlp(ids, kept), [[ids], [kept]])
    assert run is not None
    run.set_profiling(True)
    run(4, 2)
    seconds = run.op_seconds()
    assert set(seconds) == {
        *("embedding", "norm", "take rows"),
        f"gated linear {2 * INTERMEDIATE} x {HIDDEN}",
        f"linear {HIDDEN} x {INTERMEDIATE}",
        f"linear 30 x {HIDDEN}",
    }
    assert all(spent > 0 for spent in seconds.values())
    run.set_profiling(True)
    assert sum(run.op_seconds().values()) == 0


def recorded(kernels: Kernels, compute: Callable[[], Tensor], counted: list[list[Tensor]]):
    """The ops of a capture, as they are when they go to the library."""
    recorder = Recorder(1, counted)
    program: NativeProgram = kernels._program(recorder, compute)  # type: ignore[attr-defined]
    return program


def test_neighbours_are_joined_and_only_what_is_read_is_written(randn) -> None:
    kernels = native("int8")
    mlp = Mlp(kernels, randn)
    ids, kept = (torch.zeros(MAX_TOKENS, dtype=torch.int32) for _ in range(2))
    ops = recorded(kernels, lambda: mlp(ids, kept), [[ids], [kept]])._ops
    kinds = [type(op).__name__ for op in ops]
    layer = ["GatedLinear", "Linear", "RmsNorm"]
    assert kinds == ["Embedding", "RmsNorm", *layer, *layer, "TakeRows", "Linear"]
    assert [op.adds for op in ops if isinstance(op, Linear)] == [True, True, False]
    for op in ops:
        if isinstance(op, RmsNorm | GatedLinear | TakeRows):
            assert op.out.is_quantised
            assert not op.out.has_values


def test_what_cannot_be_joined_is_left_alone(randn) -> None:
    kernels = native("int8")
    # Not a multiple of 64 rows, so silu · mul stays an op of its own.
    gate_up = kernels.pack_linear([randn(2 * 40, HIDDEN)])
    x = torch.zeros(3, dtype=torch.int32)
    table = kernels.pack_embedding(randn(9, HIDDEN))

    def compute() -> Tensor:
        embedded = kernels.embedding(x, table)
        return kernels.silu_and_mul(kernels.linear(embedded, gate_up))

    ops = recorded(kernels, compute, [[x]])._ops
    assert [type(op) for op in ops][1:] == [Quantise, Linear, SiluAndMul]


def test_buffers_that_live_at_once_do_not_share_memory(randn) -> None:
    kernels = native("int8")
    mlp = Mlp(kernels, randn)
    ids, kept = (torch.zeros(MAX_TOKENS, dtype=torch.int32) for _ in range(2))
    program = recorded(kernels, lambda: mlp(ids, kept), [[ids], [kept]])
    places = []
    for buffer, (first, last) in lifetimes(program._ops).items():
        begin = buffer.values or buffer.quantised
        places.append((begin, begin + buffer.num_bytes, first, last))
    for index, (begin, end, first, last) in enumerate(places):
        assert begin % 64 == 0
        for other_begin, other_end, other_first, other_last in places[:index]:
            live_at_once = first <= other_last and other_first <= last
            assert not live_at_once or end <= other_begin or other_end <= begin
    total = sum(end - begin for begin, end, _, _ in places)
    assert program._arena.numel() < 0.6 * total, "memory is not used again"


def test_a_result_that_several_read_is_not_joined(randn) -> None:
    kernels = native("float32")
    packed = kernels.pack_linear([randn(64, HIDDEN)])
    ids = torch.zeros(3, dtype=torch.int32)
    table = kernels.pack_embedding(randn(9, HIDDEN))

    def compute() -> Tensor:
        product = kernels.linear(kernels.embedding(ids, table), packed)
        activated = kernels.silu_and_mul(product)
        assert activated.shape == (3, 32)
        return product

    recorder = Recorder(1, [[ids]])
    kernels._recorder = recorder  # type: ignore[attr-defined]
    result = compute()
    kernels._recorder = None  # type: ignore[attr-defined]
    buffer = recorder.buffer(result)
    ops = settle_forms(fuse(recorder.ops, buffer), buffer, recorder.halves)
    assert [type(op).__name__ for op in ops] == ["Embedding", "Linear", "SiluAndMul"]
