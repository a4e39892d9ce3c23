"""What each op of a step reads, writes and computes, as a function of batch and context.

T tokens are computed of n sequences; K of them, the last of each sequence, are kept to the end of
the last layer. h is the hidden size, q and k the widths of all query and of all KV heads, f that of
the MLP, V the vocabulary, w the bytes of a weight, a those of an activation (2), c those of a
head's key or value in the cache, d its width. P counts pairs of a query and a key that it attends
to, S the keys that are read: a decode step of n sequences of C tokens has P = S = n · C, a chunk of
t tokens after s of a prompt P = t · s + t (t + 1) / 2 and S = s + t; a window bounds both.

    op              bytes                                       FLOPs
    embedding       2 T h a                                     0
    norms           4 T h a, 2 L + 1 of them                    0
    q, k and v      h (q + 2 k) w + T (h + q + 2 k) a           2 T h (q + 2 k)
    rope and cache  2 T (q + k) a + 2 T k c / d                 0
    attention       2 S k c / d + 2 T q a                       4 P q
    output          q h w + T (q + h) a                         2 T q h
    gate and up     2 h f w + T (h + 2 f) a                     4 T h f
    silu and mul    3 T f a                                     0
    down            f h w + T (f + h) a                         2 T f h
    head            h V w + K (h + V) a                         2 K h V
    sampling        K V (a + 4 + 4)                             0

The last layer computes q, attention and all after that for K tokens only. An op takes at least the
longer of bytes / bandwidth and FLOPs / products per second; a step at least the sum of its ops
(Williams et al., "Roofline", 2009).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine_svc.compute.model.config import ModelConfig
from kernels.gpu.kv_cache import KvFormat
from tests.bench.roofline_devices import DeviceFigures

ACTIVATION_BYTES = 2
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What linear layers' weights are held in."""

    name: str
    bytes_per_weight: float
    bytes_per_row: int = 0  # of scales for an output


WEIGHTS = {
    "bf16": WeightFormat("bf16", 2.0),
    # A scale, and a minimum for some, of 16 bits for 32 weights.
    "int8": WeightFormat("int8", 1 + 2 / 32),
    "4bit": WeightFormat("4-bit", 0.5 + 2 / 32),
    "4bit-min": WeightFormat("4-bit with minima", 0.5 + 4 / 32),
    "fp8": WeightFormat("fp8", 1.0, bytes_per_row=4),
}


@dataclass(frozen=True, slots=True)
class Op:
    """One op as often as a step has it alike."""

    name: str
    count: int
    num_bytes: float  # of one
    flops: float = 0.0

    def seconds(self, device: DeviceFigures) -> float:
        """The least that all of them take."""
        memory = self.num_bytes / device.bytes_per_second
        return self.count * max(memory, self.flops / device.flops)


@dataclass(frozen=True, slots=True)
class Sequences:
    """`count` sequences of a step, each with `num_new` tokens after `num_computed`."""

    count: int
    num_new: int
    num_computed: int
    num_kept: int = 1  # of the new ones, at the end

    def attended(self, num_queries: int, window: int) -> tuple[int, int]:
        """Pairs of a query and a key, and keys read, of one: for its last `num_queries` tokens."""
        end = self.num_computed + self.num_new
        positions = range(end - num_queries + 1, end + 1)
        if not window or end <= window:
            first, last = positions[0] if positions else 0, end
            return num_queries * (first + last) // 2, end if num_queries else 0
        pairs = sum(min(position, window) for position in positions)
        return pairs, min(end, window + num_queries - 1) if num_queries else 0


