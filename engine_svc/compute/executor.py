"""The compute half of the engine: a loaded model that turns each StepPlan into a StepResult."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.compute.grammar_rows import GrammarRows
from engine_svc.compute.kv_storage import KvLayout
from engine_svc.compute.memory import (
    format_bytes,
    free_memory_bytes,
    rotary_bytes,
    step_bytes,
    weight_bytes,
)
from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.decoder import Decoder
from engine_svc.compute.model.rotary import cos_sin_table
from engine_svc.compute.model.weights import load_weights, open_source
from engine_svc.compute.prompt_scoring import MAX_ROWS_AT_ONCE, score_prompts
from engine_svc.compute.sampler import SampledBatch, Sampler
from engine_svc.compute.step_tensors import PersistentBatch, StepInputs
from engine_svc.compute.verification import keep_accepted
from engine_svc.planning.step import (
    PromptLogprobs,
    RowStart,
    RowStep,
    SampledToken,
    SamplingError,
    SamplingParameters,
    StepPlan,
    StepResult,
)
from kernels import select_kernels
from protos.wire.errors import StartupError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of the memory left beside the model, what the KV caches of a machine's engines take when not told:
# the rest of the line, and other programs, need some too.
_KV_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """How a model is run. 0 lets the executor choose, where said."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 0  # the model's own
    block_size: int = 16
    kv_memory_bytes: int = 0  # a share of the free memory
    num_threads: int = 0  # torch's own choice: OMP_NUM_THREADS, else one per core
    num_local_engines: int = 1  # with which the free memory and the cores are shared
    dtype: str = "float32"  # or bfloat16


class Executor:
    """Owns a model, its KV cache and the rows of the running batch. Used by one thread."""

    def __init__(
        self, decoder: Decoder, sampler: Sampler, kv_cache: Tensor, batch: PersistentBatch
    ) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._kv_cache = kv_cache
        self._batch = batch
        self._grammars: GrammarRows | None = None

    @classmethod
    def load(cls, model: Path, config: ExecutorConfig, report: Callable[[str], None]) -> "Executor":
        """Loads an HF directory or a GGUF file and computes a first step.

        `report` gets a line now and then. StartupError says in one line what is wrong with the
        model or why there is not enough memory for it.
        """
        own_threads = max(1, torch.get_num_threads() // config.num_local_engines)
        torch.set_num_threads(config.num_threads or own_threads)
        kernels = select_kernels(torch.device("cpu"))
        dtype = _DTYPES[config.dtype]
        source = open_source(model)
        model_config = source.config
        max_model_len = _max_model_len(config, model_config)
        layout = KvLayout.of(model_config, config.block_size, dtype)
        num_blocks = _num_blocks(config, model_config, layout, max_model_len, dtype)
        with torch.inference_mode():
            weights = load_weights(source, kernels, dtype, report)
            table = cos_sin_table(
                model_config.rope,
                model_config.head_dim,
                max_model_len,
                source.rope_frequency_factors(),
            )
            kv_cache = layout.allocate(num_blocks)
        executor = cls(
            Decoder(kernels, model_config, weights, table),
            Sampler(kernels),
            kv_cache,
            PersistentBatch(
                config.max_num_seqs, max_model_len, config.block_size, model_config.vocab_size
            ),
        )
        report(
            f"KV cache: {num_blocks} blocks of {config.block_size} tokens, "
            f"{format_bytes(num_blocks * layout.block_bytes)}"
        )
        executor._warm_up()
        return executor

    @property
    def num_blocks(self) -> int:
        return int(self._kv_cache.shape[2])

    @property
    def block_size(self) -> int:
        return int(self._kv_cache.shape[3])

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._batch.max_model_len

    def follow_grammars(self, compiler: GrammarCompiler) -> None:
        """Once, before the first step: rows may have grammars from now on."""
        self._grammars = GrammarRows(compiler, torch.get_num_threads())

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Computes a step. After an exception the plan's rows hold nothing of use."""
        inputs = self._batch.apply(plan)
        if self._grammars is not None:
            for start in plan.starts:
                self._grammars.start(start)
        if not len(inputs.token_ids):
            return StepResult()
        hidden = self._decoder.forward(inputs, self._kv_cache)
        of_prompts: tuple[PromptLogprobs, ...] = ()
        if inputs.prompt_targets is not None:
            of_prompts = score_prompts(self._decoder, self._sampler, hidden, inputs.prompt_targets)
            hidden = hidden[inputs.sample_places]
        if not len(hidden):
            return StepResult((), of_prompts)
        return StepResult(self._sample(plan, inputs, self._decoder.logits(hidden)), of_prompts)

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, logits: Tensor
    ) -> tuple[SampledToken, ...]:
        rows = np.array([step.row for step in plan.steps], np.int64)
        rows = rows[inputs.sampled_sequences.numpy()]
        seq_lens = inputs.sampled_lens.numpy()
        sampling = self._batch.sampling_inputs(rows, seq_lens)
        mask = None if self._grammars is None else self._grammars.mask(rows.tolist())
        if mask is not None:
            sampling = replace(sampling, masks=(mask, *sampling.masks))
        sampled = self._sampler.sample(logits, sampling)
        self._batch.append(rows, seq_lens, sampled.token_ids.numpy())
        errors, completed = list(sampled.errors), [False] * len(rows)
        if self._grammars is not None and mask is not None:
            completed = self._grammars.accept(rows.tolist(), sampled.token_ids.tolist(), errors)
        return keep_accepted(plan.steps, _sampled_tokens(rows, sampled, errors, completed))

    def _warm_up(self) -> None:
        """One token through all the code, so that the first request does not pay for first calls.

        It lies in block 0, whose contents nobody reads before writing them.
        """
        start = RowStart(0, [0], 1, SamplingParameters(max_tokens=1), [])
        self.execute(StepPlan([start], [RowStep(0, 0, 1, [0], samples=True)]))


