"""A block that something outside ends with an error."""

import asyncio

import pytest

from gateway.errors import ClientDisconnected
from gateway.interruption import Interruptible, ended_by_disconnect


class Reason(Exception):
    """What the block is ended with."""


async def test_an_interrupted_block_raises_the_error_and_runs_its_finally() -> None:
    cleaned = False
    with pytest.raises(Reason):
        async with Interruptible() as block:
            asyncio.get_running_loop().call_soon(block.interrupt, Reason())
            try:
                await asyncio.Event().wait()
            finally:
                cleaned = True
    assert cleaned
    await asyncio.sleep(0)  # The task itself is not left cancelled.


async def test_only_the_first_interruption_counts_and_none_after_the_block() -> None:
    with pytest.raises(Reason, match="first"):
        async with Interruptible() as block:
            block.interrupt(Reason("first"))
            block.interrupt(Reason("second"))
            await asyncio.Event().wait()
    async with Interruptible() as block:
        pass
    block.interrupt(Reason())
    await asyncio.sleep(0)


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    entered = asyncio.Event()

    async def run() -> None:
        async with Interruptible() as block:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                block.interrupt(Reason())
                raise

    task = asyncio.create_task(run())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_blocks_nest() -> None:
    with pytest.raises(Reason):
        async with Interruptible() as outer, Interruptible():
            outer.interrupt(Reason())
            await asyncio.Event().wait()


async def test_errors_of_the_block_are_its_own() -> None:
    with pytest.raises(ValueError):
        async with Interruptible():
            raise ValueError


async def test_a_disconnect_ends_the_block() -> None:
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0)
        return next(messages)

    with pytest.raises(ClientDisconnected):
        async with ended_by_disconnect(receive):  # type: ignore[arg-type]
            await asyncio.Event().wait()
