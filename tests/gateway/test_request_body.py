"""Bodies: depth, decoding, and the paths in error messages."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from gateway import request_body
from gateway.request_body import decode_body, decode_part, read_body
from protos.wire.errors import InvalidRequest

ANYTHING = msgspec.json.Decoder()


class Inner(msgspec.Struct):
    number: int


class Outer(msgspec.Struct):
    inner: list[Inner]


OUTER = msgspec.json.Decoder(Outer)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


json_values = st.recursive(
    st.none() | st.booleans() | st.text(alphabet='[]{}"\\a\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(alphabet='[]{}"\\', max_size=3), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(json_values, st.integers(1, 6))
def test_exactly_what_is_nested_too_deep_is_refused(value: Any, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "MAX_NESTING", limit)
        body = json.dumps(value).encode()
        if depth(value) > limit:
            with pytest.raises(InvalidRequest, match="nested deeper"):
                decode_body(body, ANYTHING)
        else:
            assert decode_body(body, ANYTHING) == value


def structure_of(body: bytes) -> bytes:
    """The brackets outside strings, found byte by byte."""
    brackets, in_string, is_escaped = bytearray(), False, False
    for byte in body:
        if is_escaped and byte in b'"\\':
            is_escaped = False
            continue
        is_escaped = False
        if byte == ord("\\"):
            is_escaped = True
        elif byte == ord('"'):
            in_string = not in_string
        elif byte in b"[]{}" and not in_string:
            brackets.append(byte)
    return bytes(brackets)


@given(st.lists(st.sampled_from([bytes([byte]) for byte in b'"\\[]{}a,'])).map(b"".join))
def test_brackets_are_found_in_any_bytes(body: bytes) -> None:
    assert request_body._brackets_outside_strings(body) == structure_of(body)


@pytest.mark.parametrize("endless", [b'\\"', b"\\\\", b'"', b'\\"[', b"\\"])
def test_a_string_without_an_end_is_passed_over_once(endless: bytes) -> None:
    body = b'{"z":' + b"[" * 51 + b"]" * 51 + b',"y":' + b"[" * 60 + b"]" * 60 + b',"w":"'
    with pytest.raises(InvalidRequest) as caught:
        decode_body(body + endless * ((1 << 20) // len(endless)), ANYTHING)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("container", [b"[],", b"{},"])
def test_a_body_of_too_many_objects_and_lists_is_refused(container: bytes) -> None:
    most = request_body.MAX_CONTAINERS - 1
    assert decode_body(b"[" + (container * most)[:-1] + b"]", ANYTHING)
    with pytest.raises(InvalidRequest, match="more than 131072 objects and lists"):
        decode_body(b"[" + (container * (most + 1))[:-1] + b"]", ANYTHING)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{}", "inner", "Missing required field `inner`."),
        (
            b'{"inner": [{"number": 1}, {}]}',
            "inner[1].number",
            "Missing required field `inner[1].number`.",
        ),
        (
            b'{"inner": [{"number": "x"}]}',
            "inner[0].number",
            "Invalid value for `inner[0].number`: expected `int`, got `str`.",
        ),
        (b"[]", "", "Invalid value for the body: expected `object`, got `array`."),
    ],
)
def test_errors_name_the_path(body: bytes, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_body(body, OUTER)
    assert (caught.value.param, caught.value.message) == (param, message)


@pytest.mark.parametrize(
    ("raw", "param"), [(b"{}", "parts"), (b"[1]", "parts[0]"), (b"[{}]", "parts[0].number")]
)
def test_errors_in_a_part_name_the_path_from_the_body(raw: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_part(raw, list[Inner], "parts")
    assert caught.value.param == param


def test_a_part_keeps_keys_that_its_type_does_not_know() -> None:
    typed, normalised = decode_part(b'[ {"number": 1, "more": [2.5]} ]', list[Inner], "parts")
    assert typed == [Inner(1)]
    assert normalised == b'[{"number":1,"more":[2.5]}]'


async def test_only_a_body_that_is_sent_as_it_is_is_read() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    def request(*headers: tuple[bytes, bytes]) -> Request:
        return Request({"type": "http", "headers": list(headers)}, receive)

    assert await read_body(request(), 100) == b"{}"
    assert await read_body(request((b"content-encoding", b"Identity")), 100) == b"{}"
    with pytest.raises(InvalidRequest, match="content-encoding is gzip; send it without one"):
        await read_body(request((b"content-encoding", b"gzip")), 100)
