"""Makes the small model of a chaos run: random, but a whole one, with merges and a template."""

import json
from pathlib import Path
from typing import Any

from tests.fakes.tiny_models import write_tiny_llama
from tests.fakes.trained_tokenizers import byte_level_bpe

MAX_MODEL_LEN = 4096
CONTROL = ("<|im_start|>", "<|im_end|>")
# Deep rather than wide: a step takes some ten milliseconds, so that a stream of a hundred tokens
# lasts long enough to be hit, and weighs little on the cores that all processes share.
NUM_LAYERS = 6


def write_chaos_model(directory: Path, seed: int) -> Path:
    """A Llama of `NUM_LAYERS` layers with a byte-level BPE of 600 pieces; returns `directory`."""
    tokenizer = byte_level_bpe(CONTROL)
    start, end = (tokenizer.token_to_id(text) for text in CONTROL)
    write_tiny_llama(
        directory,
        seed=seed,
        vocab_size=tokenizer.get_vocab_size(),
        num_hidden_layers=NUM_LAYERS,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=end,
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _change(directory / "generation_config.json", eos_token_id=end, pad_token_id=end)
    _change(
        directory / "tokenizer_config.json",
        model_max_length=MAX_MODEL_LEN,
        added_tokens_decoder={
            str(token_id): {"content": text, "special": True, "normalized": False}
            for token_id, text in zip((start, end), CONTROL, strict=True)
        },
    )
    return directory


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2))
