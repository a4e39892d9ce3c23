"""Who a request is: its id and trace, given by the client or made here."""

import re
import uuid
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from protos.wire.errors import InvalidRequest
from protos.wire.logs import child_traceparent

MAX_ID_LENGTH: Final = 128
_VALID_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_LENGTH}}}")
_ANSWER_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")


@dataclass(frozen=True, slots=True)
class Identity:
    """`given` is false when the client gave no usable x-request-id.

    `tenant` is the name of the request's API key; empty where no keys are asked for.
    """

    request_id: str
    traceparent: str
    given: bool
    tenant: str = ""


def identify(given_id: str | None, traceparent: str) -> Identity:
    """Takes the client's id when it may be used, and a span in the client's trace."""
    usable = given_id is not None and _VALID_ID.fullmatch(given_id) is not None
    request_id = given_id if usable and given_id is not None else uuid.uuid4().hex
    return Identity(request_id, child_traceparent(traceparent), usable)


def checked_identity(request: Request) -> Identity:
    """The identity of a request that is about to become live. Raises InvalidRequest."""
    identity: Identity = request.state.identity
    if not identity.given and "x-request-id" in request.headers:
        raise InvalidRequest(
            f"x-request-id must be 1 to {MAX_ID_LENGTH} visible ASCII characters.",
            code="invalid_value",
            param="x-request-id",
        )
    return identity


def candidate_ids(text: str) -> list[str]:
    """The request ids that `text` may mean: itself, or what an answer's `id` was made from."""
    return [text] + [
        text.removeprefix(prefix) for prefix in _ANSWER_PREFIXES if text.startswith(prefix)
    ]
