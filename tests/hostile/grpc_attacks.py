"""Bytes that no honest client would send to a gRPC port, drawn from a seeded generator."""

import random
import struct
from collections.abc import Callable
from typing import Final

Attack = Callable[[random.Random], bytes]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
METHODS: Final = (
    "/protos.tokenizer.v1.TokenizerService/Encode",
    "/protos.tokenizer.v1.TokenizerService/Decode",
    "/protos.tokenizer.v1.TokenizerService/GetTokenizer",
    "/protos.detok.v1.DetokService/Generate",
    "/protos.detok.v1.DetokService/GetStatus",
    "/protos.engine.v1.EngineService/Generate",
    "/protos.engine.v1.EngineService/GetStatus",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no.such.Service/Method",
    "no-slash",
    "/" + "a" * 2000,
)
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _string(text: bytes) -> bytes:
    """A literal of HPACK without Huffman coding (RFC 7541, section 5.2)."""
    length = len(text)
    if length < 127:
        return bytes([length]) + text
    encoded, rest = b"\x7f", length - 127
    while rest >= 128:
        encoded += bytes([rest % 128 + 128])
        rest //= 128
    return encoded + bytes([rest]) + text


def field(name: str, value: bytes) -> bytes:
    return b"\x00" + _string(name.encode()) + _string(value)


def call_head(path: str, *more: bytes) -> bytes:
    """The header block of a gRPC call."""
    return b"".join(
        [
            field(":method", b"POST"),
            field(":scheme", b"http"),
            field(":path", path.encode()),
            field(":authority", b"x"),
            field("te", b"trailers"),
            field("content-type", b"application/grpc"),
            *more,
        ]
    )


def message(content: bytes, *, length: int | None = None, compressed: int = 0) -> bytes:
    """A gRPC message with its prefix, which may lie."""
    return struct.pack(">BI", compressed, len(content) if length is None else length) + content


def _opened() -> bytes:
    return PREFACE + frame(_SETTINGS, 0, 0)


def call(path: str, content: bytes, *more: bytes, stream: int = 1, end: int = _END_STREAM) -> bytes:
    block = call_head(path, *more)
    return frame(_HEADERS, _END_HEADERS, stream, block) + frame(_DATA, end, stream, content)


def another_protocol(generator: random.Random) -> bytes:
    return generator.choice(
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + generator.randbytes(500),
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
            generator.randbytes(generator.randint(1, 5000)),
            b"\x00" * 5000,
            PREFACE[: generator.randrange(len(PREFACE))],
        ]
    )


def random_frames(generator: random.Random) -> bytes:
    """Frames of any kind and length, on streams that are or are not there."""
    frames = b"".join(
        frame(
            generator.randrange(12),
            generator.randrange(256),
            generator.choice([0, 1, 2, 3, 5, 1 << 30]),
            generator.randbytes(generator.choice([0, 1, 4, 5, 8, 100])),
        )
        for _ in range(generator.randint(1, 50))
    )
    return _opened() + frames


def too_long_frame(generator: random.Random) -> bytes:
    return _opened() + b"\xff\xff\xff" + bytes([generator.randrange(10), 0]) + b"\0\0\0\1" * 1000


def control_flood(generator: random.Random) -> bytes:
    one = generator.choice(
        [
            frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)),
            frame(_SETTINGS, 0, 0),
            frame(_PING, 0, 0, b"\0" * 8),
            frame(_WINDOW, 0, 0, struct.pack(">I", 1)),
            frame(_WINDOW, 0, 0, struct.pack(">I", (1 << 31) - 1)),
            frame(_GO_AWAY, 0, 0, b"\0" * 8),
            frame(_DATA, 0, 1, b""),
        ]
    )
    return _opened() + one * generator.choice([100, 10_000])


def large_metadata(generator: random.Random) -> bytes:
    path = generator.choice(METHODS)
    size = generator.choice([10_000, 100_000, 1 << 20])
    if generator.random() < 0.5:
        block = call_head(path, *[field(f"x-{number}", b"y") for number in range(size // 10)])
    else:
        block = call_head(path, field("x-large", b"y" * size))
    pieces = [block[start : start + 16_000] for start in range(0, len(block), 16_000)]
    frames = [frame(_HEADERS, 0, 1, pieces[0])]
    frames += [frame(_CONTINUATION, 0, 1, piece) for piece in pieces[1:]]
    # Half of them never end.
    end = frame(_CONTINUATION, _END_HEADERS, 1) if generator.random() < 0.5 else b""
    return _opened() + b"".join(frames) + end


def rapid_resets(generator: random.Random) -> bytes:
    """Calls that are given up as soon as they are made."""
    path = generator.choice(METHODS)
    block = call_head(path)
    number = generator.choice([50, 2000])
    return _opened() + b"".join(
        frame(_HEADERS, _END_HEADERS, stream, block)
        + frame(_RESET, 0, stream, struct.pack(">I", 8))
        for stream in range(1, 2 * number, 2)
    )


def many_streams(generator: random.Random) -> bytes:
    """Calls that send nothing and do not end."""
    block = call_head(generator.choice(METHODS))
    number = generator.choice([50, 2000])
    return _opened() + b"".join(
        frame(_HEADERS, _END_HEADERS, stream, block) for stream in range(1, 2 * number, 2)
    )


def lying_prefix(generator: random.Random) -> bytes:
    content = generator.randbytes(generator.choice([0, 10, 1000]))
    length = generator.choice([1, 1 << 20, (64 << 20) + 1, (1 << 32) - 1])
    prefixed = message(content, length=length, compressed=generator.randrange(3))
    end = generator.choice([0, _END_STREAM])
    return _opened() + call(generator.choice(METHODS), prefixed, end=end)


def garbage_messages(generator: random.Random) -> bytes:
    """Calls that are right but for the messages in them."""
    content = b"".join(
        message(generator.randbytes(generator.randint(0, 200)))
        for _ in range(generator.randint(1, 5))
    )
    return _opened() + call(generator.choice(METHODS), content)


def nested_messages(generator: random.Random) -> bytes:
    """Fields within fields, deeper than any message."""
    content = b""
    for _ in range(generator.choice([50, 150])):
        content = b"\x0a" + _varint(len(content)) + content
    return _opened() + call(generator.choice(METHODS), message(content))


def _varint(number: int) -> bytes:
    encoded = b""
    while number >= 128:
        encoded += bytes([number % 128 + 128])
        number //= 128
    return encoded + bytes([number])


def odd_metadata(generator: random.Random) -> bytes:
    odd = generator.choice(
        [
            field("grpc-timeout", b"0n"),
            field("grpc-timeout", b"999999999H"),
            field("grpc-timeout", b"x"),
            field("grpc-encoding", b"nothing-known"),
            field("content-type", b"text/html"),
            field("x-request-id", b"\xff\xfe"),
            field("traceparent", b"a" * 3000),
            field("X-Upper", b"y"),
            field("bad-bin", b"!!!"),
            field(":path", b"/twice"),
            field("te", b"\x00"),
        ]
    )
    return _opened() + call(generator.choice(METHODS), message(b""), odd)


ATTACKS: Final[tuple[Attack, ...]] = (
    another_protocol, random_frames, too_long_frame, control_flood, large_metadata, rapid_resets,
    many_streams, lying_prefix, garbage_messages, garbage_messages, nested_messages, odd_metadata,
)  # fmt: skip
