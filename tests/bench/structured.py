"""Structured output: how many answers match their schema, and what the masks cost of a step.

Generates under twenty schemas in batches of 16, at a temperature at which a model without masks
writes nothing that parses, and checks each answer with jsonschema.
"""

import argparse
import statistics
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from compose.directories import models_directory
from compose.model_store import DEFAULT_MODEL, ModelStore
from engine_svc.planning.request import FinishReason
from tests.fakes.structured_cases import BATCH_SIZE, SCHEMAS, StructuredEngine, StructuredRun

CONSOLE = Console()


def add_command(commands: Any) -> None:
    parser = commands.add_parser("structured", help=__doc__.splitlines()[0], description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL.name, help="a name, GGUF file or HF directory"
    )
    parser.add_argument("--generations", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    model = ModelStore(models_directory(), CONSOLE).resolve(arguments.model)
    with StructuredEngine(model) as engine:
        result = engine.run(arguments.generations, arguments.max_tokens, arguments.temperature)
    CONSOLE.print(_table(result))
    for answer in result.answers:
        if answer.reason is not FinishReason.LENGTH and answer.problem:
            CONSOLE.print(f"{answer.name}: {answer.problem}: {answer.text!r}", markup=False)
    steps, masks = (
        statistics.mean(seconds) * 1000 for seconds in (result.step_seconds, result.mask_seconds)
    )
    CONSOLE.print(
        f"{len(result.step_seconds)} steps of {BATCH_SIZE} rows: {steps:.1f} ms each, of which "
        f"grammars {masks:.2f} ms ({100 * result.mask_share:.1f} %), at worst "
        f"{max(result.mask_seconds) * 1000:.1f} ms"
    )


def _table(result: StructuredRun) -> Table:
    counts: dict[str, Counter[str]] = {name: Counter() for name in SCHEMAS}
    for answer in result.answers:
        if answer.reason is FinishReason.LENGTH:
            counts[answer.name]["length"] += 1
        else:
            counts[answer.name]["invalid" if answer.problem else "valid"] += 1
    table = Table("schema", "valid", "ended by length", "invalid")
    for name, count in [*counts.items(), ("all", sum(counts.values(), Counter[str]()))]:
        table.add_row(name, *(str(count[kind]) for kind in ("valid", "length", "invalid")))
    return table
