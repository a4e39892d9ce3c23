"""Drives an engine without the line, in a process of its own (tests/bench/engine_process.py)."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench.processes import ROOT


class InProcessEngine:
    """An engine in a child process that answers `run`. A context manager."""

    def __init__(self, model: Path, max_num_seqs: int) -> None:
        module = "tests.bench.engine_process"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(model), str(max_num_seqs)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The child ends with its input.
        self._process.communicate(timeout=30)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Generates `max_tokens` greedy tokens for all prompts at once; returns tokens/s."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        json.dump({"prompts": prompts, "max_tokens": max_tokens}, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the in-process engine ended; its message is above")
        rate: float = json.loads(line)["tokens_per_second"]
        return rate
