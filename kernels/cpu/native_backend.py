"""The CPU backend on the native library: ops are recorded, and run as programs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from ctypes import CDLL
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu import library as native
from kernels.cpu.native_lowering import AttentionPlan, KvLayer, Rotary
from kernels.cpu.native_ops import (
    AddRmsNorm,
    Attention,
    Embedding,
    Linear,
    RmsNorm,
    Rope,
    RopeAndCache,
    SiluAndMul,
    TakeRows,
)
from kernels.cpu.native_program import NativePool, NativeProgram, Recorder
from kernels.cpu.native_sampling import NativeSampling
from kernels.cpu.native_weights import WeightPacker
from kernels.cpu.packed_weight import PackedWeight
from kernels.ops import CapturedRun, Kernels, StoredKind, StoredMatrix

# What activations are rounded to where weights are quantised: int8, or 16 bits as two of these.
NUM_HALVES = {"int8": 1, "int16": 2, "float32": 1}
# TlKvType.
KV_TYPES = {"float16": 0, "float32": 1, "int8": 2}


class NativeKvCache:
    """The blocks of all layers in one piece of memory, uint8 [layers, bytes]."""

    def __init__(self, memory: Tensor, layers: Sequence[KvLayer]) -> None:
        self.memory = memory
        self._layers = layers

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> KvLayer:
        return self._layers[layer]


class NativeKernels(NativeSampling, Kernels):
    """Activations are float32, and `activations`, one of NUM_HALVES, to quantised weights.

    `weights` is a policy of native_weights.py, `kv` one of KV_TYPES.

    Called outside `capture`, an op runs at once, as a program of its own. One instance serves one
    thread.
    """

    dtype = torch.float32
    uses_torch_threads = False

    def __init__(
        self, library: CDLL, num_threads: int, weights: str, activations: str, kv: str
    ) -> None:
        self._threads = NativePool(library, num_threads)
        super().__init__(library, self._threads.handle)
        self._halves = NUM_HALVES[activations]
        self._kv_type = KV_TYPES[kv]
        self._packer = WeightPacker(library, weights, num_threads)
        self._recorder: Recorder | None = None
        self.stored_kinds = self._packer.stored_kinds
        build = library.tl_instruction_set().decode()
        self.description = (
            f"native CPU kernels: {build}, threads: {num_threads}, "
            f"weights: {weights}, activations: {activations}, KV: {kv}"
        )

    def capture(
        self, compute: Callable[[], Tensor], counted: Sequence[Sequence[Tensor]]
    ) -> CapturedRun:
        return self._program(Recorder(self._halves, counted), compute)

    def _program(self, recorder: Recorder, compute: Callable[[], Tensor]) -> NativeProgram:
        assert self._recorder is None, "a capture in the middle of another"
        self._recorder = recorder
        try:
            result = compute()
        finally:
            self._recorder = None
        return NativeProgram(self._threads, recorder, result)

    def _record(self, op: Callable[[Recorder], Tensor]) -> Tensor:
        """The result of an op that adds itself to a recorder."""
        if self._recorder is not None:
            return op(self._recorder)
        recorder = Recorder(self._halves)
        program = self._program(recorder, lambda: op(recorder))
        program(*recorder.lengths)
        return program.result

    # Weights and the cache

    def keep_packed(
        self, model: Path, identity: str, num_bytes: int, report: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        return self._packer.kept_on_disk(model, identity, num_bytes, report)

    def packed_bytes(self, kind: StoredKind, rows: int, columns: int) -> int:
        return self._packer.packed_bytes(kind, rows, columns)

    def pack_linear(
        self, parts: Sequence[Tensor | StoredMatrix], bias: Tensor | None = None
    ) -> PackedWeight:
        return self._packer.pack(parts, bias)

    def pack_embedding(self, part: Tensor | StoredMatrix) -> PackedWeight:
        return self._packer.pack([part])

    def tied_head(self, embedding: PackedWeight) -> PackedWeight:
        return embedding

    def kv_block_bytes(
        self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> int:
        block_bytes = self._library.tl_kv_block_bytes(
            self._kv_type, block_size, num_kv_heads, head_dim
        )
        return num_layers * int(block_bytes)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> NativeKvCache:
        layer_bytes = num_blocks * self.kv_block_bytes(1, block_size, num_kv_heads, head_dim)
        memory = torch.empty(num_layers, layer_bytes, dtype=torch.uint8)
        layers = [
            KvLayer(
                native.KvLayer(
                    blocks.data_ptr(), self._kv_type, block_size, num_kv_heads, head_dim
                ),
                memory,
            )
            for blocks in memory
        ]
        return NativeKvCache(memory, layers)

    # Ops

    def linear(self, x: Tensor, packed: PackedWeight) -> Tensor:
        def record(recorder: Recorder) -> Tensor:
            count = recorder.count(x)
            result, _ = recorder.new(count, len(x), packed.rows)
            op = Linear(count, recorder.span(x), packed, recorder.span(result))
            recorder.ops.append(op)
            return result

        return self._record(record)

    def embedding(self, ids: Tensor, table: PackedWeight) -> Tensor:
        def record(recorder: Recorder) -> Tensor:
            count = recorder.count(ids)
            result, out = recorder.new(count, len(ids), table.columns)
            recorder.ops.append(Embedding(count, recorder.integers(ids), table, out))
            return result

        return self._record(record)

    def take_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        def record(recorder: Recorder) -> Tensor:
            count, span = recorder.count(indices), recorder.span(x)
            result, out = recorder.new(count, len(indices), span.width)
            recorder.ops.append(TakeRows(count, span, recorder.integers(indices), out))
            return result

        return self._record(record)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        def record(recorder: Recorder) -> Tensor:
            count = recorder.count(x)
            result, out = recorder.new(count, len(x), len(weight))
            recorder.ops.append(RmsNorm(count, recorder.span(x), weight, eps, out))
            return result

        return self._record(record)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        def record(recorder: Recorder) -> Tensor:
            count = recorder.count(x)
            result, out = recorder.new(count, len(x), len(weight))
            spans = recorder.span(x), recorder.span(residual)
            recorder.ops.append(AddRmsNorm(count, *spans, weight, eps, out))
            return result

        return self._record(record)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        def record(recorder: Recorder) -> Tensor:
            count, span = recorder.count(gate_up), recorder.span(gate_up)
            result, out = recorder.new(count, len(gate_up), span.width // 2)
            recorder.ops.append(SiluAndMul(count, span, out))
            return result

        return self._record(record)

    def rope_and_cache(
        self,
        query: Tensor,
        query_positions: Tensor,
        key: Tensor,
        value: Tensor,
        key_positions: Tensor,
        cos_sin_table: Tensor,
        kv_layer: KvLayer,
        slot_mapping: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        def record(recorder: Recorder) -> Tensor:
            positions = recorder.integers(query_positions)
            rotary = Rotary(cos_sin_table, positions, query_norm, eps)
            count, span = recorder.count(query), recorder.span(query)
            recorder.ops.append(Rope(count, span, query.shape[2], rotary))
            positions = recorder.integers(key_positions)
            rotary = Rotary(cos_sin_table, positions, key_norm, eps)
            spans = recorder.span(key), recorder.span(value)
            slots = recorder.integers(slot_mapping)
            count = recorder.count(key)
            recorder.ops.append(RopeAndCache(count, *spans, rotary, kv_layer, slots))
            return query

        return self._record(record)

    def plan_attention(
        self,
        cu_seqlens: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        rows: Tensor | None = None,
    ) -> AttentionPlan:
        recorder = self._recorder or Recorder(self._halves)
        return AttentionPlan(
            recorder.integers(cu_seqlens),
            recorder.integers(seq_lens),
            recorder.integers(block_table),
            None if rows is None else recorder.integers(rows),
            block_size,
        )

    def paged_attention(
        self,
        query: Tensor,
        kv_layer: KvLayer,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int = 0,
    ) -> Tensor:
        def record(recorder: Recorder) -> Tensor:
            num_tokens, num_heads, head_dim = query.shape
            count, span = recorder.count(query), recorder.span(query)
            result, out = recorder.new(count, num_tokens, num_heads * head_dim)
            num_sequences = recorder.count(plan.seq_lens if plan.rows is None else plan.rows)
            options = num_heads, kv_layer, scale, sliding_window
            recorder.ops.append(Attention(count, plan, num_sequences, span, *options, out))
            return result.view(num_tokens, num_heads, head_dim)

        return self._record(record)
