"""When requests are late."""

import math
from collections.abc import Collection

from engine_svc.planning.request import Request


class Deadlines:
    """Finds requests whose deadline has come; while none has, that costs one comparison."""

    def __init__(self) -> None:
        # No live request has an earlier one.
        self._next = math.inf

    def note(self, request: Request) -> None:
        """A request has come."""
        self._next = min(self._next, request.deadline)

    def late(self, now: float, requests: Collection[Request]) -> list[Request]:
        """Those of `requests`, which are all, that are late, and are then no more."""
        if now < self._next:
            return []
        late = [request for request in requests if request.deadline <= now]
        self._next = min((r.deadline for r in requests if r.deadline > now), default=math.inf)
        return late
