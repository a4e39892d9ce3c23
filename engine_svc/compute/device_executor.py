"""The executor of a device: steps are queued, up to two at a time, and waited for later.

A step's tokens are appended to its rows on the device, so the next step can be planned, staged and
queued while it runs. Decode steps without more to them run as graphs.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from engine_svc.compute.decode_graphs import DecodeGraphs, capture_graphs
from engine_svc.compute.device_batch import DeviceBatch, DeviceStep
from engine_svc.compute.device_memory import max_graph_bytes, num_device_blocks
from engine_svc.compute.device_model import DeviceModel
from engine_svc.compute.device_sampler import DeviceSampler, PendingLogprobs, PendingTokens
from engine_svc.compute.devices import Device
from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.compute.grammar_rows import GrammarRows
from engine_svc.compute.launched_step import LaunchedStep
from engine_svc.compute.loading import load_decoder, max_model_len_of, sampling_kernels
from engine_svc.compute.memory import format_bytes, kv_cache_line, num_host_blocks
from engine_svc.compute.model.sharded_source import shard_of
from engine_svc.compute.model.weights import WeightFiles, open_source
from engine_svc.compute.persistent_batch import PromptTargets
from engine_svc.compute.prompt_scoring import MAX_ROWS_AT_ONCE
from engine_svc.compute.ranks import ONE_RANK, Ranks
from engine_svc.compute.warm_up import first_steps, largest_steps
from engine_svc.planning.step import StepPlan, StepResult
from engine_svc.planning.step_profile import StepProfile
from kernels import Kernels


class DeviceExecutor:
    """Owns a model on a device, its KV cache and the rows of the batch. Used by one thread."""

    max_steps_in_flight = 2

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        sampler: DeviceSampler,
        batch: DeviceBatch,
        num_threads: int = 1,
    ) -> None:
        self._device = device
        self._model = model
        self._sampler = sampler
        self._batch = batch
        self._num_threads = num_threads
        self._graphs = DecodeGraphs({})
        self._grammars: GrammarRows | None = None
        self._profile = StepProfile()

    @classmethod
    def load(
        cls,
        model: Path,
        config: ExecutorConfig,
        device: Device,
        kernels: Kernels,
        report: Callable[[str], None],
        num_threads: int = 1,
        ranks: Ranks = ONE_RANK,
    ) -> "DeviceExecutor":
        """Loads an HF directory or a GGUF file, or a rank's share of it; measures the largest step,
        captures graphs.

        `report` gets a line now and then. StartupError says in one line what is wrong with the
        model or why there is not enough memory for it.
        """
        return cls.of_files(open_source(model), config, device, kernels, report, num_threads, ranks)

    @classmethod
    def of_files(
        cls,
        files: WeightFiles,
        config: ExecutorConfig,
        device: Device,
        kernels: Kernels,
        report: Callable[[str], None],
        num_threads: int = 1,
        ranks: Ranks = ONE_RANK,
    ) -> "DeviceExecutor":
        """As `load`, of a model that is open."""
        report(kernels.description)
        source, vocab = shard_of(files, ranks.rank, ranks.size)
        max_model_len = max_model_len_of(config, source.config)
        num_blocks = 0
        if not device.has_own_memory:
            num_blocks = num_host_blocks(config, source, kernels, max_model_len, ranks.size)
        with device.computing():
            decoder = load_decoder(source, kernels, max_model_len, report, ranks, vocab)
            batch = DeviceBatch(
                device,
                config.max_num_seqs,
                max_model_len,
                config.block_size,
                vocab.whole_size,
                config.max_num_batched_tokens,
            )
            sampling = sampling_kernels(kernels, ranks, vocab)
            sampler = DeviceSampler(sampling, device, batch.tables, config.max_num_seqs)
        on_device = DeviceModel(
            device, kernels, source.config, decoder, batch.tables, config.block_size
        )
        executor = cls(device, on_device, sampler, batch, num_threads)
        report(f"next: a step of {config.max_num_batched_tokens} tokens, the largest, then graphs")
        measured = executor._run_largest(config, ranks)
        num_blocks = ranks.least(num_blocks or measured)
        on_device.use(num_blocks)
        report(kv_cache_line(num_blocks, config.block_size, on_device.block_bytes, ranks.size))
        kernels.keep_addresses()
        executor._capture(config, report, ranks)
        if device.has_own_memory:
            executor.warm_up(config)
        return executor

    @property
    def num_blocks(self) -> int:
        return self._model.num_blocks

    @property
    def block_size(self) -> int:
        return self._batch.host.block_size

    @property
    def vocab_size(self) -> int:
        return self._batch.host.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._batch.host.max_model_len

    def _run_largest(self, config: ExecutorConfig, ranks: Ranks) -> int:
        """Runs the largest steps, which no later one needs more memory than.

        Returns how many KV blocks there is room for beside it; 0 where it is not measured.
        """
        plans, num_blocks = largest_steps(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            config.block_size,
        )
        self._model.use(num_blocks)
        self._device.forget_peak()
        for plan in plans:
            self.execute(plan)
        self._model.use(0)
        if not self._device.has_own_memory:
            return 0
        memory = self._device.memory()
        self._device.forget_peak()
        return num_device_blocks(
            memory,
            num_blocks * self._model.block_bytes,
            config.kv_memory_bytes // ranks.size,
            self._model.block_bytes,
            config.max_num_seqs * -(-self.max_model_len // config.block_size),
        )

    def _capture(self, config: ExecutorConfig, report: Callable[[str], None], ranks: Ranks) -> None:
        """Captures the graphs of decode steps, within a bound of memory."""
        free = self._device.memory().free if self._device.has_own_memory else 0
        with self._device.computing():
            self._graphs, num_bytes = capture_graphs(
                self._device,
                self._batch,
                self._model.logits,
                self._sampler,
                min(config.max_num_seqs, config.max_num_batched_tokens),
                max_graph_bytes(free),
                ranks,
            )
        sizes = self._graphs.sizes
        report(
            f"graphs: {len(sizes)} of decode steps of {sizes[0]} to {sizes[-1]} sequences, "
            f"{format_bytes(num_bytes)} of at most {format_bytes(max_graph_bytes(free))}"
        )

    def warm_up(self, config: ExecutorConfig) -> None:
        """Steps of each kind, so that no request waits for kernels to be compiled."""
        for plan in first_steps(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            config.block_size,
        ):
            self.execute(plan)

    def follow_grammars(self, compiler: GrammarCompiler) -> None:
        """Once, before the first step: rows may have grammars from now on."""
        self.follow(GrammarRows(compiler, self._num_threads))

    def follow(self, grammars: GrammarRows) -> None:
        """As `follow_grammars`."""
        self._grammars = grammars

    def profile_into(self, profile: StepProfile) -> None:
        """Tells `profile` the laps of each step from now on: how long the host takes to queue it,
        waits for it, and lists what came of it."""
        self._profile = profile

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queues a step, and the copies of its results.

        After an exception here or from `wait` the plan's rows hold nothing of use.
        """
        assert not any(step.draft_token_ids for step in plan.steps), "drafts need the host's tokens"
        with self._device.computing():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        step = self._batch.apply(plan, self._graphs.padded_size)
        layout = step.layout
        if self._grammars is not None:
            for start in plan.starts:
                self._grammars.start(start)
        self._profile.lap("stage")
        sampled: PendingTokens | None = None
        scored: list[PendingLogprobs] = []
        grammars: GrammarRows | None = None
        if step.padded:
            sampled, grammars = self._run_graph(step)
        elif plan.steps:
            hidden = self._model.hidden(step.tensors)
            self._profile.lap("model")
            if layout.prompt_targets is not None:
                scored = self._score_prompts(hidden, layout.prompt_targets)
            if len(layout.sampled_rows):
                sampled, grammars = self._sample_eagerly(step, hidden)
        pending = LaunchedStep(
            self._device.mark(),
            self._batch.host,
            self._profile,
            layout.sampled_rows,
            layout.sampled_positions,
            sampled,
            grammars,
            layout.prompt_targets,
            scored,
        )
        self._profile.lap("sample")
        return pending

    def _run_graph(self, step: DeviceStep) -> tuple[PendingTokens, GrammarRows | None]:
        graph = self._graphs[step.padded]
        graph.model.replay()
        self._profile.lap("model")
        num_rows = len(step.layout.sampled_rows)
        return self._sample(step, graph.logits[:num_rows], graph.draw.replay)

    def _sample_eagerly(
        self, step: DeviceStep, hidden: Tensor
    ) -> tuple[PendingTokens, GrammarRows | None]:
        num_rows = len(step.layout.sampled_rows)
        logits = self._model.logits_after(hidden, step.tensors.sample_places)
        return self._sample(
            step, logits, lambda: self._sampler.draw(logits, step.tensors, num_rows)
        )

    def _sample(
        self, step: DeviceStep, logits: Tensor, draw: Callable[[], None]
    ) -> tuple[PendingTokens, GrammarRows | None]:
        """Samples after `logits` [s, vocab_size]: by `draw` if no row asks for more.

        Returns the grammars too if any row has one. Their masks are filled here, while the device
        computes the logits.
        """
        rows, mask = step.layout.sampled_rows, None
        if self._grammars is not None:
            mask = self._grammars.mask(rows.tolist())
        if mask is None and not self._sampler.takes_options(step.sampling):
            draw()
            return self._sampler.drawn(len(rows)), None
        sampled = self._sampler.draw_with_options(logits, step, mask)
        return sampled, None if mask is None else self._grammars

    def _score_prompts(self, hidden: Tensor, targets: PromptTargets) -> list[PendingLogprobs]:
        """See prompt_scoring.py."""
        scored = []
        if not targets.num_top:
            return scored
        places, token_ids = self._device.upload(
            [targets.kept_places.astype(np.int32), targets.token_ids]
        )
        for begin in range(0, len(targets.num_top), MAX_ROWS_AT_ONCE):
            part = slice(begin, begin + MAX_ROWS_AT_ONCE)
            logits = self._model.logits_after(hidden, places[part])
            scored.append(self._sampler.score(logits, token_ids[part], targets.num_top[part]))
        self._profile.lap("score prompts")
        return scored
