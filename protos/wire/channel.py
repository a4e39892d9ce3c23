"""Client channels, with the options that both ends of the line must share."""

from typing import Final

import grpc

from protos.wire.call_limit import CallLimit

MAX_MESSAGE_BYTES: Final = 64 << 20


def message_limits(max_message_bytes: int) -> list[tuple[str, int]]:
    """gRPC's default limit of 4 MiB applies to each direction of each side; this lifts it."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


def open_channel(address: str, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to `host:port` that notices a dead peer within seconds and reconnects by itself."""
    return grpc.aio.insecure_channel(
        address,
        interceptors=[CallLimit()],
        options=[
            *message_limits(max_message_bytes),
            # A peer that is stopped or cut off answers no ping: its connection is broken in 2.5 s,
            # and only a new one can find that it, or another in its place, is back.
            ("grpc.keepalive_time_ms", 1_000),
            ("grpc.keepalive_timeout_ms", 1_500),
            # What a ping of a connection is given, whoever sent it: 60 s by default.
            ("grpc.http2.ping_timeout_ms", 1_500),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # Also the time that a connection is given to come about: on a busy machine, 100 ms
            # were too few.
            ("grpc.min_reconnect_backoff_ms", 2_000),
            ("grpc.max_reconnect_backoff_ms", 250),
            # Each channel its own connection: streams to one peer share no flow-control window
            # with the polls of another.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ],
    )
