"""The least time that a model's steps can take on a device: bytes and FLOPs against its figures.

    python -m tests.bench roofline --model llama-3.1-8b --device h200 --weights fp8

prints what each op of one decode step reads, writes and computes (`--batch`, `--context`: the first
of each), then for every batch and context the time per output token (TPOT) and tokens per second of
all sequences together, and for every context the time to the first token of a prompt that long
alone (TTFT) and the largest batch whose KV cache fits. Nothing is taken off for launches or for
what memory and products fall short of in practice; `--memory-share` and `--compute-share` do that.
On a GPU the ops of that decode step are measured too, with random weights, and stand beside.
"""

import argparse
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine_svc.compute.model.config import LLAMA, QWEN3, ModelConfig, RopeConfig, read_hf_config
from engine_svc.compute.model.gguf_file import GgufFile
from kernels.gpu.kv_cache import KvFormat
from protos.wire.errors import StartupError
from tests.bench.roofline_devices import DEVICES, DeviceFigures
from tests.bench.roofline_measured import measured_seconds
from tests.bench.roofline_ops import WEIGHTS, Op, Sequences, StepOps, WeightFormat, merged

BLOCK_SIZE = 16
# Of the device's memory; the rest is the CUDA context's, the graphs' and fragmentation's.
MEMORY_SHARE = 0.92


def model_config(
    architecture: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    ties: bool = False,
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        rms_norm_eps=1e-5,
        max_model_len=131072,
        rope=RopeConfig(theta=500000.0),
        sliding_windows=(0,) * layers,
        tie_word_embeddings=ties,
        qk_norm=architecture == QWEN3,
    )


