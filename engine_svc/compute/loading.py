"""What every executor loads: its kernels, and a model's decoder on their device."""

from collections.abc import Callable

import torch

from engine_svc.compute.executor_config import ExecutorConfig
from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.decoder import Decoder
from engine_svc.compute.model.rotary import cos_sin_table
from engine_svc.compute.model.sharded_source import VocabShard
from engine_svc.compute.model.weights import WeightSource, load_weights
from engine_svc.compute.parallel_device_sampling import DeviceParallelSampling
from engine_svc.compute.parallel_sampling import ParallelSampling
from engine_svc.compute.ranks import ONE_RANK, Ranks
from kernels import KernelConfig, Kernels, select_kernels
from protos.wire.errors import StartupError


def chosen_kernels(config: ExecutorConfig, device: torch.device, num_threads: int) -> Kernels:
    """The kernels that a config asks for. StartupError names the flags where there are no such."""
    wanted = KernelConfig(
        weights=config.dtype,
        activations=config.activations,
        kv=config.kv_dtype,
        implementation=config.cpu_kernels if device.type == "cpu" else "auto",
        num_threads=num_threads,
        batch_invariant=config.batch_invariant,
    )
    try:
        return select_kernels(device, wanted)
    except ValueError as error:
        raise StartupError(f"{error}{_named_flags(config)}") from error


def _named_flags(config: ExecutorConfig) -> str:
    """Those that kernels are chosen by and that are not left to us, in parentheses."""
    flags = {
        "--device": config.device,
        "--cpu-kernels": config.cpu_kernels,
        "--dtype": config.dtype,
        "--activations": config.activations,
        "--kv-dtype": config.kv_dtype,
    }
    named = [f"{flag} {value}" for flag, value in flags.items() if value != "auto"]
    return f" ({', '.join(named)})" if named else ""


def max_model_len_of(config: ExecutorConfig, model_config: ModelConfig) -> int:
    """The most tokens of a sequence. StartupError for more than the model was made for."""
    if config.max_model_len > model_config.max_model_len:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, "
            f"but the model was made for at most {model_config.max_model_len} tokens"
        )
    return config.max_model_len or model_config.max_model_len


def load_decoder(
    source: WeightSource,
    kernels: Kernels,
    max_model_len: int,
    report: Callable[[str], None],
    ranks: Ranks = ONE_RANK,
    vocab: VocabShard | None = None,
) -> Decoder:
    """Reads all weights, in inference mode; `report` gets a line now and then.

    Several `ranks` each read what `source` and `vocab` give of them; all are done with it then.
    """
    config = source.config
    weights = load_weights(source, kernels, kernels.dtype, report)
    table = cos_sin_table(
        config.rope, config.head_dim, max_model_len, source.rope_frequency_factors()
    )
    # One that failed is missed here, by the hosts: devices would wait for it for ever.
    ranks.least(0)
    return Decoder(kernels, config, weights, table.to(kernels.device), ranks, vocab)


def sampling_kernels(
    kernels: Kernels, ranks: Ranks, vocab: VocabShard
) -> Kernels | ParallelSampling:
    """What has the sampling ops, for logits of the decoder's."""
    if ranks.size == 1:
        return kernels
    kind = ParallelSampling if kernels.device.type == "cpu" else DeviceParallelSampling
    return kind(kernels, ranks, vocab)
