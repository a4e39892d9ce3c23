"""What Redis keeps of a run, so that any gateway can follow it or go on with it."""

from dataclasses import dataclass
from typing import Protocol

from gateway.records import RequestRecord


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


@dataclass(frozen=True, slots=True)
class Claim:
    """Who has an idempotency key: the request `request_id`, begun with a body of `body_digest`.

    is_new: it is this call's; its run's record must have `incarnation`. call: what was stored
    with the claim, which is enough to begin the run anew should nothing else be left of it.
    """

    request_id: str
    body_digest: str
    is_new: bool
    incarnation: str
    owner: str
    call: bytes


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What is left of a run in Redis.

    record: None when none was written before its gateway died; `incarnation`, `epoch` and `owner`
    hold all the same. batches: of the log so far, from the beginning. ended: the log is whole.
    owner_alive: the gateway that has it generates it now; False: it may be taken over.
    """

    request_id: str
    incarnation: str
    epoch: int
    owner: str
    record: RequestRecord | None
    call: bytes
    batches: list[bytes]
    owner_alive: bool
    ended: bool
