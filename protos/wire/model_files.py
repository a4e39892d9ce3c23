"""What two services must agree on about a model's files: its fingerprint and its name."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from protos.wire.errors import StartupError

# Covers the metadata and tensor table of every GGUF file seen (262k-token vocabularies included).
_GGUF_BYTES: Final = 16 << 20
# Of all weights together, evenly spread. What was trained further has other weights in most places,
# and often all else the same: sizes, config, tokenizer, embeddings.
_NUM_SAMPLES: Final = 1024
_SAMPLE_BYTES: Final = 4096
_HF_FILES: Final = (
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_QUANTISATION = re.compile(r"[.-](?:I?Q\d\w*|B?F(?:16|32)|MXFP4)$", re.IGNORECASE)


def fingerprint(model_path: Path) -> str:
    """Hex SHA-256 that tells one model (weights layout, config and tokenizer) from another.

    GGUF: over the file's size and first 16 MiB, and samples of the rest. HF directory: over the
    names and bytes of its config and tokenizer files, and the names, sizes and samples of its
    weight files. Takes about 20 ms once the files are in memory.
    """
    digest = hashlib.sha256()
    try:
        if model_path.is_dir():
            for name in _HF_FILES:
                path = model_path / name
                if path.is_file():
                    content = path.read_bytes()
                    digest.update(f"{name}:{len(content)}\n".encode() + content)
            weight_files = sorted(model_path.glob("*.safetensors"))
            sizes = {path: path.stat().st_size for path in weight_files}
            for path, size in sizes.items():
                digest.update(f"{path.name}:{size}\n".encode())
                digest.update(b"".join(_samples(path, size, sum(sizes.values()))))
        else:
            size = model_path.stat().st_size
            digest.update(f"{size}\n".encode())
            with model_path.open("rb") as file:
                digest.update(file.read(_GGUF_BYTES))
            digest.update(b"".join(_samples(model_path, size, size)))
    except OSError as error:
        raise StartupError(f"cannot read the model at {model_path}: {error.strerror}") from error
    return digest.hexdigest()


def _samples(path: Path, size: int, size_of_all: int) -> Iterable[bytes]:
    """A file's share of the samples of all weights, of `size_of_all` bytes."""
    count = min(-(-_NUM_SAMPLES * size // max(size_of_all, 1)), -(-size // _SAMPLE_BYTES))
    with path.open("rb", buffering=0) as file:
        for index in range(count):
            file.seek(size * index // count)
            yield file.read(_SAMPLE_BYTES)


def model_name(model_path: Path) -> str:
    """The name users see: `SmolLM2-135M-Instruct` for `SmolLM2-135M-Instruct.Q4_1.gguf`."""
    if model_path.suffix == ".gguf":
        return _QUANTISATION.sub("", model_path.stem)
    return model_path.resolve().name
