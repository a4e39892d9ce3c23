"""The whole GPU backend behind the public ops: each against the reference, and a model on them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_svc.compute.model.weights import open_source
from kernels import KernelConfig, Kernels, select_kernels
from kernels.gpu import selection
from kernels.gpu.kv_cache import GpuKvLayer
from kernels.reference import ReferenceKernels
from tests.fakes.decoding import SequenceLogits
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_mistral, write_tiny_qwen3

# Relative to the largest value of the reference: rounding of a few sums, or of two bfloat16, which
# Triton's interpreter cuts off.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
EPS = 1e-5
CPU = torch.device("cpu")


def gpu_kernels(device: torch.device = CPU, weights: str = "float32", **wanted: object) -> Kernels:
    config = KernelConfig(weights, implementation="triton", **wanted)  # type: ignore[arg-type]
    return select_kernels(device, config)


@pytest.fixture(params=["float32", "bfloat16"])
def kernels(request: pytest.FixtureRequest, device: torch.device) -> Kernels:
    return gpu_kernels(device, request.param)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).abs().max()
    assert difference <= TOLERANCE[actual.dtype] * max(1.0, float(expected.double().abs().max()))


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
def test_linear_logits_and_embedding(kernels, reference, randn, num_tokens) -> None:
    x = randn(num_tokens, 64, dtype=kernels.dtype)
    weight, bias = randn(96, 64, dtype=kernels.dtype), randn(96, dtype=kernels.dtype)
    parts = list(weight.float().split([32, 64]))
    expected = reference.linear(x, (weight, bias))
    assert_close(kernels.linear(x, kernels.pack_linear(parts, bias)), expected)
    table = kernels.pack_embedding(weight)
    ids = torch.tensor([95, 0, 0, 7], device=kernels.device)
    for indices in (ids, ids.int()):
        assert torch.equal(kernels.embedding(indices, table), weight[ids])
    logits = kernels.logits(x, kernels.tied_head(table))
    assert logits.dtype == torch.float32
    assert_close(logits.to(kernels.dtype), reference.linear(x, (weight, None)))


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_norms_gate_and_rows(kernels, reference, randn, num_tokens) -> None:
    width, dtype = 72, kernels.dtype
    x, weight, gate_up = (
        randn(*shape, dtype=dtype) for shape in [(num_tokens, width), (width,), (num_tokens, 96)]
    )
    residual = randn(num_tokens, width, dtype=dtype)
    expected_residual = residual.clone()
    assert_close(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    expected = reference.add_rms_norm(x, expected_residual, weight, EPS)
    assert_close(kernels.add_rms_norm(x, residual, weight, EPS), expected)
    assert_close(residual, expected_residual)
    assert_close(kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    indices = torch.tensor([num_tokens - 1, 0, 0], dtype=torch.int32, device=x.device)
    assert torch.equal(kernels.take_rows(x, indices), x[indices.long()])


# (tokens of a sequence, of which queries)
BATCHES = {
    "decode": [(5, 1), (16, 1), (33, 1)],
    "prefill": [(7, 7), (17, 17)],
    "mixture": [(40, 1), (20, 20), (50, 3), (1, 1)],
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("sliding_window", [0, 9])
def test_a_layer_s_attention_from_projection_to_result(
    kernels, reference, randn, batch, sliding_window
) -> None:
    """The cache is filled by rope_and_cache, with norms, and read by rows of larger tables."""
    heads, kv_heads, dim, block_size = 6, 2, 16, 16
    device, dtype = kernels.device, kernels.dtype
    lengths = torch.tensor([length for length, _ in batch])
    queries = torch.tensor([count for _, count in batch])
    total, most = int(lengths.sum()), -(-int(lengths.max()) // block_size)
    table = torch.randperm(len(batch) * most, generator=torch.Generator().manual_seed(1))
    table = table.view(len(batch), most)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    of_sequence = torch.repeat_interleave(torch.arange(len(batch)), lengths)
    slots = table[of_sequence, positions // block_size] * block_size + positions % block_size
    is_query = positions >= (lengths - queries)[of_sequence]
    angles = randn(60, dim // 2) * 3
    cos_sin_table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    projected = randn(total, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = randn(dim, dtype=dtype), randn(dim, dtype=dtype)
    rows = torch.arange(len(batch)).flip(0)
    cu_seqlens = torch.tensor([0, *queries.tolist()]).cumsum(0)

    def run(ops: Kernels) -> Tensor:
        def given(tensor: Tensor) -> Tensor:
            return tensor.to(device).int()

        query, key, value = (
            projected.clone().unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        )
        (kv_layer,) = ops.allocate_kv(1, table.numel(), block_size, kv_heads, dim)
        rotated = ops.rope_and_cache(
            query[is_query.to(device)],
            given(positions[is_query]),
            key,
            value,
            given(positions),
            cos_sin_table,
            kv_layer,
            given(slots),
            *norms,
            EPS,
        )
        plan = ops.plan_attention(
            *map(given, (cu_seqlens, lengths[rows], table[rows])), block_size, given(rows)
        )
        return ops.paged_attention(rotated, kv_layer, plan, dim**-0.5, sliding_window)

    assert_close(run(kernels), run(ReferenceKernels(dtype)))


def test_padding_writes_no_slot_and_gets_zeros(kernels, randn) -> None:
    device, dtype = kernels.device, kernels.dtype
    (kv_layer,) = kernels.allocate_kv(1, 2, 16, 1, 16)
    assert isinstance(kv_layer, GpuKvLayer)
    kv_layer.data.zero_()
    query, key = randn(2, 2, 16, dtype=dtype), randn(2, 1, 16, dtype=dtype)
    positions = torch.tensor([3, 0], device=device, dtype=torch.int32)
    slots = torch.tensor([19, -1], device=device, dtype=torch.int32)
    table = torch.ones(4, 16, device=device)
    rotated = kernels.rope_and_cache(
        query, positions, key, key, positions, table, kv_layer, slots, None, None, EPS
    )
    written = kv_layer.data[0].flatten(0, 1).any(dim=-1).any(dim=-1)
    assert written.nonzero().tolist() == [[19]]
    cu_seqlens = torch.tensor([0, 1, 2], device=device, dtype=torch.int32)
    seq_lens = torch.tensor([4, 0], device=device, dtype=torch.int32)
    blocks = torch.tensor([[1], [0]], device=device, dtype=torch.int32)
    plan = kernels.plan_attention(cu_seqlens, seq_lens, blocks, 16)
    attended = kernels.paged_attention(rotated, kv_layer, plan, 0.25)
    assert bool(attended[0].any()) and not bool(attended[1].any())


def test_sampling_from_edits_to_ids_and_logprobs(reference, randn, device) -> None:
    kernels = gpu_kernels(device)
    vocab_size, n = 77, 4
    raw = randn(n, vocab_size) * 2

    def given(values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    rows = given([2, 0], torch.int64)
    allowed = given([[-1, -2, 0x7FF], [5, -1, -1]], torch.int32)
    token_ids = given([[3, 5, 5, 9], [1, 1, 2, 0]], torch.int32)
    options = (
        *(given([0.0, 0.7, 1.0, 1.5], torch.float32), given([0.0, 0.0, 0.1, 0.0], torch.float32)),
        *(given([0, 5, 0, 0], torch.int64), given([1.0, 1.0, 0.9, 0.5], torch.float32)),
        *(given([7, -3, 11, 4], torch.int64), given([5, 6, 7, 8], torch.int64)),
    )

    def run(ops: Kernels) -> list[Tensor]:
        logits = raw.clone()
        ops.mask_logits(logits, rows, allowed)
        ops.bias_logits(
            logits,
            given([1, 3], torch.int64),
            given([6, 70], torch.int64),
            given([2.5, -torch.inf], torch.float32),
        )
        ops.penalize(
            *(logits, rows, token_ids, given([2, 1], torch.int64), given([4, 3], torch.int64)),
            *(given([1.3, 1.0], torch.float32), given([0.5, 0.2], torch.float32)),
            given([0.1, 0.0], torch.float32),
        )
        ids = ops.sample(logits, *options)
        return [logits, ids, *ops.token_logprobs(raw, ids, 3)]

    logits, ids, *listed = run(kernels)
    expected_logits, expected_ids, *expected_listed = run(reference)
    assert torch.allclose(logits, expected_logits, rtol=1e-6, atol=1e-6)
    assert ids.tolist() == expected_ids.tolist()
    for actual, expected in zip(listed, expected_listed, strict=True):
        assert torch.allclose(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return torch.randint(VOCAB_SIZE - 2, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("write", [write_tiny_mistral, write_tiny_qwen3])
def test_a_model_says_what_it_says_on_torch_s_own_ops(
    tmp_path: Path, prompt, write, batch_invariant
) -> None:
    source = open_source(write(tmp_path))
    chunks = [17, 16, 1, 1, 1, 4]
    expected, actual = (
        SequenceLogits(source, config).after_chunks(prompt, chunks)
        for config in (
            KernelConfig("float32", implementation="torch"),
            KernelConfig("float32", implementation="triton", batch_invariant=batch_invariant),
        )
    )
    assert float((actual - expected).abs().max()) < 1e-4
    assert actual.argmax(dim=-1).tolist() == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "fp8"])
def test_a_model_in_fewer_bits_says_about_the_same(tmp_path: Path, prompt, weights) -> None:
    source = open_source(write_tiny_qwen3(tmp_path))
    kv = "fp8" if weights == "fp8" else "int8" if weights == "int8" else "auto"
    expected, actual = (
        SequenceLogits(source, config).after_chunks(prompt, [40])
        for config in (
            KernelConfig("float32", implementation="torch"),
            KernelConfig(weights, kv=kv, implementation="triton"),
        )
    )
    cosine = torch.nn.functional.cosine_similarity(actual, expected)
    assert float(cosine.min()) > 0.97


def test_in_batch_invariant_mode_a_row_has_the_same_bits_however_it_is_chunked(
    tmp_path: Path, prompt
) -> None:
    source = open_source(write_tiny_qwen3(tmp_path))
    config = KernelConfig("bfloat16", implementation="triton", batch_invariant=True)

    def last(chunks: list[int]) -> Tensor:
        return SequenceLogits(source, config).after_chunks(prompt, chunks)[-1]

    whole = last([40])
    for chunks in ([39, 1], [17, 16, 1, 6]):
        assert torch.equal(last(chunks), whole)


def test_no_result_takes_new_memory_once_the_largest_step_has_run(device, randn) -> None:
    kernels = gpu_kernels(device)
    packed = kernels.pack_linear([randn(24, 8)])
    largest = [kernels.linear(randn(9, 8), packed) for _ in range(2)]
    kernels.keep_addresses()
    num_bytes = kernels.buffers.num_bytes
    for rows in (1, 9, 4):
        results = [kernels.linear(randn(rows, 8), packed) for _ in range(2)]
        assert [r.data_ptr() for r in results] == [r.data_ptr() for r in largest]
    assert kernels.buffers.num_bytes == num_bytes


@pytest.mark.parametrize(
    ("capability", "hip", "weights", "reason"),
    [
        ((7, 5), None, "auto", "has compute capability 7.5; bfloat16 needs 8.0"),
        ((8, 0), None, "fp8", r"has no fp8 \(e4m3\)"),
        ((9, 4), "6.4", "fp8", r"has no fp8 \(e4m3\)"),
    ],
)
def test_what_a_gpu_does_not_have_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capability, hip, weights, reason
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    with pytest.raises(ValueError, match=f"A card {reason}"):
        select_kernels(torch.device("cuda"), KernelConfig(weights))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is wrong where there is no GPU")
def test_what_is_missing_for_a_gpu_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no device cuda: this build of torch"):
        select_kernels(torch.device("cuda"))
    with pytest.raises(ValueError, match="no avx2 kernels for device cuda"):
        select_kernels(torch.device("cuda"), KernelConfig(implementation="avx2"))
    with pytest.raises(ValueError, match="do not round activations"):
        gpu_kernels(activations="int8")
    with pytest.raises(ValueError, match="no kernels for device meta"):
        gpu_kernels(torch.device("meta"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        gpu_kernels()
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="need the package triton"):
        gpu_kernels()


def test_the_description_says_what_was_chosen() -> None:
    described = gpu_kernels(weights="auto", kv="fp8", batch_invariant=True).description
    assert described == (
        "Triton kernels on the CPU, interpreted, weights: auto, KV: fp8, batch-invariant"
    )


def test_a_cpu_s_own_kernels_have_no_fp8() -> None:
    for config in (KernelConfig(weights="fp8"), KernelConfig(kv="fp8")):
        with pytest.raises(ValueError, match="do not compute with fp8"):
            select_kernels(CPU, config)
