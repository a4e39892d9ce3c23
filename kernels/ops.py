"""The ops a model is made of: their contracts, which every backend keeps.

Kernels know no requests: a batch is flat tensors, its sequences laid end to end. `T` is the number
of tokens of a batch, `n` of its sequences, `V` of the vocabulary. Unless said otherwise floating
tensors have the backend's `dtype`, all lie on its `device`, ids, indices and positions are int32 or
int64, and sums run in float32 at least. Results are new tensors, or lie in the backend's own memory
until the same op was called twice more with that width. A row's result never depends on which other
rows are in the batch; on a GPU only where that is asked for (`KernelConfig.batch_invariant`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.captured_run import CapturedRun
from kernels.stored_matrix import StoredKind, StoredMatrix

# What a backend made of weights, of the cache's layers, or of a batch's layout: only it can look
# inside.
PackedLinear = Any
PackedEmbedding = Any
KvLayer = Any
AttentionPlan = Any


# Below it `sample` takes the likeliest token.
GREEDY_TEMPERATURE = 1e-5


class KvCache(Protocol):
    """One `KvLayer` per layer."""

    def __len__(self) -> int: ...
    def __getitem__(self, layer: int) -> KvLayer: ...


class Kernels(ABC):
    """One backend's implementation of every op."""

    # Where all tensors lie that ops are given.
    device: torch.device = torch.device("cpu")
    # The type of activations, norms and biases.
    dtype: torch.dtype
    # What `pack_linear` and `pack_embedding` take as stored; anything else comes as floats.
    stored_kinds: frozenset[StoredKind] = frozenset()
    # One line for people: which implementation this is, and with which types.
    description: str
    # How often a step's logits are in memory at once while tokens are chosen by them.
    num_logits_copies: int = 2
    # Else it has threads of its own.
    uses_torch_threads: bool = True

    def capture(
        self, compute: Callable[[], Tensor], counted: Sequence[Sequence[Tensor]]
    ) -> CapturedRun | None:
        """Records the ops that `compute` calls, to run them as one; None where that gains nothing.

        Count i says, in each run, how many rows of the tensors `counted[i]` are used, and so of
        what is made of them. These tensors, int32, are read again in each run. `compute` may use
        nothing but ops of this class on them and on tensors without such rows, and views of their
        results that leave rows whole.
        """
        return None

    def keep_addresses(self) -> None:
        """To be called before a device's graph of ops is captured, once the largest step has run.

        From then on memory that results were in is not given back, even where a larger step needs
        other memory: a graph goes on to use it.
        """
        return None

    @abstractmethod
    def pack_linear(
        self, parts: Sequence[Tensor | StoredMatrix], bias: Tensor | None = None
    ) -> PackedLinear:
        """Lays out a weight [out, in] and `bias` [out] once, as `linear` likes to read them.

        The rows of `parts`, floating tensors of any type or stored matrices, lie one below the
        other.
        """

    def keep_packed(
        self, model: Path, identity: str, num_bytes: int, report: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        """What is packed inside may be found on disk, or kept there for the next load of `model`.

        `identity` changes when the model's files do; `num_bytes` is about what is packed in all.
        Where packed weights lie is settled when the context is left.
        """
        return nullcontext()

    def packed_bytes(self, kind: StoredKind, rows: int, columns: int) -> int:
        """Memory that a stored matrix takes once it is packed; `kind` is one of `stored_kinds`."""
        raise ValueError(f"{kind} is not packed as it is stored")

    @abstractmethod
    def pack_embedding(self, part: Tensor | StoredMatrix) -> PackedEmbedding:
        """Lays out a table [rows, width] for `embedding`."""

    @abstractmethod
    def tied_head(self, embedding: PackedEmbedding) -> PackedLinear:
        """The table as a weight for `linear`, in the same memory where the backend can."""

    @abstractmethod
    def kv_block_bytes(
        self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> int:
        """Memory that one block of all layers takes."""

    @abstractmethod
    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KvCache:
        """A cache of arbitrary contents; the system gives its memory as it is first written."""

    @abstractmethod
    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x [T, in] -> x weightᵀ + bias [T, out]."""

    def logits(self, x: Tensor, head: PackedLinear) -> Tensor:
        """`linear`, its result in float32 -> [T, out]; the next call may overwrite it."""
        return self.linear(x, head).float()

    @abstractmethod
    def embedding(self, ids: Tensor, table: PackedEmbedding) -> Tensor:
        """Rows `ids` [T] of `table` [rows, width] -> [T, width]."""

    @abstractmethod
    def take_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        """Rows `indices` [m] of x [T, width] -> [m, width]."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang and Sennrich, 2019).

        x [T, width], weight [width].
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds x to `residual` [T, width] in place and returns rms_norm(residual)."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of gate_up [T, 2 · width], gate first -> [T, width] (Shazeer, 2020)."""

    @abstractmethod
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
        """Rotates query and key, writes key and value to the cache, returns the rotated query.

        query [Tq, heads, dim] and key, value [T, kv_heads, dim] may be of different tokens, each
        with its positions, which are rows of the rotary table, float32 [positions, dim]: cos of
        dim / 2 angles, then sin. The halves (a, b) of a head become (a cos - b sin, b cos + a sin)
        (Su et al., 2021). With query_norm and key_norm [dim] each head is rms-normalised first.
        Token i of `key` goes to slot slot_mapping[i] of kv_layer, where
        slot = block · block_size + offset; slots are distinct. May overwrite query and key. On a
        GPU a slot of -1 is padding: nothing is written for that token.
        """

    @abstractmethod
    def plan_attention(
        self,
        cu_seqlens: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
        rows: Tensor | None = None,
    ) -> AttentionPlan:
        """Prepares, once for all layers of a step, the attention of a batch.

        Sequence i has queries [cu_seqlens[i], cu_seqlens[i + 1]) of the flat batch, at least one:
        the last tokens of its seq_lens[i] tokens. Its tokens lie in the blocks
        block_table[i, : ceil(seq_lens[i] / block_size)]; entries beyond may hold anything.
        cu_seqlens [n + 1], seq_lens [n], block_table [n, max_blocks]. With `rows` [n], the length
        and blocks of sequence i are in row rows[i] of seq_lens and block_table instead. On a GPU
        none of these may change before the plan was last used, and a sequence of length 0 is
        padding: its queries get zeros.
        """

    @abstractmethod
    def paged_attention(
        self,
        query: Tensor,
        kv_layer: KvLayer,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int = 0,
    ) -> Tensor:
        """Causal attention over the paged cache -> [T, heads, dim] (Kwon et al., 2023).

        softmax(scale · q kᵀ) v for a query at position p over the keys at positions <= p, and
        > p - sliding_window where that is not 0. query [T, heads, dim]; kv_layer already holds the
        keys of these queries; query head h reads KV head h // (heads / kv_heads). What lies in
        slots beyond a sequence's length, NaN included, has no effect.
        """

    @abstractmethod
    def mask_logits(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        """Makes tokens impossible, in place: their logits become -inf.

        Row rows[i] of `logits`, float32 [n, V], keeps token t where bit t mod 32 of
        allowed[i, t div 32] is set. rows [m], distinct; allowed int32 [m, ceil(V / 32)].
        """

    @abstractmethod
    def bias_logits(self, logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
        """Adds biases[i] to logits[rows[i], token_ids[i]], in place; -inf makes it impossible.

        logits float32 [n, V], rows and token_ids [e], biases float32 [e]. A place comes once; more
        often only if all its biases but one are -inf.
        """

    @abstractmethod
    def penalize(
        self,
        logits: Tensor,
        rows: Tensor,
        token_ids: Tensor,
        prompt_lens: Tensor,
        seq_lens: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        """Lowers, in place, the logits of tokens that a sequence already holds.

        A token seen in prompt or output has its logit divided by `repetition` where positive, else
        multiplied by it (Keskar et al., 2019); then one seen c > 0 times in the output loses
        presence + c · frequency. logits float32 [n, V]; the tokens of its row rows[i] are
        token_ids[i, : seq_lens[i]], of which the first prompt_lens[i] are its prompt. rows [m],
        distinct; token_ids int32 [m, most tokens of any], prompt_lens and seq_lens [m]; penalties
        float32 [m]; 1, 0 and 0 leave a row as it was, bit for bit.
        """

    def largest(self, logits: Tensor) -> Tensor:
        """The largest of each row of logits, float32 [n, V] -> [n]; NaN where there is one."""
        return logits.amax(dim=-1)

    @abstractmethod
    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Chooses a token for each row of logits, float32 [n, V] -> ids [n].

        A row with a NaN, or whose largest logit is not finite, gets -1. Else, where temperature <
        GREEDY_TEMPERATURE or top_p <= 0: the first of the largest logits. Else, in order, logits
        are divided by the temperature; min_p keeps tokens of at least min_p times the largest
        probability (Nguyen et al., 2024; 0 is off); top_k the k likeliest (Fan et al., 2018; 0 is
        off); top_p the likeliest whose probabilities, renormalised over what is left, first sum to
        top_p (Holtzman et al., 2020; 1 is off); equal logits rank by token id. Then the token is
        argmax(logit / temperature + gumbel) (Maddison et al., 2014), with the noise of
        kernels/noise.py: a pure function of (seed, position, token id). temperature, min_p, top_p
        float32 [n]; top_k, seeds, positions int64 [n].
        With `out`, int64 [n], that is where the ids go.
        """

    @abstractmethod
    def token_logprobs(
        self, logits: Tensor, chosen: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-softmax of logits, float32 [n, V], at chosen ids [n] and at the num_top likeliest.

        Returns chosen log-probabilities [n], and ids and log-probabilities [n, num_top], likeliest
        first, equal ones by token id. num_top may be 0.
        """
