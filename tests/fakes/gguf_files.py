"""Writes tiny GGUF files that hold a tokenizer and no tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter


def write_gguf(
    path: Path,
    *,
    model: str,
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float] = (),
    merges: Sequence[str] = (),
    pre: str = "",
    context_length: int = 128,
    chat_template: str | list[Mapping[str, str]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A file of the architecture `llama`; `extra` are further keys with numbers, flags or text."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(context_length)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores:
        writer.add_token_scores(scores)
    if merges:
        writer.add_token_merges(merges)
    if pre:
        writer.add_tokenizer_pre(pre)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in (extra or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
