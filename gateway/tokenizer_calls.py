"""Calls to whichever tokenizer answers: repeated when one is lost, hedged when one is silent."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeVar

from gateway.changes import Changes
from gateway.lane import TokenizerLane
from protos.wire.errors import Unavailable

T = TypeVar("T")

_FIRST_BACKOFF_SECONDS: Final = 0.05
_LAST_BACKOFF_SECONDS: Final = 1.0
# Without an answer for so long, another tokenizer is asked beside the first.
_HEDGE_SECONDS: Final = 2.0
# A prompt that kills tokenizers must not kill them for ever.
_MAX_LOSSES: Final = 5

Ask = Callable[[TokenizerLane], Awaitable[T]]


class TokenizerCalls:
    """Calls are pure functions of their request, so that one may be made twice.

    ready: the tokenizers that may be used now. changes: rings when there may be others.
    recovery_seconds: how long a call waits for a tokenizer.
    """

    def __init__(
        self,
        ready: Callable[[], list[TokenizerLane]],
        changes: Changes,
        recovery_seconds: float,
    ) -> None:
        self._ready = ready
        self._changes = changes
        self._recovery_seconds = recovery_seconds
        self._num_calls = 0

    async def ask(self, ask: Ask[T]) -> T:
        """The answer of a tokenizer; `ask` makes the call.

        Errors other than Unavailable are answers too: they would be the same elsewhere. Raises
        Unavailable when no tokenizer has answered in time; a cancel ends all calls.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._recovery_seconds
        backoff = _FIRST_BACKOFF_SECONDS
        num_losses = 0
        failed: set[TokenizerLane] = set()
        while True:
            lane = self._choose(failed)
            if lane is not None:
                was_suspect = lane.suspect
                try:
                    return await self._ask_hedged(ask, lane, failed)
                except Unavailable as error:
                    num_losses += not was_suspect
                    if num_losses >= _MAX_LOSSES:
                        raise _given_up(num_losses) from error
                if self._choose(failed) not in {None, *failed}:
                    continue
            if (seconds_left := deadline - loop.time()) <= 0:
                raise _none_ready(self._recovery_seconds)
            await self._changes.wait(min(backoff, seconds_left))
            backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)

    def _choose(self, failed: Collection[TokenizerLane]) -> TokenizerLane | None:
        """The tokenizers in turn; those that have failed this call, or are suspect, come last."""
        ready = self._ready()
        if not ready:
            return None
        self._num_calls += 1
        start = self._num_calls % len(ready)
        return min(ready[start:] + ready[:start], key=lambda lane: lane in failed or lane.suspect)

    async def _ask_hedged(self, ask: Ask[T], lane: TokenizerLane, failed: set[TokenizerLane]) -> T:
        """The first answer. Raises Unavailable once all that were asked are lost."""
        asked = {asyncio.ensure_future(ask(lane)): lane}
        try:
            while True:
                done, _ = await asyncio.wait(
                    asked, timeout=_HEDGE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    lost = asked.pop(task)
                    try:
                        return await task
                    except Unavailable:
                        lost.doubt()
                        failed.add(lost)
                        if not asked:
                            raise
                if not done and len(asked) == 1:
                    other = self._choose({*failed, *asked.values()})
                    if other not in {None, *failed, *asked.values()}:
                        assert other is not None
                        asked[asyncio.ensure_future(ask(other))] = other
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


def _none_ready(seconds: float) -> Unavailable:
    return Unavailable(
        f"No tokenizer has become ready within {seconds:g} seconds; try again in a while.",
        code="tokenizer_unavailable",
    )


def _given_up(num_losses: int) -> Unavailable:
    return Unavailable(
        f"The tokenizer was lost {num_losses} times at work on this request; if trying again does "
        "not help, change the request.",
        code="tokenizer_lost",
    )
