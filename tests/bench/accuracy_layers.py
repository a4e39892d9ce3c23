"""How far each layer's output is from the float32 reference's, and which channels are to blame."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_svc.compute.kv_storage import KvStorage
from engine_svc.compute.model.decoder import Decoder
from engine_svc.compute.model.rotary import cos_sin_table
from engine_svc.compute.model.weights import load_weights, open_source
from engine_svc.compute.model_runner import EagerRunner
from engine_svc.compute.persistent_batch import PersistentBatch
from engine_svc.planning.step import RowStart, RowStep, SamplingParameters, StepPlan
from engine_svc.settings import Settings
from kernels import KernelConfig, Kernels, select_kernels
from tests.bench.accuracy_reference import ReferenceModel

_NUM_WORST = 3


@dataclass(frozen=True, slots=True)
class LayerError:
    """Root mean squares over tokens; each token counts alike, however large its values are.

    own: of the difference, over what the layer adds, given the reference's input. accumulated: of
    the difference, over the residual stream, after all layers so far. worst: the channels with the
    largest shares of the own squared error.
    """

    own: float
    accumulated: float
    worst: Sequence[tuple[int, float]]


def layer_errors(settings: Settings, token_ids: Sequence[int]) -> list[LayerError]:
    """One entry per layer, for one window."""
    expected = ReferenceModel(settings.model).states(token_ids)
    model = _EagerModel(settings, len(token_ids))
    free, forced = model.states(token_ids, None), model.states(token_ids, expected)
    return [
        _error(expected[index], expected[index + 1], forced[index], free[index])
        for index in range(len(expected) - 1)
    ]


class _EagerModel:
    """The engine's model, run op by op, so that what lies between its layers can be seen."""

    def __init__(self, settings: Settings, num_tokens: int) -> None:
        source = open_source(settings.model)
        config = source.config
        self._kernels = select_kernels(
            torch.device("cpu"),
            KernelConfig(
                weights=settings.dtype,
                activations=settings.activations,
                kv=settings.kv_dtype,
                implementation=settings.cpu_kernels,
                num_threads=settings.num_threads or torch.get_num_threads(),
            ),
        )
        self._config = config
        self._weights = load_weights(source, self._kernels, self._kernels.dtype, lambda line: None)
        self._table = cos_sin_table(
            config.rope, config.head_dim, num_tokens, source.rope_frequency_factors()
        )
        block_size = settings.block_size
        self._blocks = list(range(-(-num_tokens // block_size)))
        self._kv = KvStorage.allocate(self._kernels, config, len(self._blocks), block_size)
        self._batch = PersistentBatch(1, num_tokens, block_size, config.vocab_size, num_tokens)

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int], expected: Sequence[Tensor] | None) -> list[Tensor]:
        """The residual stream after each layer, [T, hidden]; `expected` as in _ObservedKernels."""
        observed = _ObservedKernels(self._kernels, expected)
        decoder = Decoder(observed, self._config, self._weights, self._table)  # type: ignore[arg-type]
        runner = EagerRunner(decoder, self._kv, self._batch.staged, 1)
        sampling = SamplingParameters(max_tokens=1, prompt_logprobs=True)
        start = RowStart(0, token_ids, len(token_ids), sampling, self._blocks)
        # Who asks about the prompt keeps every token to the end of the last layer.
        step = RowStep(0, 0, len(token_ids), [], samples=False, prompt_logprobs=True)
        runner.forward(self._batch.apply(StepPlan([start], [step])).counts, wants_all=False)
        return observed.states


def _error(before: Tensor, expected: Tensor, forced: Tensor, free: Tensor) -> LayerError:
    added = (expected - before).square().sum(-1, keepdim=True)
    own = (forced - expected).square() / added
    accumulated = (free - expected).square().sum(-1) / expected.square().sum(-1)
    of_channels = own.mean(0)
    worst = of_channels.topk(_NUM_WORST)
    shares = worst.values / of_channels.sum()
    return LayerError(
        own=float(own.sum(-1).mean().sqrt()),
        accumulated=float(accumulated.mean().sqrt()),
        worst=list(zip(worst.indices.tolist(), shares.tolist(), strict=True)),
    )


class _ObservedKernels:
    """Kernels that keep the residual stream after each layer.

    It passes through `add_rms_norm` twice a layer. Where `expected` is given, the state before the
    first layer and after each, it takes the place of the stream as soon as that is kept.
    """

    def __init__(self, kernels: Kernels, expected: Sequence[Tensor] | None) -> None:
        self.states: list[Tensor] = []
        self._kernels = kernels
        self._expected = expected
        self._num_additions = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # The decoder's only call: of the embedding, before the first layer.
        if self._expected is not None:
            x.copy_(self._expected[0])
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = self._kernels.add_rms_norm(x, residual, weight, eps)
        self._num_additions += 1
        if self._num_additions % 2:
            return normed
        self.states.append(residual.float().clone())
        if self._expected is None:
            return normed
        residual.copy_(self._expected[len(self.states)])
        return self._kernels.rms_norm(residual, weight, eps)
