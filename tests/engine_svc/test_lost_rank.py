"""An engine whose thread waits for a rank that is gone ends all the same."""

import subprocess
import sys

import pytest

from engine_svc.lost_rank import EXIT_LOST_RANK

# A thread that nothing ends, as one that waits for a device.
_STUCK = """
import threading
from engine_svc import lost_rank

lost_rank._SERVING_SECONDS = lost_rank._LOADING_SECONDS = 0.01
lost_rank.end_soon("rank 1 is gone", {had_loaded})
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("had_loaded", "code", "said"),
    [
        (
            True,
            EXIT_LOST_RANK,
            "rank 1 is gone: this engine ends, its sequences go on elsewhere, and its supervisor "
            "restarts it\n",
        ),
        (False, 78, "engine_svc: cannot start: rank 1 is gone\n"),
    ],
)
def test_it_ends_as_served_or_as_one_that_cannot_start(
    had_loaded: bool, code: int, said: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _STUCK.format(had_loaded=had_loaded)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (code, said)


def test_one_that_ends_by_itself_ends_as_it_likes() -> None:
    code = "from engine_svc import lost_rank; lost_rank.end_soon('gone', True); raise SystemExit(3)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 3
