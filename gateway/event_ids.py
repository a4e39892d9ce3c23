"""The ids of a stream's events: how far each choice has come, so that a client goes on from there.

`5` for one choice, `5.7` for two: tokens, where an end that came without a token counts as one.
"""

import re
from collections.abc import Sequence
from typing import Final

from protos.wire.errors import InvalidRequest

LAST_EVENT_ID: Final = "last-event-id"

# More than any context; and no more choices than a request may have.
_COUNT_DIGITS: Final = 9
_VALID: Final = re.compile(rf"\d{{1,{_COUNT_DIGITS}}}(\.\d{{1,{_COUNT_DIGITS}}})*", re.ASCII)
_MAX_CHARACTERS: Final = 1 << 16


def id_line(covered: Sequence[int]) -> bytes:
    """The line of an event after which `covered` is had."""
    if len(covered) == 1:
        return b"id: %d\n" % covered[0]
    return b"id: " + ".".join(map(str, covered)).encode() + b"\n"


def parse_event_id(text: str, num_choices: int, max_covered: int) -> list[int]:
    """What a client has, by the id of its last event. Raises InvalidRequest."""
    if len(text) > _MAX_CHARACTERS or _VALID.fullmatch(text) is None:
        raise _invalid("must be the `id` of an event of this stream, such as 12 or 5.7")
    covered = [int(part) for part in text.split(".")]
    if len(covered) != num_choices:
        raise _invalid(f"has {len(covered)} numbers, but the stream has {num_choices} choices")
    if max(covered) > max_covered:
        raise beyond_the_end()
    return covered


def beyond_the_end() -> InvalidRequest:
    return _invalid("is beyond the end of the stream")


def _invalid(what: str) -> InvalidRequest:
    return InvalidRequest(f"Last-Event-ID {what}.", code="invalid_value", param=LAST_EVENT_ID)
