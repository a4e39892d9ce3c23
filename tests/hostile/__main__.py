"""Attacks a line of its own while ordinary streams run: `python -m tests.hostile`."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.fakes.running_line import running_line
from tests.fakes.tiny_models import write_tiny_llama
from tests.hostile.undisturbed import hostile_round


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="attacks on HTTP, and on gRPC")
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--logs", type=Path, help="directory of the services' output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = options.logs or Path(name)
        model = write_tiny_llama(directory / "tiny-llama")
        with running_line(directory, "--model", str(model), "--kv-memory", "64MiB") as line:
            result = asyncio.run(hostile_round(line, options.count, options.seed))
    print(result.text)
    for fault in result.faults:
        print(f"FAULT {fault}")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
