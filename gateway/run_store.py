"""What Redis keeps of a run, so that any gateway can follow it or go on with it."""

from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from gateway.records import RequestRecord

# The last entry of a whole log.
END: Final = b""


class RunSource(Protocol):
    """A run of this gateway whose log the ledger keeps in Redis.

    `incarnation` and `epoch` are those of its record. Batches are numbered from 0 on, never change
    and are never empty; those of a run that was taken over begin at the beginning again, in the
    log of the new epoch.
    """

    request_id: str
    incarnation: str
    epoch: int

    def batches(self, start: int) -> list[bytes]:
        """The serialised batches from number `start` on."""
        ...

    @property
    def ended(self) -> bool:
        """Whether no batch follows."""
        ...

    def fenced(self) -> None:
        """Called once, when another gateway has taken the request."""
        ...


class StoredCall(msgspec.Struct, array_like=True, frozen=True):
    """What a run can be begun anew from, and with an idempotency key whose request it is.

    call: the gateway's own form of it. digest, body_digest: empty without a key.
    """

    request_id: str
    incarnation: str
    owner: str
    digest: str
    body_digest: str
    call: bytes

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


@dataclass(frozen=True, slots=True)
class Claim:
    """Who has the key `digest`: the request `request_id`, begun with a body of `body_digest`.

    is_new: it is this call's; its run's record must have `incarnation`. call: what was stored
    with the claim, which is enough to begin the run anew should nothing else be left of it.
    """

    request_id: str
    digest: str
    body_digest: str
    is_new: bool
    incarnation: str
    owner: str
    call: bytes


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What is left of a run in Redis.

    record: None when none was written before its gateway died; `incarnation`, `epoch` and `owner`
    hold all the same. digest, body_digest: of its idempotency key, or empty. batches: of the log so
    far, from the beginning. ended: the log is whole. owner_alive: the gateway that has it generates
    it now; False: it may be taken over. Of a run that may be, `batches` may be an earlier epoch's.
    """

    request_id: str
    incarnation: str
    epoch: int
    owner: str
    record: RequestRecord | None
    call: bytes
    digest: str
    body_digest: str
    batches: list[bytes]
    owner_alive: bool
    ended: bool
