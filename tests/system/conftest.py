"""A line of real processes with the default model, shared by the tests that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.running_line import RunningLine, running_line
from tests.fakes.tiny_models import write_tiny_llama


@pytest.fixture(scope="session")
def line(
    tmp_path_factory: pytest.TempPathFactory, default_model_path: Path
) -> Iterator[RunningLine]:
    """Two gateways before one of each other service, serving SmolLM2."""
    directory = tmp_path_factory.mktemp("line")
    arguments = ("--model", str(default_model_path), "--gateways", "2", "--max-num-seqs", "16")
    with running_line(directory, *arguments, "--kv-memory", "512MiB") as started:
        yield started


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that loads at once, for tests that start lines of their own. It speaks nonsense."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")
