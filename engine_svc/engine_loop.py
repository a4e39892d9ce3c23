"""The engine's thread: take commands, schedule, launch, land, commit, publish; asleep when idle."""

import asyncio
import logging
import math
import queue
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from engine_svc.delivery import Delivery
from engine_svc.planning.errors import RankLost, RequestRefused
from engine_svc.planning.limits import SchedulerLoad
from engine_svc.planning.request import Finish, FinishReason, Request, RequestOutput
from engine_svc.planning.scheduler import Scheduler
from engine_svc.planning.step_profile import StepProfile
from engine_svc.step_runner import Executor, StepRunner
from engine_svc.step_watchdog import StepHangs, StepWatchdog
from protos.wire.errors import InternalError, Unavailable

logger = logging.getLogger(__name__)


def engine_thread() -> ThreadPoolExecutor:
    """The one thread that may compute, from the loading of the model on.

    OpenMP keeps workers for each thread that computes. Where a second one has, even if it has long
    been idle, there are more workers than cores, and libgomp lets them sleep sooner: a model
    loaded on another thread than its steps run on makes them 10 % slower.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")


class EngineLoop:
    """Runs a scheduler and an executor on `thread`, whole. An async context manager.

    Where two steps may be in flight, the one after that which runs is planned and launched before
    its results are waited for, so that they are taken in and published while the next one runs.

    `deliver` is called on the event loop with the outputs of one step or more, as Delivery says,
    `on_failure` when the engine cannot go on: then all requests have failed, `failure` says why,
    and only a new process helps.
    Leaving the block ends what still runs, and frees the thread, unless a step has taken longer
    than `step_timeout_seconds`: a thread that hangs cannot be ended but with its process.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        deliver: Callable[[list[RequestOutput]], None],
        on_failure: Callable[[], None],
        thread: ThreadPoolExecutor,
        step_timeout_seconds: float = math.inf,
        profile: StepProfile | None = None,
        stream_interval_seconds: float = 0.0,
    ) -> None:
        self._scheduler = scheduler
        self._deliver = deliver
        self._stream_interval_seconds = stream_interval_seconds
        self._on_failure = on_failure
        # Run by the thread between steps, in order; what they return is published.
        self._commands: queue.SimpleQueue[Callable[[], list[RequestOutput]]] = queue.SimpleQueue()
        self._load = scheduler.load
        self._stopping = False
        self._thread = thread
        self._running: Future[None] | None = None
        self._watchdog = StepWatchdog(step_timeout_seconds)
        self._steps = StepRunner(executor, scheduler.max_steps_in_flight, self._watchdog)
        self._profile = profile or StepProfile()
        self._watching: asyncio.Task[None] | None = None
        self.failure: Exception | None = None

    @property
    def hangs(self) -> bool:
        """Whether the thread is stuck in a step, for good as far as one can tell."""
        return self._watchdog.has_bitten

    @property
    def load(self) -> SchedulerLoad:
        """As of the last step, or of going idle."""
        return self._load

    async def __aenter__(self) -> Self:
        self._event_loop = asyncio.get_running_loop()
        self._delivery = Delivery(self._deliver, self._stream_interval_seconds)
        self._running = self._thread.submit(self._run)
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._commands.put(self._stop)
        assert self._running is not None and self._watching is not None
        running = asyncio.wrap_future(self._running)
        await asyncio.wait((running, self._watching), return_when=asyncio.FIRST_COMPLETED)
        self._watching.cancel()
        if not self.hangs:
            await running

    # For the event loop

    def submit(self, request: Request) -> None:
        """Queues a request; it ends in exactly one output with `finish`, also when refused."""
        if self.failure is not None:
            raise _engine_lost()
        self._commands.put(lambda: self._add(request))

    def abort(self, key: Hashable) -> None:
        """Ends a request with CANCELLED once the running step is done; ignores unknown keys."""
        self._commands.put(lambda: self._scheduler.abort(key))

    def fail_all(self, error: Exception, *, running: bool = True) -> None:
        """Ends every request, or those that wait, with `error`, once the running step is done."""
        self._commands.put(lambda: self._scheduler.fail_all(error, running=running))

    async def _watch(self) -> None:
        """Ends everything once a step hangs; else it waits for ever."""
        stuck = await self._watchdog.wait_for_hang()
        logger.critical("the engine hangs, and ends: %s", stuck)
        self.failure = StepHangs(stuck)
        # The scheduler is the thread's own, but that is stuck, and goes down with the process.
        self._give_up()

    # For the engine's thread

    def _run(self) -> None:
        try:
            while True:
                outputs = self._take_commands()
                outputs += self._scheduler.end_late(time.monotonic())
                if self._scheduler.has_requests or not self._steps.is_idle:
                    self._step(outputs)
                else:
                    self._publish(outputs)
                if self._stopping and self._steps.is_idle:
                    return
        except Exception as error:
            # Of a rank that is lost was told at once; nothing here is at fault.
            if not isinstance(error, RankLost):
                logger.exception("the engine cannot go on")
            self.failure = error
            self._event_loop.call_soon_threadsafe(self._give_up)

    def _step(self, outputs: list[RequestOutput]) -> None:
        """Launches a step, where one can be planned, and lands the oldest unless more may follow.

        `outputs` of the commands before it travel with the news of who starts.
        """
        lap = self._profile.lap
        self._profile.start()
        plan = self._scheduler.schedule() if self._steps.may_launch else None
        lap("plan")
        if plan is not None:
            outputs += self._scheduler.first_starts(plan)
        self._publish(outputs)
        lap("publish")
        if plan is not None:
            self._steps.launch(plan)
            if self._steps.may_launch:
                return
        plan, result, seconds = self._steps.land()
        if result is None:
            told = InternalError("The engine failed on this request.", code="engine_failed")
            outputs = self._scheduler.fail(plan, told)
        else:
            outputs = self._scheduler.commit(plan, result, seconds)
        lap("commit")
        self._publish(outputs)
        lap("publish")
        self._profile.end(plan.num_scheduled_tokens)

    def _take_commands(self) -> list[RequestOutput]:
        """Runs the commands that have come; sleeps while there is nothing else to do."""
        outputs: list[RequestOutput] = []
        while not self._stopping:
            idle = not self._scheduler.has_requests and self._steps.is_idle
            if idle:
                self._publish(outputs)
                outputs = []
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                break
            outputs += command()
        return outputs

    def _publish(self, outputs: list[RequestOutput]) -> None:
        self._load = self._scheduler.load
        if outputs:
            self._delivery.put(outputs)

    def _add(self, request: Request) -> list[RequestOutput]:
        try:
            self._scheduler.add(request)
        except RequestRefused as error:
            request.finish = Finish(FinishReason.ERROR, error=error)
        # Set also for a record whose outputs were complete already.
        return [] if request.finish is None else [RequestOutput(request, finish=request.finish)]

    def _stop(self) -> list[RequestOutput]:
        self._stopping = True
        return self._scheduler.fail_all(_engine_lost())

    def _give_up(self) -> None:
        """Ends every request after a failure. On the event loop: the thread is no more."""
        outputs = []
        # `failure` is set, so no submit can follow those that are here.
        while not self._commands.empty():
            outputs += self._commands.get()()
        outputs += self._scheduler.fail_all(_engine_lost())
        self._load = self._scheduler.load
        # What was published before comes first.
        self._delivery.flush()
        self._deliver(outputs)
        self._on_failure()


def _engine_lost() -> Unavailable:
    return Unavailable("The engine stopped while it worked on this request.", code="engine_lost")
