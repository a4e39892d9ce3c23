"""Opens a model's tokenizer, whichever form the model is in."""

from pathlib import Path

from protos.wire.errors import StartupError
from tokenizer_svc.gguf_files import load_gguf_file
from tokenizer_svc.hf_files import load_hf_directory
from tokenizer_svc.tokenizer_files import TokenizerFiles


def load_tokenizer_files(model: Path) -> TokenizerFiles:
    """Reads a Hugging Face directory, or the metadata of a GGUF file.

    Raises StartupError with the cause in one line.
    """
    if model.is_dir():
        return load_hf_directory(model)
    if model.is_file():
        return load_gguf_file(model)
    raise StartupError(f"there is no model at {model}")
