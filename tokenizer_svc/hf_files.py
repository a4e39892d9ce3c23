"""The tokenizer of a Hugging Face model directory: tokenizer.json and the files beside it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, processors

from protos.wire.errors import StartupError
from tokenizer_svc.generation_defaults import generation_defaults
from tokenizer_svc.tokenizer_files import TokenizerFiles

# Configurations write 1e30 for "no limit" in model_max_length.
_LONGEST_CONTEXT: Final = 100_000_000


def load_hf_directory(directory: Path) -> TokenizerFiles:
    """Reads the directory's tokenizer; raises StartupError that names the file at fault."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise StartupError(f"{directory} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise StartupError(f"{path} is not a usable tokenizer: {error}") from error
    # A file saved in training can cut every text to some length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(
        {**_read_json(directory / "special_tokens_map.json"), **settings}
    )
    _add_missing_tokens(tokenizer, settings)
    if settings.get("add_bos_token") is True:
        _add_bos(tokenizer, special_tokens.get("bos_token"))
    config = _read_json(directory / "config.json")
    generation_config = _read_json(directory / "generation_config.json")
    return TokenizerFiles(
        tokenizer=tokenizer,
        chat_templates=_chat_templates(directory, settings),
        special_tokens=special_tokens,
        eos_token_ids=_eos_token_ids(
            tokenizer,
            special_tokens.get("eos_token"),
            (generation_config, config, _text_config(config)),
        ),
        context_length=_context_length(config, settings),
        generation_defaults=generation_defaults(generation_config, "generation_config.json"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} does not hold a JSON object")
    return value


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration that has parts."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}


def _token_text(value: Any) -> str | None:
    """A token as the files write it: its text, or an object with it as `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Every `…_token` by name, those of `extra_special_tokens` included, as templates see them."""
    extra = settings.get("extra_special_tokens")
    named = {**settings, **(extra if isinstance(extra, dict) else {})}
    return {
        name: text
        for name, value in named.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }


def _add_missing_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Adds tokens that only tokenizer_config.json names, at the ids it gives them."""
    declared = settings.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for key, value in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _token_text(value)
        if text is None or text in present:
            continue
        flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
        token = AddedToken(text, **{name: bool(value.get(name, False)) for name in flags})
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(text) != int(key):
            raise StartupError(
                f"tokenizer_config.json gives the token {text!r} the id {key}, but tokenizer.json "
                f"leaves it the id {tokenizer.token_to_id(text)}"
            )


def _add_bos(tokenizer: Tokenizer, bos_token: str | None) -> None:
    """Puts BOS before a text where tokenizer_config.json asks for it and tokenizer.json does not.

    Files of the Llama and Gemma classes leave this to the class; DeepSeek's are an example.
    """
    bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    if bos_token is None or bos_id is None or bos_id in tokenizer.encode("").ids:
        return
    bos = processors.TemplateProcessing(
        single=[bos_token, "$A"], special_tokens=[(bos_token, bos_id)]
    )
    before = tokenizer.post_processor
    tokenizer.post_processor = bos if before is None else processors.Sequence([before, bos])


def _chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: from files of their own, else from the configuration files.

    A configuration holds one text, or a list of named ones.
    """
    files = [
        ("default", directory / "chat_template.jinja"),
        *(
            (path.stem, path)
            for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
        ),
    ]
    templates = {name: path.read_text(encoding="utf-8") for name, path in files if path.is_file()}
    if templates:
        return templates
    for value in (
        settings.get("chat_template"),
        _read_json(directory / "chat_template.json").get("chat_template"),
    ):
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            return {
                str(entry["name"]): str(entry["template"])
                for entry in value
                if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
            }
    return {}


def _eos_token_ids(
    tokenizer: Tokenizer, eos_token: str | None, configs: Iterable[Mapping[str, Any]]
) -> tuple[int, ...]:
    """Every id that one of the files calls EOS; configurations write one id or a list."""
    ids = set()
    if eos_token is not None and (eos_id := tokenizer.token_to_id(eos_token)) is not None:
        ids.add(eos_id)
    for config in configs:
        value = config.get("eos_token_id")
        ids.update(i for i in (value if isinstance(value, list) else [value]) if type(i) is int)
    return tuple(sorted(ids))


def _context_length(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """The model's own figure; the tokenizer's where there is none and it is not a stand-in."""
    for value in (
        config.get("max_position_embeddings"),
        _text_config(config).get("max_position_embeddings"),
        settings.get("model_max_length"),
    ):
        if isinstance(value, int | float) and 0 < value <= _LONGEST_CONTEXT:
            return int(value)
    return 0
