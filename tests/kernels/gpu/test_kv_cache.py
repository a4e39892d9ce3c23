"""What the cache's formats take and hold: bytes, layers, eight-bit elements and their scales."""

import pytest
import torch
from torch import Tensor

from kernels.gpu import rope
from kernels.gpu.kv_cache import GpuKvCache, GpuKvLayer, KvFormat, kv_block_bytes

DIM = 64


@pytest.mark.parametrize("kv_format", KvFormat)
def test_a_cache_takes_the_bytes_that_its_blocks_are_said_to(device, kv_format) -> None:
    cache = GpuKvCache(kv_format, 3, 5, 16, 2, 80, device)
    scales = 0 if cache.scales is None else cache.scales.nbytes
    assert cache.data.nbytes + scales == 5 * kv_block_bytes(kv_format, 3, 16, 2, 80)
    assert cache.data.dtype == kv_format.dtype
    assert (cache.scales is not None) == kv_format.has_scales


@pytest.mark.parametrize("kv_format", KvFormat)
def test_its_layers_are_parts_of_its_memory(device, kv_format) -> None:
    cache = GpuKvCache(kv_format, 3, 5, 16, 2, 80, device)
    assert len(cache) == len(list(cache)) == 3
    layer = cache[2]
    assert (layer.num_blocks, layer.block_size) == (5, 16)
    assert (layer.num_kv_heads, layer.head_dim) == (2, 80)
    assert layer.data.data_ptr() == cache.data[2].data_ptr()
    assert layer.stored().data_ptr() == layer.data.data_ptr()
    assert layer.stored().dtype == kv_format.stored_dtype
    assert (layer.scales is None) == (cache.scales is None)


def write(kv_format: KvFormat, values: Tensor) -> GpuKvLayer:
    """Caches heads [n, DIM] as the values of n tokens, at position 0 of one block."""
    values = values[:, None].contiguous()
    layer = GpuKvCache(kv_format, 1, 1, len(values), 1, DIM, values.device)[0]
    tokens = torch.arange(len(values), device=values.device)
    table = torch.zeros(len(values), DIM, device=values.device)
    rope.rope_and_cache(
        *(values[:0], tokens[:0], values, values, tokens, table, layer, tokens),
        *(None, None, 1e-6, values[:0]),
    )
    return layer


def test_fp8_has_the_bits_that_torch_rounds_to(device) -> None:
    # With a largest element of 448 the scale is 1. All values of e4m3, what lies in the middle of
    # two, and a little to either side: rounding to nearest even, below the normal ones too.
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (exact[1:] + exact[:-1]) / 2
    values = torch.cat([exact, middles, middles * (1 + 1e-6), middles * (1 - 1e-6)])
    values = torch.cat([values, -values]).to(device)
    heads = torch.nn.functional.pad(values, (0, -len(values) % (DIM - 1))).view(-1, DIM - 1)
    heads = torch.nn.functional.pad(heads, (1, 0), value=448.0)
    layer = write(KvFormat.FP8, heads)
    assert (layer.scales[1] == 1).all()
    assert torch.equal(layer.stored()[1, 0, :, 0], heads.to(torch.float8_e4m3fn).view(torch.uint8))


def test_int8_rounds_to_the_nearest_integer_even_at_ties(device) -> None:
    values = torch.cat([torch.arange(-127.0, 128.0), torch.arange(-126.5, 127.0)]).to(device)
    heads = torch.nn.functional.pad(values, (0, -len(values) % (DIM - 1))).view(-1, DIM - 1)
    heads = torch.nn.functional.pad(heads, (1, 0), value=127.0)
    layer = write(KvFormat.INT8, heads)
    assert (layer.scales[1] == 1).all()
    assert torch.equal(layer.data[1, 0, :, 0], heads.round().to(torch.int8))


@pytest.mark.parametrize("kv_format", [KvFormat.FP8, KvFormat.INT8])
def test_heads_of_any_magnitude_have_a_scale(device, kv_format) -> None:
    heads = torch.linspace(-1, 0.5, DIM).repeat(5, 1).to(device)
    heads *= torch.tensor([0.0, 1e-35, 1e-20, 1.0, 1e30], device=device)[:, None]
    layer = write(kv_format, heads)
    scales = layer.scales[1, 0, :, 0]
    # Nothing, and what is as good as nothing.
    assert scales[:2].tolist() == [1.0, 1.0] and not layer.data[1, 0, :2].float().any()
    torch.testing.assert_close(scales[2:], heads[2:].abs().amax(-1) / kv_format.largest)
    held = layer.data[1, 0, 2:, 0].float() * scales[2:, None]
    allowed = heads[2:].abs() / 16 + heads[2:].abs().amax(-1, keepdim=True) / 127
    assert ((held - heads[2:]).abs() <= allowed).all()


def test_what_eight_bits_cannot_hold_is_not_read_as_a_number(device) -> None:
    heads = torch.ones(2, DIM, device=device)
    heads[0, 3] = torch.nan
    for kv_format in (KvFormat.FP8, KvFormat.INT8):
        layer = write(kv_format, heads)
        held = layer.data[1, 0, :, 0].float() * layer.scales[1, 0]
        assert held[0].isnan().all()
        assert torch.equal(held[1], heads[1])
