"""SentencePiece-style BPE with byte fallback from GGUF metadata (`tokenizer.ggml.model` = "llama").

SentencePiece joins, again and again, the two neighbours whose union is the best-scored piece, the
leftmost first (https://github.com/google/sentencepiece, src/bpe_model.cc). The same order comes
from ordinary BPE merges: every way to cut a piece into two other pieces is a merge, ranked by the
piece's score.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from tokenizers import Tokenizer, decoders, models, normalizers

from protos.wire.errors import StartupError
from tokenizer_svc.gguf_metadata import GgufMetadata
from tokenizer_svc.gguf_vocabulary import GgufVocabulary, TokenType

BLANK = "▁"


def sentencepiece_tokenizer(metadata: GgufMetadata, vocabulary: GgufVocabulary) -> Tokenizer:
    """The tokenizer whose ids are the file's; raises StartupError."""
    scores = list(metadata.numbers("tokenizer.ggml.scores"))
    if len(scores) != len(vocabulary.tokens):
        raise StartupError("the GGUF file's scores and tokens differ in length")
    # As the SentencePiece format has it: a text is given a blank in front, so that its first word
    # is spelt as in the middle of a sentence.
    prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    model = models.BPE(
        vocab={token: token_id for token_id, token in enumerate(vocabulary.tokens)},
        merges=list(merges_by_score(vocabulary, scores)),
        unk_token=vocabulary.special_text("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    escape = normalizers.Replace(" ", BLANK)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(BLANK), escape]) if prefixed else escape
    )
    decoding = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    vocabulary.add_special_tokens(tokenizer)
    vocabulary.add_sequence_ends(
        tokenizer,
        bos=metadata.flag("tokenizer.ggml.add_bos_token", True),
        eos=metadata.flag("tokenizer.ggml.add_eos_token", False),
    )
    return tokenizer


def merges_by_score(
    vocabulary: GgufVocabulary, scores: Sequence[float]
) -> Iterator[tuple[str, str]]:
    """All merges that make a piece of the vocabulary out of two others, best first.

    Control and byte tokens take no part. Among equal scores a longer left half goes first, which
    makes a run of such pieces grow from its left end, as SentencePiece's tie rule does.
    """
    kinds = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    # The pieces' own string objects, so that half a million merges share a few strings.
    pieces = {vocabulary.tokens[i]: vocabulary.tokens[i] for i in vocabulary.ids_of(*kinds)}
    ranked = sorted(vocabulary.ids_of(*kinds), key=lambda token_id: -scores[token_id])
    for _, group in groupby(ranked, key=lambda token_id: scores[token_id]):
        merges = [merge for i in group for merge in _halves(vocabulary.tokens[i], pieces)]
        merges.sort(key=lambda merge: (-len(merge[0]), -len(merge[1])))
        yield from merges


def _halves(piece: str, pieces: dict[str, str]) -> Iterator[tuple[str, str]]:
    for cut in range(1, len(piece)):
        left = pieces.get(piece[:cut])
        if left is not None and (right := pieces.get(piece[cut:])) is not None:
            yield left, right
