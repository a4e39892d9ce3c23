"""Kernels that work row by row, against the reference: norms, gates, rope and cache, gathers."""

import itertools

import torch
from torch import Tensor

from kernels import Kernels, select_kernels
from kernels.gpu.kv_cache import KvFormat
from kernels.reference import ReferenceKernels
from tests.fakes.gpu_tensors import assert_close, read_cache
from tests.gpu.machine import Machine
from tests.gpu.random_model import triton_config
from tests.gpu.records import Recorder

EPS = 1e-5
BLOCK_SIZE = 16
NUM_BLOCKS = 8
# Half a place of what a cache holds: of the element, or of its scale. The interpreter cuts bfloat16
# off, which is a whole place.
HELD_PART = {KvFormat.BFLOAT16: 2**-7, KvFormat.FP8: 2**-4, KvFormat.INT8: 0.0}
HELD_STEP = {KvFormat.BFLOAT16: 0.0, KvFormat.FP8: 2**-9, KvFormat.INT8: 0.5}


def check_rows(machine: Machine, recorder: Recorder) -> None:
    for weights in ("bfloat16", "float32"):
        kernels = select_kernels(machine.torch_device, triton_config(weights=weights))
        for num_tokens in (1, 37) if machine.is_gpu else (3,):
            with recorder.case(f"norms and gates, {weights}, {num_tokens} rows", is_check=True):
                _norms_and_gates(machine, kernels, num_tokens)
    _gathers(machine, recorder)
    formats = list(HELD_PART)
    for kv_format, has_norms in itertools.product(formats, (False, True)):
        norms = ", q and k normalised" * has_norms
        with recorder.case(f"rope and cache, {kv_format}{norms}", is_check=True):
            _rope_and_cache(machine, kv_format, has_norms)
    with recorder.case("a row's norm is the same alone and among others", is_check=True):
        x, weight = _rows(machine, 64), machine.randn(machine.config.hidden_size).bfloat16()
        kernels = select_kernels(machine.torch_device, triton_config())
        together = kernels.rms_norm(x, weight, EPS).clone()
        for row in (0, 7, 63):
            assert torch.equal(kernels.rms_norm(x[row : row + 1], weight, EPS)[0], together[row])


def _rows(machine: Machine, count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return machine.randn(count, machine.config.hidden_size, dtype=dtype)


def _norms_and_gates(machine: Machine, kernels: Kernels, num_tokens: int) -> None:
    config, reference, dtype = machine.config, ReferenceKernels(), kernels.dtype
    x, residual = (
        machine.randn(num_tokens, config.hidden_size, dtype=dtype, seed=seed) for seed in (1, 2)
    )
    weight = machine.randn(config.hidden_size, dtype=dtype)
    expected_residual = residual.clone()
    assert_close(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    expected = reference.add_rms_norm(x, expected_residual, weight, EPS)
    assert_close(kernels.add_rms_norm(x, residual, weight, EPS), expected)
    assert_close(residual, expected_residual)
    gate_up = machine.randn(num_tokens, 2 * config.intermediate_size, dtype=dtype)
    assert_close(kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


def _gathers(machine: Machine, recorder: Recorder) -> None:
    kernels = select_kernels(machine.torch_device, triton_config())
    with recorder.case("embedding and take_rows", is_check=True):
        rows = _rows(machine, 300)
        indices = torch.tensor([299, 0, 0, 17], device=rows.device)
        table = kernels.pack_embedding(rows)
        for chosen in (indices, indices.int()):
            assert torch.equal(kernels.embedding(chosen, table), rows[indices])
            assert torch.equal(kernels.take_rows(rows, chosen), rows[indices])
    if not machine.is_gpu:
        return
    with recorder.case("a row that lies beyond 2^31 elements", is_check=True):
        wide = torch.zeros((1 << 31) // 4096 + 9, 4096, dtype=torch.bfloat16, device=rows.device)
        wide[-1] = 1
        last = torch.tensor([len(wide) - 1], dtype=torch.int32, device=rows.device)
        assert bool((kernels.take_rows(wide, last) == 1).all())


def _rope_and_cache(machine: Machine, kv_format: KvFormat, has_norms: bool) -> None:
    config, reference = machine.config, ReferenceKernels()
    kernels = select_kernels(machine.torch_device, triton_config(kv=kv_format.value))
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    slots = [0, 15, -1, 16, NUM_BLOCKS * BLOCK_SIZE - 1, 5]
    projected = machine.randn(len(slots), (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
    query, key, value = projected.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    norms = [machine.randn(dim, dtype=torch.bfloat16)] * 2 if has_norms else [None, None]
    positions = torch.tensor([0, 4095, 7, 1, 300, 77], device=projected.device)
    angles = machine.randn(4096, dim // 2) * 100
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    (kv_layer,) = kernels.allocate_kv(1, NUM_BLOCKS, BLOCK_SIZE, kv_heads, dim)
    kv_layer.data.view(torch.uint8).zero_()
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device=projected.device)
    expected_query, expected_key = (
        _rotated(reference, heads_of, positions, table, norm)
        for heads_of, norm in ((query, norms[0]), (key, norms[1]))
    )
    expected_value = value.double()
    rotated = kernels.rope_and_cache(
        *(query, positions.int(), key, value, positions.int(), table, kv_layer, slot_mapping),
        *(*norms, EPS),
    )
    assert_close(rotated, expected_query.to(rotated.dtype))
    held = read_cache(kv_layer).flatten(1, 2)
    is_written = slot_mapping >= 0
    written = slot_mapping[is_written].long()
    for place, expected in ((0, expected_key), (1, expected_value)):
        expected = expected[is_written]
        allowed = expected.abs() * HELD_PART[kv_format] + 1e-6
        if kv_layer.scales is not None:
            scales = kv_layer.scales[place].flatten(0, 1)[written].double()
            allowed += scales[..., None] * (HELD_STEP[kv_format] + 1e-3)
        # Products and norms in float32 before, and int8's ties, of which either is right.
        allowed = allowed * 1.02 + expected.abs() * 2**-8 * has_norms
        assert bool(((held[place, written] - expected).abs() <= allowed).all())
    others = torch.ones(held.shape[1], dtype=torch.bool, device=held.device)
    others[written] = False
    assert not bool(kv_layer.data.view(torch.uint8).flatten(1, 2)[:, others].any())


def _rotated(
    reference: ReferenceKernels,
    heads: Tensor,
    positions: Tensor,
    table: Tensor,
    norm: Tensor | None,
) -> Tensor:
    """In float64, as norms and rotations are defined."""
    wide = heads.double()
    if norm is not None:
        wide = reference.rms_norm(wide, norm, EPS)
    cos, sin = table[positions].double()[:, None].chunk(2, dim=-1)
    a, b = wide.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
