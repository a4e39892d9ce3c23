"""A call of an endpoint that generates: all that its job and its answer's form are made from."""

import hashlib
import re
import secrets
import time
from typing import Final

import msgspec
from starlette.requests import Request

from gateway.identity import Identity, checked_identity
from protos.wire.errors import InvalidRequest

MAX_KEY_LENGTH: Final = 256
_VALID_KEY: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_LENGTH}}}")
# Seeds that requests bring none of: not negative, so that they read well in a record.
_SEED_BITS: Final = 63
_SEED_DIGITS: Final = 16


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Any gateway makes the same job and the same answer of it.

    seed: for a body that has none. started_at: in unix seconds; the deadline counts from there.
    key_digest: of the client's idempotency key; empty for none.
    """

    endpoint: str
    body: bytes
    request_id: str
    traceparent: str
    tenant: str
    seed: int
    started_at: float
    key_digest: str = ""

    @property
    def created(self) -> int:
        """As answers tell it."""
        return int(self.started_at)

    def encode(self) -> bytes:
        return _encode(self)


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Call)


def decode_call(stored: bytes) -> Call:
    """What `Call.encode` made. Raises msgspec.DecodeError for what another version wrote."""
    return _decoder.decode(stored)


def new_call(request: Request, endpoint: str, body: bytes) -> Call:
    """The call of a request whose body was read. Raises InvalidRequest for an id of no use."""
    identity: Identity = checked_identity(request)
    # Several headers are one with commas between, as in all of HTTP, and that is no key.
    keys = request.headers.getlist("idempotency-key")
    digest = _key_digest(", ".join(keys), endpoint, identity.tenant) if keys else ""
    return Call(
        endpoint=endpoint,
        body=body,
        request_id=identity.request_id,
        traceparent=identity.traceparent,
        tenant=identity.tenant,
        # Of a key, always the same, so that a request that was lost with all that was kept of it is
        # answered with the same tokens again.
        seed=int(digest[:_SEED_DIGITS], 16) >> 1 if digest else secrets.randbits(_SEED_BITS),
        started_at=time.time(),
        key_digest=digest,
    )


def _key_digest(key: str, endpoint: str, tenant: str) -> str:
    """A key is of one tenant and one endpoint. Raises InvalidRequest."""
    if _VALID_KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"Idempotency-Key must be 1 to {MAX_KEY_LENGTH} visible ASCII characters.",
            code="invalid_value",
            param="idempotency-key",
        )
    return hashlib.sha256(repr((tenant, endpoint, key)).encode()).hexdigest()
