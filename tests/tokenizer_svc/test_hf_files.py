"""A Hugging Face directory: every place where the files put templates, special tokens, ids."""

import json
from pathlib import Path
from typing import Any

import pytest

from protos.wire.errors import StartupError
from tests.fakes.tiny_tokenizers import IM_END, byte_level
from tokenizer_svc.tokenizer_source import load_tokenizer_files


def directory(path: Path, **files: Any) -> Path:
    """A directory with the tokenizer BL; `files` are JSON values by file stem."""
    (path / "tokenizer.json").write_text(byte_level().to_str())
    for stem, value in files.items():
        (path / f"{stem}.json").write_text(json.dumps(value))
    return path


def test_a_bare_tokenizer_is_enough(tmp_path: Path) -> None:
    files = load_tokenizer_files(directory(tmp_path))
    assert files.tokenizer.encode("a🦜b").ids == [64, 172, 253, 99, 250, 65]
    assert files.chat_templates == {}
    assert files.special_tokens == {}
    assert files.eos_token_ids == ()
    assert files.context_length == 0


def test_eos_ids_of_all_files_are_joined(tmp_path: Path) -> None:
    files = load_tokenizer_files(
        directory(
            tmp_path,
            generation_config={"eos_token_id": [3, 256]},
            config={"eos_token_id": 5, "text_config": {"eos_token_id": 7}},
            tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
        )
    )
    assert files.eos_token_ids == (3, 5, 7, 256, IM_END)


def test_null_eos_ids_are_none(tmp_path: Path) -> None:
    path = directory(tmp_path, generation_config={"eos_token_id": None}, config={})
    assert load_tokenizer_files(path).eos_token_ids == ()


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "expected"),
    [
        ({"max_position_embeddings": 2048}, {"model_max_length": 99}, 2048),
        ({"text_config": {"max_position_embeddings": 512}}, {}, 512),
        ({}, {"model_max_length": 4096}, 4096),
        ({}, {"model_max_length": 1e30}, 0),
        ({"max_position_embeddings": None}, {"model_max_length": 64.0}, 64),
    ],
)
def test_the_context_is_the_models_or_the_tokenizers(
    tmp_path: Path, config: dict[str, Any], tokenizer_config: dict[str, Any], expected: int
) -> None:
    path = directory(tmp_path, config=config, tokenizer_config=tokenizer_config)
    assert load_tokenizer_files(path).context_length == expected


def test_the_generation_config_gives_defaults(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": False, "eos_token_id": 1}
    files = load_tokenizer_files(directory(tmp_path, generation_config=config))
    assert files.generation_defaults == {"temperature": 0.6, "top_k": 20}
    directory(tmp_path, generation_config={"min_p": 2})
    with pytest.raises(StartupError, match=r"generation_config\.json sets min_p to 2"):
        load_tokenizer_files(tmp_path)


def test_special_tokens_are_those_that_templates_may_read(tmp_path: Path) -> None:
    files = load_tokenizer_files(
        directory(
            tmp_path,
            special_tokens_map={"bos_token": {"content": "<b>"}, "unk_token": "<u>"},
            tokenizer_config={
                "bos_token": "<|im_start|>",
                "pad_token": None,
                "add_bos_token": False,
                "extra_special_tokens": {"image_token": "<i>"},
            },
        )
    )
    assert files.special_tokens == {
        "bos_token": "<|im_start|>",
        "unk_token": "<u>",
        "image_token": "<i>",
    }


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("files", "jinja", "expected"),
    [
        ({"tokenizer_config": {"chat_template": "C"}}, {}, {"default": "C"}),
        ({"tokenizer_config": {"chat_template": NAMED}}, {}, {"default": "D", "tool_use": "T"}),
        ({"chat_template": {"chat_template": "J"}}, {}, {"default": "J"}),
        (
            {"tokenizer_config": {"chat_template": "C"}},
            {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "U"},
            {"default": "F", "tool_use": "U"},
        ),
        ({"tokenizer_config": {"chat_template": None}}, {}, {}),
    ],
)
def test_templates_are_found_where_they_may_be(
    tmp_path: Path, files: dict[str, Any], jinja: dict[str, str], expected: dict[str, str]
) -> None:
    for name, text in jinja.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert load_tokenizer_files(directory(tmp_path, **files)).chat_templates == expected


def test_bos_is_added_where_the_configuration_asks_for_it(tmp_path: Path) -> None:
    asks = {"add_bos_token": True, "bos_token": "<|im_start|>"}
    tokenizer = load_tokenizer_files(directory(tmp_path, tokenizer_config=asks)).tokenizer
    assert tokenizer.encode("a").ids == [256, 64]
    assert tokenizer.encode("a", add_special_tokens=False).ids == [64]
    # Saved and read again it adds one, not two.
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    assert load_tokenizer_files(tmp_path).tokenizer.encode("a").ids == [256, 64]


def test_a_saved_truncation_is_lifted(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    assert len(load_tokenizer_files(tmp_path).tokenizer.encode("abcdef").ids) == 6


def test_tokens_that_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    decoder = {
        "256": {"content": "<|im_start|>", "special": True},
        "258": {"content": "<tool>", "special": False, "normalized": False},
    }
    path = directory(tmp_path, tokenizer_config={"added_tokens_decoder": decoder})
    assert load_tokenizer_files(path).tokenizer.encode("a<tool>").ids == [64, 258]
    wrong = {"300": {"content": "<tool>"}}
    path = directory(tmp_path, tokenizer_config={"added_tokens_decoder": wrong})
    with pytest.raises(StartupError, match="'<tool>' the id 300"):
        load_tokenizer_files(path)


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="there is no model at"):
        load_tokenizer_files(tmp_path / "nowhere")
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        load_tokenizer_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match="not a usable tokenizer"):
        load_tokenizer_files(tmp_path)
    directory(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(StartupError, match=r"config\.json cannot be read"):
        load_tokenizer_files(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(StartupError, match="does not hold a JSON object"):
        load_tokenizer_files(tmp_path)
