"""Finds the field of a JSON body whose text is no Unicode."""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

_LONE_SURROGATE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_NO_UTF_8: Final = re.compile("[\udc80-\udcff]")
# Unicode assigns no character to it, and nobody sends it.
_MARK: Final = "\uffff"


def path_of_bad_text(body: bytes) -> str | None:
    """Such as `.messages[0].content`: the first string, or name, with a lone surrogate or bytes
    that are no UTF-8. None where that is not what is wrong with the body.
    """
    marked = _LONE_SURROGATE.sub(rb"\\uffff", body).decode("utf-8", "surrogateescape")
    try:
        value = msgspec.json.decode(_NO_UTF_8.sub(_MARK, marked))
    except (msgspec.DecodeError, RecursionError):
        return None
    return next(_marked_paths(value, ""), None)


def _marked_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, str):
        if _MARK in value:
            yield path
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _marked_paths(child, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, child in value.items():
            if _MARK in name:
                yield path
            yield from _marked_paths(child, f"{path}.{name}")
