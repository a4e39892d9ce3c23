"""The vocabulary of a GGUF file: its tokens, what kind each is, and the named special ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, processors

from protos.wire.errors import StartupError
from tokenizer_svc.gguf_metadata import GgufMetadata


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, after SentencePiece's kinds of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """`tokens[id]` and `types[id]`; special tokens by name ("bos", "eos", "unknown", …)."""

    tokens: Sequence[str]
    types: Sequence[int]
    special_ids: dict[str, int]

    @classmethod
    def read(cls, metadata: GgufMetadata) -> "GgufVocabulary":
        tokens = metadata.texts("tokenizer.ggml.tokens")
        if not tokens:
            raise StartupError("the GGUF file holds no tokenizer (no tokenizer.ggml.tokens)")
        types = [int(kind) for kind in metadata.numbers("tokenizer.ggml.token_type")]
        if not types:
            types = [TokenType.NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise StartupError("the GGUF file's token_type and tokens differ in length")
        names = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls")
        # What SentencePiece's own files have, for those that leave it unsaid.
        is_sentencepiece = metadata.text("tokenizer.ggml.model") == "llama"
        defaults = {"unknown": 0, "bos": 1, "eos": 2} if is_sentencepiece else {}
        special_ids = {}
        for name in names:
            token_id = metadata.integer(f"tokenizer.ggml.{name}_token_id")
            if token_id is None:
                token_id = defaults.get(name)
            if token_id is not None and token_id < len(tokens):
                special_ids[name] = token_id
        return cls(_distinct(tokens), types, special_ids)

    def special_text(self, name: str) -> str | None:
        token_id = self.special_ids.get(name)
        return None if token_id is None else self.tokens[token_id]

    def ids_of(self, *types: TokenType) -> Iterator[int]:
        return (token_id for token_id, kind in enumerate(self.types) if kind in types)

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        """Marks control tokens as special and keeps user-defined ones whole."""
        tokenizer.add_special_tokens(
            [
                AddedToken(self.tokens[token_id], special=True, normalized=False)
                for token_id in self.ids_of(TokenType.UNKNOWN, TokenType.CONTROL)
            ]
        )
        tokenizer.add_tokens(
            [
                AddedToken(self.tokens[token_id], special=False, normalized=False)
                for token_id in self.ids_of(TokenType.USER_DEFINED)
            ]
        )

    def add_sequence_ends(self, tokenizer: Tokenizer, *, bos: bool, eos: bool) -> None:
        """Makes `tokenizer` put BOS before, or EOS after, a text where that is asked for."""
        names = [name for name, wanted in (("bos", bos), ("eos", eos)) if wanted]
        ends = {name: text for name in names if (text := self.special_text(name)) is not None}
        if ends:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*([ends["bos"]] if "bos" in ends else []), "$A",
                        *([ends["eos"]] if "eos" in ends else [])],
                special_tokens=[(text, self.special_ids[name]) for name, text in ends.items()],
            )  # fmt: skip


def _distinct(tokens: Sequence[str]) -> Sequence[str]:
    """Repeated texts (padding of the embedding table) get a text of their own, so ids stay."""
    if len(set(tokens)) == len(tokens):
        return tokens
    seen: set[str] = set()
    distinct = []
    for token_id, token in enumerate(tokens):
        text = token if token not in seen else f"[repeated {token_id}] {token}"
        seen.add(text)
        distinct.append(text)
    return distinct
