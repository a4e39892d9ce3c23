"""Lists of requests that are kept in the order in which requests are served."""

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Final

from engine_svc.planning.request import Request

_ORDER: Final = attrgetter("order")


def insert(requests: list[Request], request: Request) -> None:
    insort(requests, request, key=_ORDER)


def remove(requests: list[Request], request: Request) -> None:
    index = bisect_left(requests, request.order, key=_ORDER)
    assert requests[index] is request
    del requests[index]
