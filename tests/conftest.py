"""Fixtures that several parts' tests share; settles torch, Triton and gRPC before any test."""

import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

import engine_svc.compute  # noqa: F401
from compose.directories import models_directory
from compose.model_store import DEFAULT_MODEL, ModelStore

# Read when gRPC is loaded. With its handlers a child that is forked to run a program may write to
# its stderr that a poller has lost its descriptors.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# Read when a kernel is defined. Without a GPU its program runs in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, fetched into the user's cache directory when missing."""
    return ModelStore(models_directory(), Console()).resolve(DEFAULT_MODEL.name)
