"""Grammars over the BL tokenizer: a compiler, and texts as its ids."""

import json
from typing import Any

from engine_svc.compute.grammar_compiler import GrammarCompiler
from engine_svc.planning.step import Grammar, GrammarForm
from tests.fakes.tiny_models import VOCAB_SIZE
from tests.fakes.tiny_tokenizers import IM_END, byte_level


def byte_level_compiler() -> GrammarCompiler:
    """For the tiny models, whose every byte is a token; IM_END is EOS."""
    return GrammarCompiler(byte_level().to_str().encode(), [IM_END], VOCAB_SIZE)


def schema(document: Any) -> Grammar:
    return Grammar(GrammarForm.JSON_SCHEMA, json.dumps(document))


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarForm.REGEX, pattern)


def lark(text: str) -> Grammar:
    return Grammar(GrammarForm.GRAMMAR, text)


def ids_of(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


def text_of(token_ids: list[int]) -> str:
    return byte_level().decode([i for i in token_ids if i < 256], skip_special_tokens=False)
