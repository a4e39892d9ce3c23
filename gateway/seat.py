"""The turn that this gateway has at a request: its first, or after another gateway's."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.records import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """`epoch` counts the gateways that had the request; `incarnation` is the request's.

    taken: the record of a request that was taken over, as far as there is one. on_start: called
    when the sequences have started.
    """

    incarnation: str
    epoch: int = 1
    taken: RequestRecord | None = None
    on_start: Callable[[], None] = lambda: None

    @property
    def is_owed(self) -> bool:
        """Whether another gateway has let the request in, so that it is not refused here."""
        return self.epoch > 1
