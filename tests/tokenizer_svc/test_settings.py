"""The tokenizer service's settings, from flags and the environment."""

from pathlib import Path

import pytest

from protos.wire.errors import StartupError
from protos.wire.settings import load_settings
from tokenizer_svc.settings import Settings


def load(*arguments: str, **environment: str) -> Settings:
    return load_settings(Settings, "tokenizer_svc", arguments, environment)


def test_only_the_model_is_required() -> None:
    settings = load("--model", "m.gguf")
    assert settings.model == Path("m.gguf")
    assert settings.chat_template is None
    with pytest.raises(StartupError, match="--model"):
        load()


def test_sizes_and_paths_are_read_from_flags_and_the_environment() -> None:
    settings = load(
        "--max-message-size", "8MiB", "--chat-template", "t.jinja",
        TOKENLINE_TOKENIZER_MODEL="dir", TOKENLINE_TOKENIZER_TEMPLATE_MEMORY="256MiB",
    )  # fmt: skip
    assert settings.model == Path("dir")
    assert settings.chat_template == Path("t.jinja")
    assert settings.max_message_size == 8 << 20
    assert settings.template_memory == 256 << 20


def test_values_out_of_range_are_reported_together() -> None:
    with pytest.raises(StartupError) as caught:
        load("--model", "m", "--num-workers", "0", "--port", "70000", "--log-level", "loud")
    for flag in ("--num-workers", "--port", "--log-level"):
        assert flag in str(caught.value)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(StartupError, match="--model: expected a path, got nothing"):
        load("--model", "")
