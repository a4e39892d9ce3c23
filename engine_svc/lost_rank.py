"""Ends an engine of which a rank is gone, also when its thread waits for that rank in vain.

Where ranks are processes of one CPU their next step fails at once, and the engine ends as after any
failure. A CUDA device waits for ever for another one that is gone, and so does who waits for it.
"""

import logging
import os
import sys
import threading
from typing import Final

from protos.wire.service import EXIT_CANNOT_START

logger = logging.getLogger(__name__)

# EX_SOFTWARE of sysexits.h.
EXIT_LOST_RANK: Final = 70
# How long it may take an engine to end by itself: while it serves, and while it loads.
_SERVING_SECONDS: Final = 2.0
_LOADING_SECONDS: Final = 20.0


def end_soon(cause: str, had_loaded: bool) -> None:
    """Ends the process from a thread beside all others, unless it has ended by then.

    Of one that served, says why and what comes next; one that loads says itself that it cannot.
    """
    if had_loaded:
        logger.critical(
            "%s: this engine ends, its sequences go on elsewhere, and its supervisor restarts it",
            cause,
        )
    seconds = _SERVING_SECONDS if had_loaded else _LOADING_SECONDS
    timer = threading.Timer(seconds, _end, (cause, had_loaded))
    timer.daemon = True
    timer.start()


def _end(cause: str, had_loaded: bool) -> None:
    if not had_loaded:
        sys.stderr.write(f"engine_svc: cannot start: {cause}\n")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_LOST_RANK if had_loaded else EXIT_CANNOT_START)
