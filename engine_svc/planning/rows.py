"""The rows of the running batch: which request has which."""

from collections.abc import Iterable

from engine_svc.planning.request import Request
from engine_svc.planning.step import RowStart, RowStep


class Rows:
    """`requests[row]` is that of a row, None while nobody has it. Keeps `row` of a Request."""

    def __init__(self, num_rows: int) -> None:
        self.requests: list[Request | None] = [None] * num_rows
        self._free = list(reversed(range(num_rows)))

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def give(self, request: Request) -> None:
        """Puts a request into a free row."""
        request.row = self._free.pop()
        self.requests[request.row] = request

    def take_back(self, request: Request) -> None:
        assert request.row is not None
        self.requests[request.row] = None
        self._free.append(request.row)
        request.row = None

    def of(self, parts: Iterable[RowStart | RowStep]) -> list[Request]:
        """The requests of parts of the plan in flight, or of one that is being made."""
        requests = [self.requests[part.row] for part in parts]
        return [request for request in requests if request is not None]
