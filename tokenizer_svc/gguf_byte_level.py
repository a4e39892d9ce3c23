"""Byte-level BPE from GGUF metadata (`tokenizer.ggml.model` = "gpt2")."""

from tokenizers import Tokenizer, decoders, models

from protos.wire.errors import StartupError
from tokenizer_svc.gguf_metadata import GgufMetadata
from tokenizer_svc.gguf_pre_tokenizers import pre_tokenization
from tokenizer_svc.gguf_vocabulary import GgufVocabulary


def byte_level_tokenizer(metadata: GgufMetadata, vocabulary: GgufVocabulary) -> Tokenizer:
    """The tokenizer whose ids are the file's; raises StartupError."""
    cutting = pre_tokenization(metadata.text("tokenizer.ggml.pre", "default"))
    merges = metadata.texts("tokenizer.ggml.merges")
    if not merges:
        raise StartupError("the GGUF file holds no merges for its byte-level BPE tokenizer")
    try:
        model = models.BPE(
            vocab={token: token_id for token_id, token in enumerate(vocabulary.tokens)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=cutting.ignore_merges,
        )
    except Exception as error:  # the library's own class, which it does not export
        raise StartupError(f"the GGUF file's merges do not fit its tokens: {error}") from error
    tokenizer = Tokenizer(model)
    if (normalizer := cutting.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = cutting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary.add_special_tokens(tokenizer)
    vocabulary.add_sequence_ends(
        tokenizer,
        bos=metadata.flag("tokenizer.ggml.add_bos_token", cutting.adds_bos),
        eos=metadata.flag("tokenizer.ggml.add_eos_token", False),
    )
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # The first part can itself begin with a blank in old files, hence the search from 1.
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]
