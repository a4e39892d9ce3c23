"""An engine's loop over a fake executor, what it delivers, and a gate to hold its steps back."""

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine_svc.engine_loop import EngineLoop, engine_thread
from engine_svc.planning.request import Request, RequestOutput
from engine_svc.planning.scheduler import Scheduler
from engine_svc.planning.speculation import Drafter
from engine_svc.planning.step import StepPlan
from engine_svc.step_runner import Executor
from tests.fakes.engine_server import scheduler_config
from tests.fakes.scheduler_driver import Received, greedy
from tests.fakes.waiting import until


class Collector:
    """Takes what the loop delivers; `deliveries` keeps each call apart."""

    def __init__(self) -> None:
        self.received: defaultdict[object, Received] = defaultdict(Received)
        self.deliveries: list[list[RequestOutput]] = []
        self.failed = asyncio.Event()

    def deliver(self, outputs: list[RequestOutput]) -> None:
        assert outputs
        self.deliveries.append(outputs)
        for output in outputs:
            self.received[output.request.key].take(output)

    async def finish_of(self, key: object) -> Received:
        await until(lambda: self.received[key].finish is not None, f"the finish of {key}")
        return self.received[key]


@asynccontextmanager
async def running_loop(
    executor: Executor,
    collector: Collector | None = None,
    drafter: Drafter | None = None,
    step_timeout_seconds: float = math.inf,
    **limits: int,
) -> AsyncIterator[tuple[EngineLoop, Collector]]:
    collector = collector or Collector()
    scheduler = Scheduler(scheduler_config(executor, **limits), drafter)
    with engine_thread() as thread:
        async with EngineLoop(
            scheduler,
            executor,
            collector.deliver,
            collector.failed.set,
            thread,
            step_timeout_seconds,
        ) as loop:
            yield loop, collector


def request(key: str, *, length: int = 5, max_tokens: int = 4) -> Request:
    prompt = [ord(key[0]) % 50, *range(length - 1)]
    return Request(key, prompt, length, greedy(max_tokens))


class Gate:
    """Holds steps back: each waits in `before_step`, or `before_wait`, until it is let through."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)

    def before_step(self, plan: StepPlan) -> None:
        self.before_wait(0)

    def before_wait(self, number: int) -> None:
        self.arrived.release()
        assert self._passes.acquire(timeout=30)

    async def wait_for_step(self) -> None:
        assert await asyncio.to_thread(self.arrived.acquire, timeout=30)

    def open(self, num_steps: int = 1) -> None:
        self._passes.release(num_steps)


def failing_steps(*numbers: int) -> Callable[[StepPlan], None]:
    steps = iter(range(1_000_000))

    def before_step(plan: StepPlan) -> None:
        if next(steps) in numbers:
            raise RuntimeError("the device is unwell")

    return before_step
