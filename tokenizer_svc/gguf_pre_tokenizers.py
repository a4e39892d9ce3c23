"""The pre-tokenizers that `tokenizer.ggml.pre` names for byte-level BPE.

A GGUF file holds only the name; the patterns are those of the models' own tokenizer.json files,
which llama.cpp keeps by name in src/llama-vocab.cpp. A text is cut by each pattern in turn
(matches and the gaps between them both stay), then bytes are written as GPT-2's letters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

from protos.wire.errors import StartupError

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_BLANKS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS_AND_BLANKS}"
_QWEN2: Final = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS_AND_BLANKS}"
# A word that ends in small letters, or one without any: `camelCase` becomes `camel`, `Case`.
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_WORD: Final = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
_UPPER_WORD: Final = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_SIGNS_AND_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN: Final = rf"{_CASED_WORD}|{_UPPER_WORD}|\p{{N}}|{_SIGNS_AND_SLASHES}"
_GPT4O: Final = (
    rf"{_CASED_WORD}{_CONTRACTION}?|{_UPPER_WORD}{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"|{_SIGNS_AND_SLASHES}"
)
# Chinese, and the ranges beside it that DeepSeek's tokenizers keep apart from other words.
_HAN_HANGUL: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_KANA: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3_WORDS: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """How text is cut before merging.

    `ignore_merges`: a piece that is itself in the vocabulary becomes that token at once.
    `normalizes`: Unicode NFC first, as the model's own tokenizer.json says (llama.cpp does not).
    `adds_bos`: whether BOS is added where the file does not say.
    """

    patterns: Sequence[str]
    ignore_merges: bool = False
    normalizes: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, letters])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.normalizes else None


_PLAIN = PreTokenization((_GPT2,))
_SINGLE_DIGITS = PreTokenization((r"\p{N}", _GPT2))
_LLAMA = PreTokenization((_LLAMA3,), ignore_merges=True, adds_bos=True)
_BY_NAME: Final = {
    "default": PreTokenization(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "exaone4": _PLAIN,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
    "falcon3": _LLAMA,
    "pixtral": _LLAMA,
    "lfm2": _LLAMA,
    "dbrx": PreTokenization((_LLAMA3,)),
    "smaug-bpe": PreTokenization((_LLAMA3,)),
    "chatglm-bpe": PreTokenization((_LLAMA3,)),
    "glm4": PreTokenization((_LLAMA3,), ignore_merges=True),
    "qwen2": PreTokenization((_QWEN2,), normalizes=True),
    "deepseek-r1-qwen": PreTokenization((_QWEN2,)),
    "megrez": PreTokenization((_QWEN2,)),
    "stablelm2": PreTokenization((_QWEN2,)),
    "tekken": PreTokenization((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenization((_GPT4O,)),
    "llama4": PreTokenization((_GPT4O,)),
    "falcon": PreTokenization((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenization(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}"),
    ),
    "deepseek-v3": PreTokenization((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3_WORDS)),
}  # fmt: skip


def pre_tokenization(name: str) -> PreTokenization:
    """What `tokenizer.ggml.pre` names; raises StartupError for a name that is not known here.

    Guessing would give wrong ids without a sign of it.
    """
    if name not in _BY_NAME:
        raise StartupError(
            f"the GGUF file names the pre-tokenizer {name!r}, which is not supported "
            f"(supported: {', '.join(sorted(_BY_NAME))})"
        )
    return _BY_NAME[name]
