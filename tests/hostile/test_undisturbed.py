"""A short hostile round; the whole of it is `python -m tests.hostile`."""

from pathlib import Path

import pytest

from tests.fakes.running_line import running_line
from tests.fakes.tiny_models import write_tiny_llama
from tests.hostile.undisturbed import hostile_round

NUM_ATTACKS = 120


@pytest.mark.slow
async def test_hostile_requests_crash_nothing_and_disturb_no_other_stream(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny-llama")
    with running_line(tmp_path, "--model", str(model), "--kv-memory", "64MiB") as line:
        result = await hostile_round(line, NUM_ATTACKS, seed=4)
    print(result.text)
    assert result.faults == []
