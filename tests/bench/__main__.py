"""Benchmarks: `python -m tests.bench NAME --help`. Each prints ratios taken within one run."""

import argparse
import signal
import sys

from tests.bench import (
    accuracy,
    attention,
    kernels,
    overload,
    peers,
    peers_beside,
    pipeline,
    roofline,
    sampling,
    speculation,
    structured,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="NAME")
    pipeline.add_command(commands)
    overload.add_command(commands)
    structured.add_command(commands)
    accuracy.add_command(commands)
    attention.add_command(commands)
    peers.add_command(commands)
    peers_beside.add_command(commands)
    sampling.add_command(commands)
    speculation.add_command(commands)
    kernels.add_command(commands)
    roofline.add_command(commands)
    arguments = parser.parse_args()
    # Whoever is told to end leaves no servers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.run(arguments)


if __name__ == "__main__":
    main()
