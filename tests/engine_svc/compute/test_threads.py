"""How torch's threads wait is settled before torch is loaded, unless the user settled it."""

import os
import subprocess
import sys

PROGRAM = """
import os
import engine_svc.compute.executor
print(os.environ.get("GOMP_SPINCOUNT"))
"""


def spin_count(**variables: str) -> str:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | variables,
        check=True,
        capture_output=True,
        text=True,
    )
    return run.stdout.strip()


def test_threads_spin_shortly_unless_told_otherwise() -> None:
    assert spin_count() == "1000"
    assert spin_count(GOMP_SPINCOUNT="7") == "7"
    assert spin_count(OMP_WAIT_POLICY="active") == "None"
