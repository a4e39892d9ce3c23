"""A call of an endpoint that generates: all that its job and its answer's form are made from."""

import secrets
import time
from typing import Final

import msgspec
from starlette.requests import Request

from gateway.identity import Identity, checked_identity

# Seeds that requests bring none of: not negative, so that they read well in a record.
_RANDOM_SEED_BITS: Final = 63


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
    return Call(
        endpoint=endpoint,
        body=body,
        request_id=identity.request_id,
        traceparent=identity.traceparent,
        tenant=identity.tenant,
        seed=secrets.randbits(_RANDOM_SEED_BITS),
        started_at=time.time(),
    )
