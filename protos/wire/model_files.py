"""What two services must agree on about a model's files: its fingerprint and its name."""

import hashlib
import re
from pathlib import Path
from typing import Final

from protos.wire.errors import StartupError

# Covers the metadata and tensor table of every GGUF file seen (262k-token vocabularies included)
# and a part of the weights; reading it takes about 10 ms.
_GGUF_BYTES: Final = 16 << 20
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

    GGUF: over the file's size and first 16 MiB. HF directory: over the names and bytes of its
    config and tokenizer files and the names and sizes of its weight files.
    """
    digest = hashlib.sha256()
    try:
        if model_path.is_dir():
            for name in _HF_FILES:
                path = model_path / name
                if path.is_file():
                    content = path.read_bytes()
                    digest.update(f"{name}:{len(content)}\n".encode() + content)
            for path in sorted(model_path.glob("*.safetensors")):
                digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        else:
            digest.update(f"{model_path.stat().st_size}\n".encode())
            with model_path.open("rb") as file:
                digest.update(file.read(_GGUF_BYTES))
    except OSError as error:
        raise StartupError(f"cannot read the model at {model_path}: {error.strerror}") from error
    return digest.hexdigest()


def model_name(model_path: Path) -> str:
    """The name users see: `SmolLM2-135M-Instruct` for `SmolLM2-135M-Instruct.Q4_1.gguf`."""
    if model_path.suffix == ".gguf":
        return _QUANTISATION.sub("", model_path.stem)
    return model_path.resolve().name
