"""What the engine's arithmetic costs in quality: perplexity of a fixed text against plain float32.

The text is scored in windows by the engine as served (what it answers to `prompt_logprobs`) and by
a float32 reference of the same dequantised weights. A second table says for each layer how far its
output is from the reference's, given the same input and after all layers before it, and which
channels are to blame. Exits with 1 where the perplexities differ by more than 1 %.
"""

import argparse
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
from rich.console import Console
from rich.table import Table

from compose.directories import models_directory
from compose.model_store import DEFAULT_MODEL, ModelStore
from engine_svc.settings import Settings
from tests.bench.accuracy_layers import layer_errors
from tests.bench.accuracy_score import Accuracy, engine_settings, measure, text_windows
from tests.fakes.derived_models import write_bfloat16_directory, write_gguf_as

CONSOLE = Console()
FORMATS = ("Q8_0", "F16", "bfloat16")


def add_command(commands: Any) -> None:
    parser = commands.add_parser("accuracy", help=__doc__.splitlines()[0], description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL.name, help="a name, GGUF file or HF directory"
    )
    parser.add_argument(
        "--formats",
        action="store_true",
        help=f"also the model's weights made into {', '.join(FORMATS)} (of a GGUF file)",
    )
    parser.add_argument("--tokens", type=int, default=0, help="of the text; 0 for all of it")
    parser.add_argument("--window", type=int, default=512, help="tokens scored together")
    parser.add_argument("--engine-flags", default="", help="such as '--dtype int8'")
    parser.add_argument(
        "--layers",
        type=int,
        default=512,
        help="tokens that the layers' errors are taken over; 0 for no such table",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    model = ModelStore(models_directory(), CONSOLE).resolve(arguments.model)
    windows = text_windows(model, arguments.tokens, arguments.window)
    flags = shlex.split(arguments.engine_flags)
    table = Table("model", "tokens", "engine", "float32", "ratio", "mean |Δ log p|", "")
    failed = False
    for name in ("as it is", *(FORMATS if arguments.formats else ())):
        with in_format(model, name) as path:
            began = time.perf_counter()
            result = measure(engine_settings(path, arguments.window, flags), windows)
            CONSOLE.print(f"{name}: {_line(result)}, in {time.perf_counter() - began:.0f} s")
            table.add_row(*_row(name, result))
            failed |= not result.holds
    CONSOLE.print(table)
    if arguments.layers:
        settings = engine_settings(model, arguments.layers, flags)
        CONSOLE.print(_layers_table(settings, windows[0][: arguments.layers]))
    if failed:
        raise SystemExit(1)


@contextmanager
def in_format(model: Path, name: str) -> Iterator[Path]:
    """The model as it is, or its weights in one of FORMATS for as long as this is open."""
    with tempfile.TemporaryDirectory(prefix="tokenline-accuracy-") as directory:
        if name == "bfloat16":
            yield write_bfloat16_directory(model, Path(directory) / "model")
        elif name in FORMATS:
            kind = gguf.GGMLQuantizationType[name]
            yield write_gguf_as(model, Path(directory) / f"model.{name}.gguf", kind)
        else:
            yield model


def _line(result: Accuracy) -> str:
    return f"perplexity {result.engine_perplexity:.4f}, {result.ratio:.5f} times float32's"


def _layers_table(settings: Settings, token_ids: Sequence[int]) -> Table:
    table = Table(
        *("layer", "own error", "accumulated", "worst channels, with shares of the own error"),
        title=f"relative rms errors over {len(token_ids)} tokens",
    )
    for index, error in enumerate(layer_errors(settings, token_ids)):
        worst = ", ".join(f"{channel} ({share:.0%})" for channel, share in error.worst)
        table.add_row(f"{index}", f"{error.own:.3%}", f"{error.accumulated:.3%}", worst)
    return table


def _row(name: str, result: Accuracy) -> tuple[str, ...]:
    return (
        name,
        f"{len(result.engine):,}",
        f"{result.engine_perplexity:.4f}",
        f"{result.reference_perplexity:.4f}",
        f"{result.ratio:.5f}",
        f"{result.mean_difference:.5f}",
        "holds" if result.holds else "[red]off by over 1 %[/]",
    )
