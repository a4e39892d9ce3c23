"""The compute half of the engine: a loaded model that turns each StepPlan into a StepResult."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.compute.grammar_rows import GrammarRows
from engine_svc.compute.kv_storage import KvStorage, kv_block_bytes
from engine_svc.compute.loading import (
    chosen_kernels,
    load_decoder,
    max_model_len_of,
    sampling_kernels,
)
from engine_svc.compute.memory import kv_cache_line, num_host_blocks
from engine_svc.compute.model.sharded_source import shard_of
from engine_svc.compute.model.weights import open_source
from engine_svc.compute.model_runner import ModelRunner, make_runner
from engine_svc.compute.persistent_batch import PersistentBatch
from engine_svc.compute.prompt_scoring import score_prompts
from engine_svc.compute.ranks import ONE_RANK, Ranks
from engine_svc.compute.sampler import Sampler
from engine_svc.compute.verification import keep_accepted
from engine_svc.planning.step import (
    ComputedStep,
    PromptLogprobs,
    RowStart,
    RowStep,
    SampledToken,
    SamplingParameters,
    StepPlan,
    StepResult,
)
from engine_svc.planning.step_profile import StepProfile

# OMP_NUM_THREADS, else one per core. Read before an engine changes it.
_MACHINE_THREADS = torch.get_num_threads()


class Executor:
    """Owns a model, its KV cache and the rows of the running batch. Used by one thread."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        batch: PersistentBatch,
        num_blocks: int,
        num_threads: int = 1,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._batch = batch
        self._num_blocks = num_blocks
        self._num_threads = num_threads
        self._grammars: GrammarRows | None = None
        self._profile = StepProfile()

    @classmethod
    def load(
        cls,
        model: Path,
        config: ExecutorConfig,
        report: Callable[[str], None],
        ranks: Ranks = ONE_RANK,
    ) -> "Executor":
        """Loads an HF directory or a GGUF file, or a rank's share of it, and computes a first step.

        `report` gets a line now and then. StartupError says in one line what is wrong with the
        model or why there is not enough memory for it.
        """
        num_threads = num_threads_of(config, ranks.size)
        kernels = chosen_kernels(config, torch.device("cpu"), num_threads)
        # Kernels with threads of their own need no others beside them.
        torch.set_num_threads(num_threads if kernels.uses_torch_threads else 1)
        report(kernels.description)
        source, vocab = shard_of(open_source(model), ranks.rank, ranks.size)
        model_config = source.config
        max_model_len = max_model_len_of(config, model_config)
        num_blocks = num_host_blocks(config, source, kernels, max_model_len, ranks.size)
        num_blocks = ranks.least(num_blocks)
        with torch.inference_mode():
            decoder = load_decoder(source, kernels, max_model_len, report, ranks, vocab)
            kv = KvStorage.allocate(kernels, model_config, num_blocks, config.block_size)
            batch = PersistentBatch(
                config.max_num_seqs,
                max_model_len,
                config.block_size,
                vocab.whole_size,
                config.max_num_batched_tokens,
            )
        runner = make_runner(kernels, decoder, kv, batch.staged, config.max_logit_rows)
        sampler = Sampler(sampling_kernels(kernels, ranks, vocab))
        executor = cls(runner, sampler, batch, num_blocks, num_threads)
        block_bytes = kv_block_bytes(kernels, model_config, config.block_size)
        report(kv_cache_line(num_blocks, config.block_size, block_bytes, ranks.size))
        executor._warm_up()
        return executor

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._batch.block_size

    @property
    def max_steps_in_flight(self) -> int:
        return 1

    @property
    def vocab_size(self) -> int:
        return self._batch.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._batch.max_model_len

    def follow_grammars(self, compiler: GrammarCompiler) -> None:
        """Once, before the first step: rows may have grammars from now on."""
        self.follow(GrammarRows(compiler, self._num_threads))

    def follow(self, grammars: GrammarRows) -> None:
        """As `follow_grammars`."""
        self._grammars = grammars

    def profile_into(self, profile: StepProfile) -> None:
        """Tells `profile` the laps of each step from now on, and the ops they consist of."""
        self._profile = profile
        self._runner.profile_ops()
        profile.take_parts = lambda: {"model": self._runner.take_op_seconds()}

    def launch(self, plan: StepPlan) -> ComputedStep:
        """As `execute`: a step is computed by the thread that launches it."""
        return ComputedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes a step. After an exception the plan's rows hold nothing of use."""
        if self._runner.uses_torch:
            with torch.inference_mode():
                return self._execute(plan)
        return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        layout = self._batch.apply(plan)
        if self._grammars is not None:
            for start in plan.starts:
                self._grammars.start(start)
        if not plan.steps:
            return StepResult()
        self._profile.lap("stage")
        self._runner.forward(layout.counts, layout.samples_after_all)
        self._profile.lap("model")
        of_prompts: tuple[PromptLogprobs, ...] = ()
        if layout.prompt_targets is not None:
            of_prompts = score_prompts(self._runner, self._sampler, layout.prompt_targets)
            self._profile.lap("score prompts")
        sampled: list[SampledToken] = []
        for begin in range(0, len(layout.sample_places), self._runner.max_rows):
            part = slice(begin, begin + self._runner.max_rows)
            sampled += self._sample(
                layout.sample_places[part],
                layout.sampled_rows[part],
                layout.sampled_positions[part],
            )
        tokens = keep_accepted(plan.steps, sampled) if layout.has_drafts else tuple(sampled)
        self._profile.lap("sample")
        return StepResult(tokens, of_prompts)

    def _sample(
        self, places: np.ndarray, rows: np.ndarray, positions: np.ndarray
    ) -> Sequence[SampledToken]:
        """One token each for `rows`, at `positions`, after kept tokens `places`; all int64 [s]."""
        logits = self._runner.logits(places)
        self._profile.lap("model")
        sampling = self._batch.sampling_inputs(rows, positions)
        mask = None if self._grammars is None else self._grammars.mask(rows.tolist())
        if mask is not None:
            sampling = replace(sampling, masks=(mask, *sampling.masks))
        sampled = self._sampler.sample(logits, sampling)
        token_ids = sampled.token_ids.tolist()
        self._batch.append(rows, positions, token_ids)
        errors, completed = list(sampled.errors), [False] * len(rows)
        if self._grammars is not None and mask is not None:
            completed = self._grammars.accept(rows.tolist(), token_ids, errors)
        return [
            SampledToken(row, token_id, None if error else logprobs, error, completes)
            for row, token_id, logprobs, error, completes in zip(
                rows.tolist(), token_ids, sampled.logprobs, errors, completed, strict=True
            )
        ]

    def _warm_up(self) -> None:
        """One token through all the code, so that the first request does not pay for first calls.

        It lies in block 0, whose contents nobody reads before writing them.
        """
        start = RowStart(0, [0], 1, SamplingParameters(max_tokens=1), [])
        self.execute(StepPlan([start], [RowStep(0, 0, 1, [0], samples=True)]))


def num_threads_of(config: ExecutorConfig, num_ranks: int = 1) -> int:
    """How many threads an engine, or each of its ranks, computes with."""
    num_threads = config.num_threads or _MACHINE_THREADS // config.num_local_engines
    return max(1, num_threads // num_ranks)
