"""Paged attention on the device against the reference: batches, caches, windows, fixed bits."""

import itertools

import torch

from kernels.gpu.kv_cache import KvFormat
from tests.fakes.gpu_tensors import assert_close
from tests.fakes.paged_batches import PagedBatch, Shape, paged_batch
from tests.gpu.machine import Machine
from tests.gpu.records import Recorder

# (tokens of a sequence, of which queries)
BATCHES = {
    "decode": [(5, 1), (16, 1), (17, 1), (64, 1), (700, 1), (1, 1), (0, 1)],
    "long decode": [(8192, 1), (4097, 1), (33, 1), (0, 1)],
    "one long decode": [(32768, 1)],
    "prefills": [(150, 150), (16, 16), (43, 43), (1, 1)],
    "chunks": [(4096, 33), (1030, 17), (130, 50), (16, 15)],
    "mixture": [(2000, 1), (20, 20), (64, 1), (50, 13), (0, 1), (85, 80)],
}
TINY_BATCHES = {"mixture": [(70, 1), (20, 20), (0, 1), (33, 9)], "decode": [(70, 1), (33, 1)]}
FORMATS = (KvFormat.BFLOAT16, KvFormat.FP8, KvFormat.INT8)


def check_attention(machine: Machine, recorder: Recorder) -> None:
    shape = shape_of(machine)
    for name, sequences in (BATCHES if machine.is_gpu else TINY_BATCHES).items():
        for kv_format in FORMATS:
            with recorder.case(f"{name}, {kv_format}", is_check=True), torch.inference_mode():
                batch = _batch(machine, sequences, shape, kv_format)
                assert_close(batch.attend(), batch.expected())


def check_attention_of_models(machine: Machine, recorder: Recorder) -> None:
    """Heads of other models, windows and soft caps."""
    shapes = (Shape(9, 3, 64), Shape(32, 32, 80), Shape(8, 1, 256), Shape(8, 1, 96))
    if not machine.is_gpu:
        shapes = (Shape(3, 1, 80),)
    sequences = (BATCHES if machine.is_gpu else TINY_BATCHES)["mixture"]
    for shape, dtype in itertools.product(shapes, (torch.bfloat16, torch.float32)):
        with recorder.case(f"{shape}, {dtype}", is_check=True), torch.inference_mode():
            batch = paged_batch(machine.randn, sequences, shape, dtype)
            assert_close(batch.attend(), batch.expected())
    for window, soft_cap in ((24, 0.0), (0, 3.0), (1024, 2.0)):
        name = f"window {window}, soft cap {soft_cap}"
        with recorder.case(name, is_check=True), torch.inference_mode():
            batch = _batch(machine, sequences, shape_of(machine), KvFormat.BFLOAT16)
            assert_close(batch.attend(window, soft_cap), batch.expected(window, soft_cap))


def check_invariant_attention(machine: Machine, recorder: Recorder) -> None:
    """A query's bits are those of any batch, chunk and decode step."""
    lengths = [1, 33, 700, 1300] if machine.is_gpu else [1, 33, 40]
    formats = FORMATS if machine.is_gpu else FORMATS[1:2]
    last = lengths[-1]
    for kv_format in formats:
        with recorder.case(f"against the reference, {kv_format}", is_check=True):
            decode = _batch(machine, [(n, 1) for n in lengths], shape_of(machine), kv_format)
            assert_close(decode.attend(batch_invariant=True), decode.expected())
        with recorder.case(f"the same bits however cut, {kv_format}", is_check=True):
            batch = _batch(machine, [(n, n) for n in lengths], shape_of(machine), kv_format)
            whole = batch.attend(batch_invariant=True)
            pieces = [(len(lengths) - 1, last - 1, last), (1, 32, 33), (2, 0, 16), (2, 30, 31)]
            single = [(len(lengths) - 1, place, place + 1) for place in (5, 17, last // 2)]
            many = [piece for _ in range(60 if machine.is_gpu else 2) for piece in single]
            for chosen in (pieces, pieces[:1], pieces[2:3], single, many):
                _assert_same_bits(batch, whole, chosen)


def _assert_same_bits(
    batch: PagedBatch, whole: torch.Tensor, chosen: list[tuple[int, int, int]]
) -> None:
    starts = batch.cu_seqlens.tolist()
    alone = batch.only(chosen).attend(batch_invariant=True)
    sizes = [last - first for _, first, last in chosen]
    for part, (sequence, first, last) in zip(alone.split(sizes), chosen, strict=True):
        assert torch.equal(part, whole[starts[sequence] :][first:last]), (sequence, first, last)


def shape_of(machine: Machine) -> Shape:
    config = machine.config
    return Shape(config.num_heads, config.num_kv_heads, config.head_dim)


def _batch(
    machine: Machine, sequences: list[tuple[int, int]], shape: Shape, kv_format: KvFormat
) -> PagedBatch:
    return paged_batch(machine.randn, sequences, shape, torch.bfloat16, kv_format)