class StepOps:
    """The ops of any step of a model."""

    def __init__(self, config: ModelConfig, weights: WeightFormat, kv_format: KvFormat) -> None:
        self._config = config
        self._weights = weights
        self.head_bytes = kv_format.head_bytes(config.head_dim)

    @property
    def kv_token_bytes(self) -> int:
        """Of the cache, for one token."""
        config = self._config
        return 2 * config.num_layers * config.num_kv_heads * self.head_bytes

    @property
    def weight_bytes(self) -> float:
        """Of all weights: an embedding that is not the head too is bf16."""
        config = self._config
        layer = sum(self._matrix_bytes(*shape) for shape in self._shapes().values())
        total = config.num_layers * (layer + 2 * config.hidden_size * ACTIVATION_BYTES)
        total += self._matrix_bytes(config.vocab_size, config.hidden_size)
        if not config.tie_word_embeddings:
            total += config.vocab_size * config.hidden_size * ACTIVATION_BYTES
        return total

    def of(self, sequences: Sequences) -> Iterator[Op]:
        """A step that computes these."""
        config, hidden = self._config, self._config.hidden_size
        tokens = sequences.count * sequences.num_new
        kept = sequences.count * sequences.num_kept
        yield Op("embedding", 1, 2 * tokens * hidden * ACTIVATION_BYTES)
        windows = config.sliding_windows
        for window in sorted(set(windows[:-1])):
            count = windows[:-1].count(window)
            yield from self._layer(count, sequences, sequences.num_new, window)
        yield from self._layer(1, sequences, sequences.num_kept, windows[-1])
        if kept:
            yield Op("norms", 1, 4 * kept * hidden * ACTIVATION_BYTES)
            yield self._product("head", 1, kept, config.vocab_size, hidden)
            logit_bytes = ACTIVATION_BYTES + 2 * LOGIT_BYTES
            yield Op("sampling", 1, kept * config.vocab_size * logit_bytes)

    def _layer(
        self, count: int, sequences: Sequences, num_queries: int, window: int
    ) -> Iterator[Op]:
        """`count` layers alike, of which `num_queries` tokens of each sequence leave."""
        config, hidden = self._config, self._config.hidden_size
        query, key = config.query_size, config.kv_size
        tokens = sequences.count * sequences.num_new
        queries = sequences.count * num_queries
        shapes = self._shapes()
        yield Op("norms", count, 4 * tokens * hidden * ACTIVATION_BYTES)
        if queries == tokens:
            yield self._product("q, k and v", count, tokens, *shapes["q, k and v"])
        else:
            yield self._product("q, k and v", count, tokens, 2 * key, hidden)
            yield self._product("q, k and v", count, queries, query, hidden)
        rotated = (tokens * 2 * key + 2 * queries * query) * ACTIVATION_BYTES
        written = 2 * tokens * config.num_kv_heads * self.head_bytes
        yield Op("rope and cache", count, rotated + written)
        if not queries:
            return
        pairs, keys = sequences.attended(num_queries, window)
        read = 2 * sequences.count * keys * config.num_kv_heads * self.head_bytes
        yield Op(
            "attention",
            count,
            read + 2 * queries * query * ACTIVATION_BYTES,
            4.0 * sequences.count * pairs * query,
        )
        yield self._product("output", count, queries, *shapes["output"])
        yield Op("norms", count, 4 * queries * hidden * ACTIVATION_BYTES)
        yield self._product("gate and up", count, queries, *shapes["gate and up"])
        yield Op("silu and mul", count, 3 * queries * config.intermediate_size * ACTIVATION_BYTES)
        yield self._product("down", count, queries, *shapes["down"])

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of a layer's matrices."""
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        return {
            "q, k and v": (config.query_size + 2 * config.kv_size, hidden),
            "output": (hidden, config.query_size),
            "gate and up": (2 * inner, hidden),
            "down": (hidden, inner),
        }

    def _product(self, name: str, count: int, tokens: int, rows: int, columns: int) -> Op:
        num_bytes = self._matrix_bytes(rows, columns)
        num_bytes += tokens * (rows + columns) * ACTIVATION_BYTES
        return Op(name, count if tokens else 0, num_bytes, 2.0 * tokens * rows * columns)

    def _matrix_bytes(self, rows: int, columns: int) -> float:
        weights = self._weights
        return rows * (columns * weights.bytes_per_weight + weights.bytes_per_row)


def merged(ops: Sequence[Op], device: DeviceFigures) -> Iterator[tuple[str, float, float, float]]:
    """Name, bytes, FLOPs and seconds of each kind of op, in the order of a step."""
    for name in dict.fromkeys(op.name for op in ops):
        alike = [op for op in ops if op.name == name]
        yield (
            name,
            sum(op.count * op.num_bytes for op in alike),
            sum(op.count * op.flops for op in alike),
            sum(op.seconds(device) for op in alike),
        )
