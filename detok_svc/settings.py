"""The settings of the detokenizer service."""

from dataclasses import dataclass

from protos.wire.service import check_main
from protos.wire.settings import REQUIRED, setting


@dataclass(frozen=True)
class Settings:
    """Filled by protos.wire.settings from flags and the environment (TOKENLINE_DETOK_…)."""

    tokenizer: tuple[str, ...] = setting(
        REQUIRED, "host:port[,host:port…] of the tokenizer service, where the tokenizer is fetched."
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8002, "Port to listen on; 0 picks a free one.", minimum=0, maximum=65535)
    drain_seconds: float = setting(
        30.0, "How long live sequences may go on after a request to stop.", minimum=0
    )
    engine_idle_seconds: float = setting(
        300.0, "A connection to an engine is closed after so long without work.", minimum=0.1
    )
    tokenizer_poll_seconds: float = setting(
        30.0, "How often the tokenizer service is asked whether its model changed.", minimum=0.1
    )
    log_level: str = setting(
        "info", "Least severe level to log.", choices=("debug", "info", "warning", "error")
    )


if __name__ == "__main__":
    check_main("detok_svc", Settings)
