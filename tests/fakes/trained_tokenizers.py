"""Small tokenizers trained on the spot, with merges that cross the borders of words and blanks."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's 12:34, don't be late!\n\n",
    "def add(first, second):\n    return first + second  # the sum\n",
    'user system assistant model tool <think>\n</think>\n\n {"name": "search"} < > | <<||>>\n',
    "Straße, naïve café; Привет, мир! 你好\uff0c世界 🦜🦜\t\ttabs   and    blanks\n" * 3,
]


def _with_added(
    tokenizer: Tokenizer, control: Iterable[str], ordinary: Iterable[str], bos: str | None
) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ordinary])
    if bos is not None:
        special = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=special)
    return tokenizer


def byte_level_bpe(
    control: Iterable[str], ordinary: Iterable[str] = (), bos: str | None = None
) -> Tokenizer:
    """GPT-2's kind: `control` are special tokens, `ordinary` added ones, `bos` starts a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return _with_added(tokenizer, control, ordinary, bos)


def metaspace_bpe(
    control: Iterable[str], ordinary: Iterable[str] = (), bos: str | None = None
) -> Tokenizer:
    """SentencePiece's kind as newer files write it: only a text's first word is given a blank."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _with_added(_trained_with_bytes(tokenizer), control, ordinary, bos)


def prepending_bpe(
    control: Iterable[str], ordinary: Iterable[str] = (), bos: str | None = None
) -> Tokenizer:
    """SentencePiece's kind as Llama 2's file writes it: a blank after every control token too."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return _with_added(_trained_with_bytes(tokenizer), control, ordinary, bos)


def _trained_with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    spelt = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=800, special_tokens=["<unk>", *spelt], show_progress=False)
    tokenizer.train_from_iterator([line for text in TEXT for line in text.split("\n")], trainer)
    # The trainer makes its special tokens added tokens; bytes must be pieces of the model alone.
    bare = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        bare.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        bare.pre_tokenizer = tokenizer.pre_tokenizer
    bare.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return bare
