"""Fixtures that tests of several parts share; settles torch's waiting before any test loads it."""

from pathlib import Path

import pytest
from rich.console import Console

import engine_svc.compute  # noqa: F401
from compose.directories import models_directory
from compose.model_store import DEFAULT_MODEL, ModelStore


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, fetched into the user's cache directory when missing."""
    return ModelStore(models_directory(), Console()).resolve(DEFAULT_MODEL.name)
