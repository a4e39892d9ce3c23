"""The processes of an engine's other ranks, as rank 0 sees them: started, told, watched, ended."""

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Final, Self

from engine_svc.compute.parallel_messages import STOP_SIGNALS, RankFailure, RankJob, RankState
from protos.wire.errors import StartupError

logger = logging.getLogger(__name__)

_MODULE: Final = "engine_svc.compute.parallel_rank"
# From its start until a rank has loaded what it needs to meet the others.
_START_SECONDS: Final = 300.0
# How long a rank may take to end, when asked to, or to have ended, when its pipe has.
_END_SECONDS: Final = 5.0
_STOP: Final = None


class RankProcesses:
    """Ranks 1 to size - 1. A context manager, at whose end no process is left.

    All that ranks say is read by a thread of its own. When one fails, or ends by itself, `on_loss`
    is called there with the cause, and whether all had loaded: rank 0 may then wait for it in vain.
    What users are told is up to `on_loss`; here only the traceback of a fault is logged.
    """

    def __init__(self, on_loss: Callable[[str, bool], None]) -> None:
        self._on_loss = on_loss
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._told = threading.Condition()
        self._states: list[RankState | None] = []
        self._failure = ""
        self._has_loaded = False
        self._closing = False
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)

    def start(self, job: RankJob) -> None:
        """Starts the processes of all but rank 0, whose job it is."""
        for rank in range(1, job.place.size):
            link, their_end = Pipe()
            self._links.append(link)
            self._states.append(None)
            with their_end, _stop_signals_blocked():
                process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, str(their_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[their_end.fileno()],
                )
            self._processes.append(process)
            link.send(replace(job, place=job.place._replace(rank=rank)))
        self._watching.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, message: Any) -> None:
        """To all, in order; OSError when one is gone. Pickled once."""
        pickled = ForkingPickler.dumps(message)
        for link in self._links:
            link.send_bytes(pickled)

    def wait_for(self, state: RankState) -> None:
        """Until all have come so far; StartupError with the cause when one has failed."""
        with self._told:
            is_done = self._told.wait_for(
                lambda: self._failure or all(known == state for known in self._states),
                _START_SECONDS if state == RankState.READY else None,
            )
            self.check()
            if not is_done:
                raise StartupError(f"a rank is not ready after {_START_SECONDS:g} s")
            self._has_loaded = state == RankState.LOADED

    def check(self) -> None:
        """StartupError with the cause when one has failed."""
        if self._failure:
            raise StartupError(self._failure)

    def failure(self, patience_seconds: float) -> str:
        """Which rank has failed and why, waited for so long; empty when none has."""
        with self._told:
            self._told.wait_for(lambda: bool(self._failure), patience_seconds)
        return self._failure

    def ask_to_end(self) -> None:
        """They end by themselves, once they have computed what they were sent."""
        self._closing = True
        for link in self._links:
            with suppress(OSError):
                link.send(_STOP)

    def close(self) -> None:
        """Lets them end, or ends them."""
        self.ask_to_end()
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watching.ident is not None:
            self._watching.join()
        for link in self._links:
            link.close()

    def _watch(self) -> None:
        open_links = list(self._links)
        while open_links:
            for link in wait(open_links):
                assert isinstance(link, Connection)
                index = self._links.index(link)
                try:
                    message = link.recv()
                except (EOFError, OSError):
                    open_links.remove(link)
                    self._lose(index, RankFailure(self._ending_of(index)))
                else:
                    self._take(index, message)

    def _take(self, index: int, message: Any) -> None:
        if isinstance(message, RankFailure):
            # Where one was killed, another fails for it at once, and may be heard first.
            for other, process in enumerate(self._processes):
                if other != index and (process.poll() or 0) < 0:
                    self._lose(other, RankFailure(self._ending_of(other)))
            self._lose(index, message)
            return
        with self._told:
            self._states[index] = RankState(message)
            self._told.notify_all()

    def _lose(self, index: int, failure: RankFailure) -> None:
        """Only of the first one that fails is it told: the others follow from it."""
        if self._failure or self._closing:
            return
        cause = failure.cause
        if not failure.is_startup_error:
            cause = f"rank {index + 1} (process {self.pids[index]}) {cause}"
        if failure.traceback:
            logger.error("%s:\n%s", cause, failure.traceback)
        # Before those are woken who wait for the cause: by then it is known to all.
        self._on_loss(cause, self._has_loaded)
        with self._told:
            self._failure = cause
            self._told.notify_all()

    def _ending_of(self, index: int) -> str:
        try:
            code = self._processes[index].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "answers no more"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """A process that is started in here begins like this, so that it lives until it ignores them.

    They come to the whole group: without it, to ranks that only import what they need, too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
