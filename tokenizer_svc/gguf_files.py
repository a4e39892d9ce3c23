"""The tokenizer inside a GGUF file: everything is read from the file's metadata."""

from pathlib import Path
from typing import Final

from protos.wire.errors import StartupError
from tokenizer_svc.generation_defaults import generation_defaults
from tokenizer_svc.gguf_byte_level import byte_level_tokenizer
from tokenizer_svc.gguf_metadata import GgufMetadata, read_gguf_metadata
from tokenizer_svc.gguf_sentencepiece import sentencepiece_tokenizer
from tokenizer_svc.gguf_vocabulary import GgufVocabulary
from tokenizer_svc.tokenizer_files import TokenizerFiles

_BUILDERS: Final = {"gpt2": byte_level_tokenizer, "llama": sentencepiece_tokenizer}
# What chat templates call the tokens that GGUF names otherwise.
_TEMPLATE_NAMES: Final = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
    "mask": "mask_token",
    "cls": "cls_token",
}
# The keys of `general.sampling.` by the names that generation_config.json gives them.
_SAMPLING_KEYS: Final = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_TEMPLATE_PREFIX: Final = "tokenizer.chat_template"


def load_gguf_file(path: Path) -> TokenizerFiles:
    """Builds the tokenizer that the file's metadata describes; raises StartupError."""
    metadata = GgufMetadata(read_gguf_metadata(path))
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise StartupError(
            f"the GGUF file's tokenizer is of the kind {kind!r}, which is not supported "
            f"(supported: {', '.join(_BUILDERS)})"
        )
    vocabulary = GgufVocabulary.read(metadata)
    architecture = metadata.text("general.architecture")
    ends = {vocabulary.special_ids.get(name) for name in ("eos", "eot", "eom")}
    return TokenizerFiles(
        tokenizer=_BUILDERS[kind](metadata, vocabulary),
        chat_templates=_chat_templates(metadata),
        special_tokens={
            template_name: text
            for name, template_name in _TEMPLATE_NAMES.items()
            if (text := vocabulary.special_text(name)) is not None
        },
        eos_token_ids=tuple(sorted(token_id for token_id in ends if token_id is not None)),
        context_length=metadata.integer(f"{architecture}.context_length") or 0,
        generation_defaults=generation_defaults(
            {
                name: metadata.number(f"general.sampling.{key}")
                for name, key in _SAMPLING_KEYS.items()
            },
            "the GGUF file's general.sampling",
        ),
    )


def _chat_templates(metadata: GgufMetadata) -> dict[str, str]:
    """`tokenizer.chat_template`, and the named ones that `tokenizer.chat_templates` lists."""
    templates = {"default": metadata.text(_TEMPLATE_PREFIX)}
    for name in metadata.texts("tokenizer.chat_templates"):
        templates[name] = metadata.text(f"{_TEMPLATE_PREFIX}.{name}")
    return {name: text for name, text in templates.items() if text}