def _sampled_tokens(
    rows: np.ndarray,
    sampled: SampledBatch,
    errors: Sequence[SamplingError | None],
    completed: Sequence[bool],
) -> tuple[SampledToken, ...]:
    return tuple(
        SampledToken(row, token_id, None if error else logprobs, error, completes)
        for row, token_id, logprobs, error, completes in zip(
            rows.tolist(),
            sampled.token_ids.tolist(),
            sampled.logprobs,
            errors,
            completed,
            strict=True,
        )
    )


def _max_model_len(config: ExecutorConfig, model_config: ModelConfig) -> int:
    if config.max_model_len > model_config.max_model_len:
        raise StartupError(
            f"max_model_len is {config.max_model_len}, "
            f"but the model was made for at most {model_config.max_model_len} tokens"
        )
    return config.max_model_len or model_config.max_model_len


def _num_blocks(
    config: ExecutorConfig,
    model_config: ModelConfig,
    layout: KvLayout,
    max_model_len: int,
    dtype: torch.dtype,
) -> int:
    """How many KV blocks there is room for beside the weights."""
    model_bytes = weight_bytes(model_config, dtype) + step_bytes(
        model_config,
        dtype,
        config.max_num_batched_tokens,
        max(config.max_num_seqs, MAX_ROWS_AT_ONCE),
    )
    model_bytes += rotary_bytes(model_config, max_model_len)
    free = free_memory_bytes()
    share = _KV_SHARE / config.num_local_engines
    kv_bytes = config.kv_memory_bytes or int(max(0, free - model_bytes) * share)
    needed = model_bytes + max(kv_bytes, layout.block_bytes)
    if needed > free:
        raise StartupError(
            f"not enough memory: {format_bytes(model_bytes)} for the model and "
            f"{format_bytes(needed - model_bytes)} for the KV cache are needed, "
            f"{format_bytes(free)} are free"
        )
    num_blocks = kv_bytes // layout.block_bytes
    if not num_blocks:
        raise StartupError(
            f"the KV cache is given {format_bytes(kv_bytes)}, "
            f"but one block takes {format_bytes(layout.block_bytes)}"
        )
    if config.kv_memory_bytes:
        return num_blocks
    most_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    return min(num_blocks, most_useful)
