"""Bytes that no honest client would send to an HTTP port, drawn from a seeded generator."""

import json
import random
from collections.abc import Callable
from typing import Any, Final

Attack = Callable[[random.Random, str], bytes]

PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
)
_METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT")
_ODD_VALUES: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1 << 63, 1 << 200, -0.0, 1e308, "", "x" * 5000, "\u0000", "\ud800", [], {},
    [[]], [None], {"": {}}, ["x"] * 500, {"type": "function"}, {"$ref": "#"},
)  # fmt: skip
_FIELDS: Final = (
    "model", "messages", "prompt", "input", "max_tokens", "temperature", "top_p", "n", "stop",
    "seed", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", "response_format",
    "stream", "stream_options", "guided_json", "structured_outputs", "bad_words", "timeout",
    "allowed_token_ids", "min_tokens", "prompt_logprobs", "echo", "best_of", "tokens", "priority",
)  # fmt: skip


def request(
    body: bytes, path: str = PATHS[0], headers: bytes = b"", *, method: bytes = b"POST"
) -> bytes:
    return (
        method + b" " + path.encode() + b" HTTP/1.1\r\nhost: x\r\n"
        b"content-type: application/json\r\n"
        + headers
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )


def small_body(generator: random.Random, model: str) -> dict[str, Any]:
    """A body that is right for every path of PATHS, and cheap."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "prompt": "hi",
        "input": "hi",
        "tokens": [1, 2],
        "max_tokens": generator.randint(1, 3),
        "stream": generator.random() < 0.5,
    }


def valid(generator: random.Random, model: str) -> bytes:
    path = generator.choice(PATHS)
    return request(json.dumps(small_body(generator, model)).encode(), path)


def truncated(generator: random.Random, model: str) -> bytes:
    whole = valid(generator, model)
    return whole[: generator.randrange(len(whole))]


def mutated(generator: random.Random, model: str) -> bytes:
    """A valid request with some bytes changed, put in or taken out."""
    content = bytearray(valid(generator, model))
    for _ in range(generator.randint(1, 12)):
        place = generator.randrange(len(content))
        match generator.randrange(3):
            case 0:
                content[place] = generator.randrange(256)
            case 1:
                content[place:place] = generator.randbytes(generator.randint(1, 9))
            case _:
                del content[place : place + generator.randint(1, 9)]
    return bytes(content)


def odd_fields(generator: random.Random, model: str) -> bytes:
    body = small_body(generator, model)
    for _ in range(generator.randint(1, 4)):
        body[generator.choice(_FIELDS)] = generator.choice(_ODD_VALUES)
    return request(json.dumps(body).encode(), generator.choice(PATHS))


def odd_json(generator: random.Random, model: str) -> bytes:
    depth = generator.choice([90, 2000, 200_000])
    body = generator.choice(
        [
            b"[" * depth + b"]" * depth,
            b'{"a":' * depth,
            b'{"messages": ' + b"[" * depth,
            b"\xff\xfe{}",
            b'{"model": "\xed\xa0\x80"}',
            b'{"seed": ' + b"9" * 100_000 + b"}",
            b'{"temperature": 1e99999}',
            b'{"messages": [' + b"{}," * 50_000 + b"{}]}",
            b'{"prompt": "' + b"a " * (1 << 19) + b'"}',
            b"NaN",
            b"",
            generator.randbytes(generator.randint(1, 3000)),
        ]
    )
    return request(body, generator.choice(PATHS))


def large_head(generator: random.Random, _: str) -> bytes:
    size = generator.choice([60_000, 70_000, 1 << 20])
    return generator.choice(
        [
            b"GET /" + b"a" * size + b" HTTP/1.1\r\nhost: x\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\n" + b"x: " + b"b" * size + b"\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\n" + b"x:y\r\n" * (size // 5) + b"\r\n",
            b"G" * size,
            b"GET /healthz HTTP/1.1\r\n" + b"y" * size + b": x\r\n\r\n",
            b"\r\n" * (size // 2),
        ]
    )


def large_body(generator: random.Random, _: str) -> bytes:
    announced = generator.choice([17 << 20, 1 << 40, (1 << 64) - 1, 1 << 64])
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % announced
    expect = b"expect: 100-continue\r\n" if generator.random() < 0.5 else b""
    return head + expect + b"\r\n" + b"x" * generator.choice([0, 1000, 1 << 20])


def smuggled(generator: random.Random, _: str) -> bytes:
    """Framing that two readers could take for different things."""
    lines = [
        b"content-length: 5", b"content-length: 6", b"content-length: 5, 5", b"content-length: +5",
        b"content-length: 0x5", b"content-length : 5", b"content-length: -1", b"content-length:",
        b"transfer-encoding: chunked", b"transfer-encoding: identity", b"transfer-encoding: gzip",
        b"transfer-encoding: chunked, chunked", b"transfer-encoding: xchunked",
        b"transfer-encoding:\x0bchunked", b"transfer-encoding\t: chunked", b" folded: x",
        b"x: y\rcontent-length: 9", b"x: y\ncontent-length: 9", b"connection: content-length",
    ]  # fmt: skip
    chosen = generator.sample(lines, generator.randint(1, 3))
    head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"host: x", *chosen])
    return head + b"\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: y\r\n\r\n"


def chunked(generator: random.Random, _: str) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + generator.choice(
        [
            b"ffffffffffffffff\r\nx",
            b"fffffffffffffffff\r\nx",
            b"-1\r\n\r\n",
            b"0x2\r\n{}\r\n0\r\n\r\n",
            b"2\n{}\n0\n\n",
            b"1;" + b"a" * 200_000 + b"\r\n{\r\n",
            b"1;a=b\r\n{\r\n" * 20_000,
            b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 30_000 + b"\r\n",
            b"2\r\n{}\r\n0\r\nauthorization: Bearer x\r\n\r\n",
            b"1\r\n{\r\n" * 3,
            b"\x00\r\n",
        ]
    )


def garbage(generator: random.Random, _: str) -> bytes:
    return generator.choice(
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + generator.randbytes(500),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            generator.randbytes(generator.randint(1, 5000)),
            b"\x00" * generator.randint(1, 5000),
            b"*1\r\n$4\r\nPING\r\n",
            b"GET /\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.0\r\n",
            b"\xff" * 10,
        ]
    )


def odd_request_line(generator: random.Random, _: str) -> bytes:
    method = generator.choice([*_METHODS, "get", "BREW", "DESCRIBE", "PRI", ""])
    target = generator.choice(
        [
            "*", "/", "//", "http://x/v1/models", "http://x", "example.org:443", "/%00", "/%ff%fe",
            "/v1/models/..%2f..%2fetc%2fpasswd", "/../../etc/passwd", "/v1/requests/%0d%0ax",
            "/v1/requests/" + "a" * 3000, "/v1/responses/x?starting_after=-1", "?", "/\x7f", "/é",
            "/v1/requests/x/events", "/v1/models?" + "a=b&" * 3000, "http://[::1", "/ /",
        ]
    )  # fmt: skip
    version = generator.choice(["1.1", "1.0", "0.9", "2.0", "1.9", "9.9", "x"])
    return f"{method} {target} HTTP/{version}\r\nhost: x\r\n\r\n".encode()


def odd_headers(generator: random.Random, model: str) -> bytes:
    names = [
        b"idempotency-key", b"last-event-id", b"x-request-id", b"traceparent", b"authorization",
        b"x-api-key", b"expect", b"upgrade", b"connection", b"content-type", b"accept-encoding",
        b"content-encoding", b"origin", b"range", b"te", b"host", b"cookie", b"x-forwarded-for",
    ]  # fmt: skip
    values = [
        b"", b"0", b"-1", b"1.2.3", b"9" * 400, b"a" * 5000, b"\xff\xfe", b"100-continue", b"gzip",
        b"h2c, upgrade", b"websocket", b"Bearer", b"Basic !!!", b"../../x", b"%0d%0a", b"a,b;c=\"",
    ]  # fmt: skip
    lines = b"".join(
        generator.choice(names) + b": " + generator.choice(values) + b"\r\n"
        for _ in range(generator.randint(1, 5))
    )
    body = json.dumps(small_body(generator, model)).encode()
    return request(body, generator.choice(PATHS), lines)


def pipelined(generator: random.Random, model: str) -> bytes:
    number = generator.choice([3, 40, 3000])
    if generator.random() < 0.5:
        return b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * number
    return b"".join(valid(generator, model) for _ in range(min(number, 40)))


ATTACKS: Final[tuple[Attack, ...]] = (
    truncated, mutated, mutated, odd_fields, odd_fields, odd_json, large_head, large_body,
    smuggled, chunked, garbage, odd_request_line, odd_headers, pipelined,
)  # fmt: skip
