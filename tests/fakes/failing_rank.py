"""A rank whose load fails, or hangs, in the way that $FAILING_RANK says: see parallel_rank.py."""

import os
import signal
import threading
from typing import Any

from engine_svc.compute import parallel_rank
from protos.wire.errors import StartupError


def fail(*arguments: Any) -> Any:
    match os.environ["FAILING_RANK"]:
        case "startup error":
            raise StartupError("the file is damaged where only this rank reads it")
        case "exception":
            raise MemoryError("out of memory")
        case "hang":
            threading.Event().wait()
        case _:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    # What a rank loads with, in that module's own names.
    parallel_rank.load_executor = fail  # type: ignore[assignment]
    parallel_rank.main()
