"""Two tiny tokenizers with known ids: byte-level (BL), SentencePiece-like byte-fallback (BF)."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

IM_START, IM_END = 256, 257


def byte_level() -> Tokenizer:
    """BL: ids 0..255 are sorted(ByteLevel.alphabet()), no merges; then the two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """BF: <unk> 0, <s> 1, </s> 2, <0x00>..<0xFF> 3..258, then ▁ and letters with and without it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    vocab["▁"] = len(vocab)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?"
    for letter in letters:
        vocab[letter] = len(vocab)
    merges = []
    for letter in letters:
        vocab[f"▁{letter}"] = len(vocab)
        merges.append(("▁", letter))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    return tokenizer
