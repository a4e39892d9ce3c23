"""Bodies from the network: bounded in size and depth, decoded once, errors that name the field."""

import re
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from gateway.bad_text import path_of_bad_text
from gateway.errors import ClientDisconnected
from protos.wire.errors import InvalidRequest, TooLarge

T = TypeVar("T")

# Deep enough for any real schema; far from the recursion limits of those who read it further on.
MAX_NESTING: Final = 100
# Objects and lists in a body: their number decides what reading it costs, besides its size.
MAX_CONTAINERS: Final = 1 << 17

_QUOTES_AND_BRACKETS: Final = b'"[]{}'
_ALL_OTHERS: Final = bytes(set(range(256)) - set(_QUOTES_AND_BRACKETS))
_VALIDATION_MESSAGE: Final = re.compile(r"(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING_FIELD: Final = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. TooLarge at once when it is announced to be over `max_bytes`."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(
            f"The body's content-encoding is {encoding[:40]}; send it without one.",
            code="unsupported_content_encoding",
        )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    return b"".join(parts)


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T], within: str = "") -> T:
    """The typed body; InvalidRequest with `param`, a path below `within`, where a field is wrong.

    within: the field of a larger body that this is the value of; empty for a whole body.
    """
    _check_nesting(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field(error, within) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        path = path_of_bad_text(body)
        if path is not None:
            raise _no_text((within + path).lstrip(".")) from error
        raise InvalidRequest(
            f"The body is not valid JSON: {error}.", code="invalid_json", param=within
        ) from error


def decode_part(raw: bytes | msgspec.Raw, kind: Any, param: str) -> tuple[Any, bytes]:
    """Checks a part of a body that is handed on as JSON, unknown keys included.

    Returns it as `kind`, and as normalised JSON. Errors name paths below `param`.
    """
    whole = decode_body(bytes(raw), msgspec.json.Decoder(), param)
    try:
        return msgspec.convert(whole, kind), msgspec.json.encode(whole)
    except msgspec.ValidationError as error:
        raise invalid_field(error, param) from error


def invalid_field(error: msgspec.ValidationError, within: str = "") -> InvalidRequest:
    """msgspec's "Expected `int`, got `str` - at `$.messages[0].role`", with its path as `param`."""
    match = _VALIDATION_MESSAGE.fullmatch(str(error))
    assert match is not None
    what = match["what"]
    # Below a value of any type, msgspec says no more than that there is a path.
    path, *_ = (match["path"] or "$").removeprefix("$").partition("[...]")
    param = within + path
    missing = _MISSING_FIELD.fullmatch(what)
    if missing is not None:
        param = f"{param}.{missing['name']}".lstrip(".")
        return InvalidRequest(
            f"Missing required field `{param}`.", code="missing_field", param=param
        )
    param = param.lstrip(".")
    place = f"`{param}`" if param else "the body"
    what = what[:1].lower() + what[1:]
    return InvalidRequest(f"Invalid value for {place}: {what}.", code="invalid_value", param=param)


def _no_text(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"`{param}` holds half of a surrogate pair, or bytes that are no UTF-8, which is no text.",
        code="invalid_string",
        param=param,
    )


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The body is over the limit of {max_bytes} bytes.", code="body_too_large")


def _check_nesting(body: bytes) -> None:
    """Refuses what is nested too deep, or has too many objects and lists."""
    if body.count(b"[") + body.count(b"{") <= MAX_NESTING:
        return
    brackets = _brackets_outside_strings(body)
    if brackets.count(b"[") + brackets.count(b"{") > MAX_CONTAINERS:
        raise InvalidRequest(
            f"The body has more than {MAX_CONTAINERS} objects and lists.", code="too_many_values"
        )
    depth = 0
    for bracket in brackets:
        if bracket in b"[{":
            depth += 1
            if depth > MAX_NESTING:
                raise InvalidRequest(
                    f"The body is nested deeper than {MAX_NESTING} levels.", code="too_deep"
                )
        else:
            depth -= 1


def _brackets_outside_strings(body: bytes) -> bytes:
    """The brackets that make the structure of a JSON text, in order.

    Each call passes over the body once, whatever is in it, even where a string has no end.
    """
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A pair of quotes with nothing between changes nothing for the rest.
    marks = unescaped.translate(None, _ALL_OTHERS).replace(b'""', b"")
    return b"".join(marks.split(b'"')[::2])
