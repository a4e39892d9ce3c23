"""What a model's files ask for in sampling, and what is no usable value."""

from pathlib import Path
from typing import Any

import pytest

from protos.wire.errors import StartupError
from tests.fakes.gguf_files import write_gguf
from tokenizer_svc.generation_defaults import generation_defaults
from tokenizer_svc.gguf_files import load_gguf_file


def test_known_fields_are_taken_and_others_left() -> None:
    config = {
        "temperature": 1,
        "top_p": 0.8,
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "do_sample": False,
        "max_length": 20,
    }
    assert generation_defaults(config, "f") == {
        "temperature": 1.0,
        "top_p": 0.8,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e39),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("top_k", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-40),
        ("max_new_tokens", 0),
    ],
)
def test_an_unusable_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(StartupError, match=f"f sets {name} to"):
        generation_defaults({name: value}, "f")


def test_gguf_files_name_them_otherwise(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        model="gpt2",
        tokens=["a", "b", "ab"],
        types=[1, 1, 1],
        merges=["a b"],
        pre="smollm",
        extra={"general.sampling.top_k": 40, "general.sampling.temp": 1},
    )
    assert load_gguf_file(path).generation_defaults == {"temperature": 1.0, "top_k": 40}
