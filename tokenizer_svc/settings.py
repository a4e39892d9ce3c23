"""What can be set when the tokenizer service starts."""

from dataclasses import dataclass
from pathlib import Path

from protos.wire.channel import MAX_MESSAGE_BYTES
from protos.wire.service import check_main
from protos.wire.settings import REQUIRED, parse_size, setting


@dataclass(frozen=True)
class Settings:
    """One process of the tokenizer service."""

    model: Path = setting(REQUIRED, "The model: a Hugging Face directory or a GGUF file.")
    served_model_name: str = setting("", "The name users see; by default that of the file.")
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8001, "Port to listen on; 0 picks a free one.", minimum=0, maximum=65535)
    chat_template: Path | None = setting(
        None, "A file with a Jinja chat template, instead of the model's own."
    )
    max_prompt_tokens: int = setting(
        0, "Prompts that must have more tokens are refused unencoded; 0: the model's context.",
        minimum=0,
    )  # fmt: skip
    num_workers: int = setting(2, "Texts encoded at the same time.", minimum=1, maximum=256)
    num_template_workers: int = setting(
        1, "Processes that render chat templates.", minimum=1, maximum=64
    )
    template_seconds: float = setting(10.0, "The most time for one rendering.", minimum=0.1)
    template_memory: int = setting(
        512 << 20, "The most memory of a template worker, such as 512MiB.", parse=parse_size,
        minimum=128 << 20,
    )  # fmt: skip
    max_message_size: int = setting(
        MAX_MESSAGE_BYTES, "The largest request and reply, such as 64MiB.", parse=parse_size,
        minimum=1 << 10,
    )  # fmt: skip
    log_level: str = setting(
        "info", "How much to log.", choices=("debug", "info", "warning", "error")
    )


if __name__ == "__main__":
    check_main("tokenizer_svc", Settings)
