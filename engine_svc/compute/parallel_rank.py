"""A rank beside rank 0, in a process of its own: `python -m engine_svc.compute.parallel_rank FD`.

It computes what rank 0 sends by the pipe FD, and lives no longer than rank 0.
"""

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final, NoReturn

import torch

from engine_svc.compute.any_executor import (
    AnyExecutor,
    config_of_ranks,
    device_of_rank,
    load_executor,
)
from engine_svc.compute.parallel_grammars import ReceivingGrammarRows
from engine_svc.compute.parallel_messages import (
    STOP_SIGNALS,
    RankFailure,
    RankJob,
    RankState,
    SentPlan,
)
from engine_svc.compute.ranks import join_ranks
from engine_svc.planning.step import PendingStep
from protos.wire.errors import StartupError

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    _die_with_parent()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as link:
        try:
            _run(link)
        except (EOFError, ConnectionError):
            sys.exit(1)  # rank 0 is gone
        except StartupError as error:
            failure = RankFailure(str(error), is_startup_error=True)
        except Exception:
            # Rank 0 shows the traceback, unless this failure only follows from another rank's.
            told = traceback.format_exc().strip()
            failure = RankFailure(f"failed: {told.splitlines()[-1]}", traceback=told)
        with suppress(OSError):
            link.send(failure)
    sys.exit(1)


def _run(link: Connection) -> NoReturn:
    job = link.recv()
    assert isinstance(job, RankJob)
    config = config_of_ranks(job.config, job.place.size)
    device = device_of_rank(config, job.place.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    link.send(RankState.READY)
    ranks = join_ranks(job.place, device, sums_in_order=config.batch_invariant)
    executor = load_executor(job.model, config, _ignore, ranks)
    executor.follow(ReceivingGrammarRows(link.recv))
    gc.collect()
    gc.freeze()
    link.send(RankState.LOADED)
    _compute_steps(executor, link)
    # Torch's own way out may wait for other ranks.
    sys.stderr.flush()
    os._exit(0)


def _compute_steps(executor: AnyExecutor, link: Connection) -> None:
    """Until rank 0 says to stop. What comes of steps is rank 0's to tell."""
    in_flight: deque[PendingStep] = deque()
    while (sent := link.recv()) is not None:
        assert isinstance(sent, SentPlan), f"expected a plan, got {type(sent)}"
        if len(in_flight) == executor.max_steps_in_flight:
            in_flight.popleft().wait()
        in_flight.append(executor.launch(sent.plan))


def _ignore(line: str) -> None:
    """Rank 0 says how loading goes."""


def _die_with_parent() -> None:
    """The kernel kills this process when rank 0 ends, also while it waits for a device, or stands
    still. Elsewhere than on Linux it ends when it next reads from its pipe."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
