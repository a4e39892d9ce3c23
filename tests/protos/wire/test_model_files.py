"""A fingerprint tells models apart; a name is fit for users."""

import os
from pathlib import Path

import pytest

from protos.wire.errors import StartupError
from protos.wire.model_files import fingerprint, model_name


def test_gguf_fingerprint_follows_the_content(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("1.gguf", "2.gguf", "3.gguf"))
    one.write_bytes(b"GGUF one")
    same.write_bytes(b"GGUF one")
    other.write_bytes(b"GGUF two")
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)


def test_directory_fingerprint_follows_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint(tmp_path)
    (tmp_path / "notes.txt").write_text("not part of the model")
    assert fingerprint(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text("{}")
    second = fingerprint(tmp_path)
    assert second != first
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert fingerprint(tmp_path) != second


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_weights_that_were_trained_further_are_another_model(tmp_path: Path, name: str) -> None:
    """Of the same size, with the same beginning, in one layer only."""
    path = tmp_path / name
    size = 40 << 20
    path.touch()
    os.truncate(path, size)
    model = path if path.suffix == ".gguf" else tmp_path
    before = fingerprint(model)
    with path.open("r+b") as file:
        file.seek(size * 3 // 4 + 1000)
        file.write(b"1" * (1 << 17))
    assert fingerprint(model) != before


def test_the_end_of_a_weight_file_counts_however_small(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(10_000))
    (tmp_path / "model2.safetensors").write_bytes(bytes(1 << 20))
    before = fingerprint(tmp_path)
    path.write_bytes(bytes(9_999) + b"1")
    assert fingerprint(tmp_path) != before


def test_a_missing_model_is_a_start_up_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read the model"):
        fingerprint(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("gemma-3-270m-it-Q4_K_M.gguf", "gemma-3-270m-it"),
        ("model-F16.gguf", "model"),
        ("plain.gguf", "plain"),
    ],
)
def test_names(file: str, name: str) -> None:
    assert model_name(Path(file)) == name
