"""Holds a channel's unary calls back beyond a number, so that no server has to refuse them."""

import asyncio
from typing import Any, Final

import grpc

# Servers refuse more than MAX_CONCURRENT_CALLS of one connection. They count a call until they have
# forgotten it, somewhat after its caller has the answer; so callers keep well below.
MAX_CONCURRENT_CALLS: Final = 256
_MAX_UNARY_CALLS: Final = 96


class CallLimit(grpc.aio.UnaryUnaryClientInterceptor):
    """At most 96 unary calls at once; others wait for their turn, when their time-out begins."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_MAX_UNARY_CALLS)

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        async with self._turns:
            call = await continuation(client_call_details, request)
            try:
                # Until its end, however it ends.
                await call.code()
            except asyncio.CancelledError:
                # To give up the waiting alone would leave the server at work for nobody.
                call.cancel()
                raise
            return call
