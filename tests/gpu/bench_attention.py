"""Attention alone: prompts beside torch's flash attention, decode steps beside the bandwidth."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import Kernels, select_kernels
from kernels.gpu.kv_cache import KvFormat
from tests.bench.roofline_measured import Runs, num_copies, time_runs
from tests.gpu.machine import Machine, data_sheet, measured_figures
from tests.gpu.random_model import triton_config
from tests.gpu.records import Goal, Recorder

FLASH = Goal("paged attention: 0.9 of torch's flash attention on the same work", at_least=0.9)
SPLIT = Goal("split-KV decode: 85 % of the bandwidth", at_least=0.85)
BLOCK_SIZE = 16
# Of the largest result: two roundings to bfloat16, which the interpreter cuts off.
CLOSE = 2**-6
# (sequences, tokens of each)
PROMPTS = ((1, 8192), (4, 2048), (1, 2048), (16, 512))
DECODES = ((1, 32768), (1, 131072), (4, 32768), (16, 8192), (64, 4096), (256, 2048))
# Shorter ones are bound by launches, not by reading.
MANY_BYTES = 100e6
# Sequences may be longer than those of a step, which is what splits are chosen by.
MAX_MODEL_LEN = 131072


def bench_attention(machine: Machine, recorder: Recorder) -> None:
    measured = measured_figures(machine)
    recorder.measure("copied", measured.bytes_per_second / 1e12, "TB/s")
    for count, length in PROMPTS if machine.is_gpu else ((2, 9),):
        with recorder.case(f"prompts, {count} x {length}"), torch.inference_mode():
            _prompts(machine, recorder, count, length)
    for kv_format in (KvFormat.BFLOAT16, KvFormat.FP8):
        for count, length in DECODES if machine.is_gpu else ((2, 40),):
            name = f"decode, {count} x {length}, {kv_format}"
            with recorder.case(name), torch.inference_mode():
                kernels = select_kernels(machine.torch_device, triton_config(kv=kv_format.value))
                seconds, num_bytes = _decode(machine, kernels, count, length)
                rate = num_bytes / seconds
                is_large = num_bytes > MANY_BYTES or not machine.is_gpu
                recorder.measure(f"{name}: a layer", seconds * 1e6, "µs")
                share = f"{name}: share of the bandwidth"
                goal = SPLIT if is_large and kv_format is KvFormat.BFLOAT16 else None
                recorder.measure(
                    f"{share}, as measured", rate / measured.bytes_per_second, "", goal
                )
                by_sheet = rate / data_sheet(machine).bytes_per_second
                recorder.measure(f"{share}, by the data sheet", by_sheet)


def _prompts(machine: Machine, recorder: Recorder, count: int, length: int) -> None:
    name = f"prompts, {count} x {length}"
    config, device = machine.config, machine.torch_device
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    query, key, value = (
        machine.randn(count, number, length, dim, dtype=torch.bfloat16, seed=seed)
        for seed, number in enumerate((heads, kv_heads, kv_heads))
    )
    kernels = select_kernels(device, triton_config())
    blocks = -(-length // BLOCK_SIZE)
    (layer,) = kernels.allocate_kv(1, count * blocks, BLOCK_SIZE, kv_heads, dim)
    room = blocks * BLOCK_SIZE - length
    for place, given in enumerate((key, value)):
        tokens = torch.nn.functional.pad(given.transpose(1, 2), (0, 0, 0, 0, 0, room))
        layer.data[place].copy_(tokens.reshape(layer.data[place].shape))
    table = torch.arange(count * blocks, dtype=torch.int32, device=device).view(count, blocks)
    ends = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    plan = kernels.plan_attention(ends, ends[1:] - ends[:-1], table.contiguous(), BLOCK_SIZE, None)
    flat = query.transpose(1, 2).reshape(count * length, heads, dim)
    ours: Runs = [lambda: kernels.paged_attention(flat, layer, plan, dim**-0.5)]
    group = heads // kv_heads
    wide_key, wide_value = (part.repeat_interleave(group, 1) for part in (key, value))

    def flash() -> Tensor:
        return scaled_dot_product_attention(query, wide_key, wide_value, is_causal=True)

    kinds = [SDPBackend.FLASH_ATTENTION] if machine.is_gpu else [SDPBackend.MATH]
    with sdpa_kernel(kinds):
        expected = flash().transpose(1, 2).reshape(flat.shape)
        theirs = time_runs([flash], device)
    off = float((ours[0]().float() - expected.float()).abs().max())
    largest = max(1.0, float(expected.float().abs().max()))
    recorder.check(f"{name}: as torch's", off < CLOSE * largest, f"off by {off:.1e}")
    taken = time_runs(ours, device)
    flops = 4.0 * count * heads * dim * length * (length + 1) / 2
    recorder.measure(f"{name}: products", flops / taken / 1e12, "TFLOP/s")
    recorder.measure(f"{name}: torch's flash", flops / theirs / 1e12, "TFLOP/s")
    goal = FLASH if length >= 2048 or not machine.is_gpu else None
    recorder.measure(f"{name}: beside torch's flash", theirs / taken, "", goal)
    with recorder.case(f"{name}: batch-invariant"):
        fixed = select_kernels(device, triton_config(batch_invariant=True))
        slower = time_runs([lambda: fixed.paged_attention(flat, layer, plan, dim**-0.5)], device)
        recorder.measure(f"{name}: batch-invariant, beside the quickest", taken / slower)


def _decode(machine: Machine, kernels: Kernels, count: int, length: int) -> tuple[float, float]:
    """Seconds of a layer, and the bytes of its keys and values."""
    config, device = machine.config, machine.torch_device
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    blocks = -(-length // BLOCK_SIZE)
    num_bytes = count * blocks * kernels.kv_block_bytes(1, BLOCK_SIZE, kv_heads, dim)
    copies = num_copies(num_bytes)
    cache = kernels.allocate_kv(copies, count * blocks, BLOCK_SIZE, kv_heads, dim)
    for layer in cache:
        # Any bits but those of a NaN or of huge numbers.
        layer.data.view(torch.uint8).random_(0, 0x40)
        if layer.scales is not None:
            layer.scales.fill_(1e-2)
    order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(0))
    most = max(blocks, MAX_MODEL_LEN // BLOCK_SIZE) if machine.is_gpu else blocks
    table = torch.zeros(count, most, dtype=torch.int32)
    table[:, :blocks] = order.view(count, blocks)
    ends = torch.arange(count + 1, dtype=torch.int32, device=device)
    seq_lens = torch.full((count,), length, dtype=torch.int32, device=device)
    plan = kernels.plan_attention(ends, seq_lens, table.to(device), BLOCK_SIZE, None)
    query = machine.randn(count, heads, dim, dtype=torch.bfloat16)
    runs: Runs = [
        lambda layer=layer: kernels.paged_attention(query, layer, plan, dim**-0.5)
        for layer in cache
    ]
    seconds = time_runs(runs, device)
    return seconds, count * length * 2 * kv_heads * kernels.kv_format.head_bytes(dim)
