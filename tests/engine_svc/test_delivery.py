"""What steps brought reaches the event loop in order, together where it came quickly."""

import asyncio
import threading
from collections.abc import Sequence

from engine_svc.delivery import Delivery
from engine_svc.planning.request import Finish, FinishReason, Request, RequestOutput
from tests.fakes.engine_loop_driver import request
from tests.fakes.waiting import until

# No test waits for it to end.
LONG_SECONDS = 1000.0


def tokens(of: Request, *token_ids: int) -> list[RequestOutput]:
    return [RequestOutput(of, token_ids)]


class Deliveries:
    """A Delivery whose `put` is called on another thread, and what it delivered."""

    def __init__(self, interval_seconds: float) -> None:
        self.all: list[list[RequestOutput]] = []
        self.delivery = Delivery(self.all.append, interval_seconds)

    async def put(self, outputs: Sequence[RequestOutput]) -> None:
        await asyncio.to_thread(self.delivery.put, outputs)
        # Room for the loop to take in what it was woken for.
        await asyncio.sleep(0)

    @property
    def token_ids(self) -> list[list[int]]:
        return [[id for output in each for id in output.token_ids] for each in self.all]

    async def has_delivered(self, token_id: int) -> None:
        await until(lambda: [token_id] in self.token_ids)

    async def started(self, *requests: Request) -> None:
        for each in requests:
            await self.put([RequestOutput(each, prefill_started=True)])
        await until(lambda: sum(map(len, self.all)) == len(requests))
        self.all.clear()

    async def well_begun(self, *requests: Request) -> None:
        """Started, and past the tokens that are not held."""
        await self.started(*requests)
        for each in requests:
            await self.put(tokens(each, *range(8)))
        await until(lambda: sum(map(len, self.token_ids)) == 8 * len(requests))
        self.all.clear()


async def test_without_an_interval_each_step_is_delivered_at_once() -> None:
    deliveries = Deliveries(0.0)
    for token_id in range(5):
        await deliveries.put(tokens(request("a"), token_id))
        await deliveries.has_delivered(token_id)
    assert deliveries.token_ids == [[0], [1], [2], [3], [4]]


async def test_the_first_eight_tokens_of_a_request_are_not_held() -> None:
    deliveries = Deliveries(LONG_SECONDS)
    a = request("a")
    await deliveries.started(a)
    for token_id in range(8):
        await deliveries.put(tokens(a, token_id))
        await deliveries.has_delivered(token_id)
    await deliveries.put(tokens(a, 8))
    await deliveries.put(tokens(a, 9))
    deliveries.delivery.flush()
    assert deliveries.token_ids == [[0], [1], [2], [3], [4], [5], [6], [7], [8, 9]]


async def test_tokens_within_an_interval_wait_for_its_end_and_come_together() -> None:
    deliveries = Deliveries(0.05)
    a, b = request("a"), request("b")
    await deliveries.well_begun(a, b)
    # On the loop, so that no interval ends between them.
    for token_id in (3, 4, 5):
        deliveries.delivery.put([*tokens(a, token_id), *tokens(b, 10 * token_id)])
    assert not deliveries.all
    await until(lambda: len(deliveries.all) == 1)
    assert deliveries.token_ids == [[3, 30, 4, 40, 5, 50]]


async def test_starts_first_tokens_and_ends_are_not_held_nor_is_what_came_before_them() -> None:
    deliveries = Deliveries(LONG_SECONDS)
    a, b = request("a"), request("b")
    await deliveries.well_begun(a)
    await deliveries.put(tokens(a, 1))
    await deliveries.put([*tokens(a, 2), RequestOutput(b, prefill_started=True)])
    await until(lambda: deliveries.token_ids == [[1, 2]])
    await deliveries.put([*tokens(b, 10), *tokens(a, 3)])
    await until(lambda: deliveries.token_ids == [[1, 2], [10, 3]])
    await deliveries.put(tokens(a, 4))
    await deliveries.put([RequestOutput(a, (5,), finish=Finish(FinishReason.LENGTH))])
    await until(lambda: deliveries.token_ids == [[1, 2], [10, 3], [4, 5]])


async def test_many_quick_steps_are_delivered_before_the_interval_ends_and_never_block() -> None:
    deliveries = Deliveries(LONG_SECONDS)
    a = request("a")
    await deliveries.well_begun(a)

    def run_steps() -> None:
        for token_id in range(100):
            deliveries.delivery.put(tokens(a, token_id))

    await asyncio.to_thread(run_steps)
    await until(lambda: sum(map(len, deliveries.token_ids)) >= 93)
    deliveries.delivery.flush()
    assert [id for each in deliveries.token_ids for id in each] == list(range(100))


async def test_the_engines_thread_waits_for_a_loop_that_does_not_take_its_steps_in() -> None:
    deliveries = Deliveries(LONG_SECONDS)
    a = request("a")
    num_put = 0

    def run_steps() -> None:
        nonlocal num_put
        for token_id in range(40):
            deliveries.delivery.put(tokens(a, token_id))
            num_put += 1

    thread = threading.Thread(target=run_steps)
    thread.start()
    # The loop is kept from running meanwhile.
    thread.join(0.2)
    assert thread.is_alive()
    assert num_put == 16
    await until(lambda: not thread.is_alive())
    deliveries.delivery.flush()
    assert [id for each in deliveries.token_ids for id in each] == list(range(40))
