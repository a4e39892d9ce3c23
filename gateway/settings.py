"""What a gateway can be told at its start."""

import re
from dataclasses import dataclass
from pathlib import Path

from gateway.tool_call_format import AUTO, SETTINGS
from protos.wire.service import check_main
from protos.wire.settings import REQUIRED, parse_size, setting


def parse_origins(text: str) -> tuple[str, ...]:
    """Origins as browsers send them, without a path; raises ValueError."""
    origins = tuple(part.strip().rstrip("/") for part in text.split(",") if part.strip())
    for origin in origins:
        if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) is None:
            raise ValueError(f"expected an origin such as https://example.org, got {origin!r}")
    return origins


@dataclass(frozen=True)
class Settings:
    """Flags `--max-live-requests …`, or `TOKENLINE_GATEWAY_MAX_LIVE_REQUESTS` and so on."""

    tokenizer: tuple[str, ...] = setting(REQUIRED, "Tokenizer services, host:port[,host:port…].")
    detok: tuple[str, ...] = setting(REQUIRED, "Detokenizer services, host:port[,host:port…].")
    engine: tuple[str, ...] = setting(
        REQUIRED, "Engines, host:port[,host:port…], as the detokenizers reach them."
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.", minimum=0, maximum=65535)
    redis: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis or Valkey: redis://, rediss://, unix://, "
        "redis+sentinel://host:port[,host:port…]/master[/db] or redis+cluster://host:port.",
    )
    redis_prefix: str = setting("tokenline:", "What every Redis key and channel begins with.")
    record_ttl_seconds: int = setting(
        3600, "How long the record of a finished request stays in Redis.", minimum=1
    )
    response_ttl_seconds: int = setting(
        86_400, "How long a response of /v1/responses stays in Redis.", minimum=1
    )
    max_live_requests: int = setting(
        1024, "Requests in progress beyond which new ones get HTTP 429.", minimum=1
    )
    max_connections: int | None = setting(
        None,
        "Open connections; at the limit the one that has waited longest for a request is closed "
        "for a new one, or the new one gets HTTP 503. Default: 4096, or what the limit of open "
        "files allows.",
        minimum=1,
    )
    max_queued_requests: int = setting(
        0,
        "Requests that may wait for an engine, each choice counted; more get HTTP 429 with a time "
        "to come again. 0: five eighths of what the engines run at once.",
        minimum=0,
    )
    max_queued_tokens: int = setting(
        0,
        "Tokens that they may be expected to take, prompt and answer. 0: five eighths of "
        "what the engines' KV caches hold.",
        minimum=0,
    )
    max_body_bytes: int = setting(
        16 << 20, "Largest request body, such as 16MiB.", parse=parse_size, minimum=1
    )
    api_keys: Path | None = setting(
        None,
        "A file of name:sha256-hex lines; requests then need one of these keys. "
        "`python -m gateway.new_api_key NAME` makes one. Read again when it changes.",
    )
    public_metrics: bool = setting(False, "Whether /metrics needs no API key.")
    cors_origins: tuple[str, ...] = setting(
        (),
        "Web pages that may call the API: https://host[,https://host…], or * for all.",
        parse=parse_origins,
    )
    tool_call_format: str = setting(
        AUTO, "How the model writes tool calls; auto: as its chat template shows.", choices=SETTINGS
    )
    reasoning: str = setting(
        "auto",
        "Whether text between <think> and </think> is told from the answer; auto: where the "
        "model's chat template shows it.",
        choices=("auto", "on", "off"),
    )
    ping_seconds: float = setting(
        15.0, "A stream with nothing to say sends a comment this often.", minimum=0.01
    )
    send_timeout_seconds: float = setting(
        60.0, "A client that takes nothing of its answer for so long is disconnected.", minimum=0.1
    )
    recovery_seconds: float = setting(
        60.0,
        "How long requests wait for a replica in place of one that was lost; then they fail.",
        minimum=0.0,
    )
    drain_seconds: float = setting(
        30.0, "How long requests in progress may go on after SIGTERM.", minimum=0.0
    )
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))


if __name__ == "__main__":
    check_main("gateway", Settings)