# The shapes of the models' config.json files.
MODELS = {
    "smollm2-135m": model_config(LLAMA, 576, 1536, 30, (9, 3, 64), 49152, ties=True),
    "llama-3.2-1b": model_config(LLAMA, 2048, 8192, 16, (32, 8, 64), 128256, ties=True),
    "llama-3.1-8b": model_config(LLAMA, 4096, 14336, 32, (32, 8, 128), 128256),
    "llama-3.1-70b": model_config(LLAMA, 8192, 28672, 80, (64, 8, 128), 128256),
    "qwen3-8b": model_config(QWEN3, 4096, 12288, 36, (32, 8, 128), 151936),
    "qwen3-32b": model_config(QWEN3, 5120, 25600, 64, (64, 8, 128), 151936),
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a device, with at most `max_tokens` tokens in a step."""

    config: ModelConfig
    device: DeviceFigures
    weights: WeightFormat
    kv_format: KvFormat
    max_tokens: int = 8192

    @property
    def ops(self) -> StepOps:
        return StepOps(self.config, self.weights, self.kv_format)

    def decode_ops(self, batch: int, context: int) -> list[Op]:
        """A step of `batch` sequences whose token is the last of `context`."""
        return list(self.ops.of(Sequences(batch, 1, context - 1)))

    def decode_seconds(self, batch: int, context: int) -> float:
        """TPOT."""
        return sum(op.seconds(self.device) for op in self.decode_ops(batch, context))

    def prefill_seconds(self, prompt: int) -> float:
        """TTFT: a prompt alone, in chunks as large as a step allows."""
        seconds = 0.0
        for start in range(0, prompt, self.max_tokens):
            size = min(self.max_tokens, prompt - start)
            kept = int(start + size == prompt)
            step = self.ops.of(Sequences(1, size, start, kept))
            seconds += sum(op.seconds(self.device) for op in step)
        return seconds

    def largest_batch(self, context: int) -> int:
        """Sequences whose KV cache fits beside the weights and the results of the largest step."""
        ops = self.ops
        room = MEMORY_SHARE * self.device.memory_bytes - ops.weight_bytes - self._result_bytes()
        sequence_bytes = -(-context // BLOCK_SIZE) * BLOCK_SIZE * ops.kv_token_bytes
        return max(0, int(room // sequence_bytes))

    def _result_bytes(self) -> int:
        """Two of each result, 16 bits an element: what ResultBuffers holds, but for the logits."""
        config = self.config
        widths = 3 * config.hidden_size + 3 * config.intermediate_size
        widths += 3 * config.query_size + 2 * config.kv_size
        return 2 * 2 * self.max_tokens * widths


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "roofline",
        help=__doc__.splitlines()[0],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=read_config,
        default="llama-3.1-8b",
        help=f"a GGUF file, a Hugging Face directory, or one of {', '.join(MODELS)}",
    )
    parser.add_argument("--device", default="h200", choices=DEVICES)
    parser.add_argument(
        "--weights", type=weight_formats, default="bf16", help=f"some of {','.join(WEIGHTS)}"
    )
    parser.add_argument(
        "--kv", default=KvFormat.BFLOAT16.value, choices=[kind.value for kind in KvFormat]
    )
    parser.add_argument("--batch", type=numbers, default="1,16,64,256")
    parser.add_argument("--context", type=numbers, default="512,4096,32768")
    parser.add_argument("--max-num-batched-tokens", type=number, default=8192)
    parser.add_argument("--memory-share", type=share, default=1.0, help="of the bandwidth")
    parser.add_argument("--compute-share", type=share, default=1.0, help="of the products")
    parser.add_argument("--markdown", action="store_true", help="the README's tables, no others")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    figures, batches, contexts = DEVICES[arguments.device], arguments.batch, arguments.context
    device = replace(
        figures,
        bytes_per_second=figures.bytes_per_second * arguments.memory_share,
        flops=figures.flops * arguments.compute_share,
    )
    rooflines = [
        Roofline(
            arguments.model,
            device,
            weights,
            KvFormat(arguments.kv),
            arguments.max_num_batched_tokens,
        )
        for weights in arguments.weights
    ]
    if not arguments.markdown:
        for roofline in rooflines:
            print_ops(roofline, batches[0], contexts[0])
    print(markdown(rooflines, batches, contexts))


def read_config(model: str) -> ModelConfig:
    """Of an argument: as the next ones, ArgumentTypeError for what is none."""
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    try:
        return read_hf_config(path) if path.is_dir() else GgufFile(path).config
    except StartupError as error:
        raise ArgumentTypeError(str(error)) from error


def weight_formats(text: str) -> list[WeightFormat]:
    unknown = [name for name in text.split(",") if name not in WEIGHTS]
    if unknown:
        raise ArgumentTypeError(f"there is no {unknown[0]!r}, only {', '.join(WEIGHTS)}")
    return [WEIGHTS[name] for name in text.split(",")]


def number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"must be a number of at least 1, not {text!r}")
    return int(text)


def numbers(text: str) -> list[int]:
    return [number(part) for part in text.split(",")]


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise ArgumentTypeError(f"must be above 0 and at most 1, not {text!r}")
    return value


def print_ops(roofline: Roofline, batch: int, context: int) -> None:
    """What each op of one decode step takes; on a GPU, beside what it was measured to take."""
    ops = roofline.decode_ops(batch, context)
    measured = {}
    if torch.cuda.is_available():
        measured = measured_seconds(
            roofline.config, roofline.weights, roofline.kv_format, batch, context
        )
    device = roofline.device
    table = Table(
        "op", "MB", "GFLOP", "µs", "of the step", *(["measured", "of it"][: 2 * bool(measured)])
    )
    total = roofline.decode_seconds(batch, context)
    for name, num_bytes, flops, seconds in merged(ops, device):
        row = [name, f"{num_bytes / 1e6:,.1f}", f"{flops / 1e9:,.2f}", f"{seconds * 1e6:,.1f}"]
        row.append(f"{100 * seconds / total:.0f} %")
        if name in measured:
            row += [f"{measured[name] * 1e6:,.1f}", f"{100 * seconds / measured[name]:.0f} %"]
        table.add_row(*row)
    console = Console()
    console.print(
        f"{roofline.weights.name}, KV {roofline.kv_format}, on {device.name}: a decode step of "
        f"{batch} sequences of {context} tokens, {total * 1e3:.3f} ms at least"
    )
    console.print(table)
    if measured:
        spent = sum(measured.values())
        console.print(f"measured {spent * 1e3:.3f} ms: {100 * total / spent:.0f} % of the roofline")


def markdown(rooflines: Sequence[Roofline], batches: Sequence[int], contexts: Sequence[int]) -> str:
    """Two tables: TPOT and throughput by batch and context; TTFT and largest batch by context."""
    lines = [_line("weights", "batch", *(f"{context:,} tokens" for context in contexts))]
    lines.append(_line(*["---"] * (2 + len(contexts))))
    for roofline in rooflines:
        for batch in batches:
            cells = [_cell(roofline, batch, context) for context in contexts]
            lines.append(_line(roofline.weights.name, str(batch), *cells))
    lines += ["", _line("weights", "", *(f"{context:,} tokens" for context in contexts))]
    lines.append(_line(*["---"] * (2 + len(contexts))))
    for roofline in rooflines:
        first_token = [f"{roofline.prefill_seconds(context) * 1e3:,.1f} ms" for context in contexts]
        lines.append(_line(roofline.weights.name, "first token after", *first_token))
        largest = [f"{roofline.largest_batch(context):,}" for context in contexts]
        lines.append(_line(roofline.weights.name, "largest batch", *largest))
    return "\n".join(lines)


def _cell(roofline: Roofline, batch: int, context: int) -> str:
    seconds = roofline.decode_seconds(batch, context)
    if batch > roofline.largest_batch(context):
        return f"({seconds * 1e3:.2f} ms)"
    return f"{seconds * 1e3:.2f} ms, {batch / seconds:,.0f}/s"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
