"""A model that cannot fit is refused before anything starts."""

from pathlib import Path

import psutil
import pytest

from compose.errors import CommandError
from compose.memory_check import require_memory


def test_the_weights_of_all_engines_must_fit(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    with model.open("wb") as file:
        # A sparse file: it takes no room.
        file.truncate(psutil.virtual_memory().available // 2)
    require_memory(model, 1)
    with pytest.raises(CommandError, match="in 8 engines"):
        require_memory(model, 8)
