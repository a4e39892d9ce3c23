"""The quality gate in short: perplexity of a real text within 1 % of the same weights in float32.

`python -m tests.bench accuracy --formats` is the same over the whole text.
"""

from pathlib import Path

import pytest
import torch

from tests.bench.accuracy import FORMATS, in_format
from tests.bench.accuracy_layers import layer_errors
from tests.bench.accuracy_score import Accuracy, engine_settings, measure, text_windows

WINDOW = 512


@pytest.fixture(scope="module")
def windows(default_model_path: Path) -> list[list[int]]:
    return text_windows(default_model_path, 4 * WINDOW, WINDOW)


@pytest.mark.slow
def test_the_default_model_as_it_is(default_model_path: Path, windows: list[list[int]]) -> None:
    result = measure(engine_settings(default_model_path, WINDOW), windows)
    assert len(result.engine) == 4 * (WINDOW - 1)
    assert result.holds, result.ratio


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_its_weights_in_other_formats(
    default_model_path: Path, windows: list[list[int]], name: str
) -> None:
    with in_format(default_model_path, name) as model:
        result = measure(engine_settings(model, WINDOW), windows[:1])
    assert result.holds, result.ratio


@pytest.mark.slow
def test_no_layer_stands_out(default_model_path: Path, windows: list[list[int]]) -> None:
    int8, int16 = (
        layer_errors(engine_settings(default_model_path, 64, flags), windows[0][:64])
        for flags in ([], ["--activations", "int16"])
    )
    assert len(int8) == len(int16) == 30
    for coarse, fine in zip(int8, int16, strict=True):
        assert fine.own < coarse.own < 0.05
        assert fine.accumulated < coarse.accumulated < 0.05


@pytest.mark.parametrize(("shift", "holds"), [(0.0, True), (0.009, True), (0.011, False)])
def test_a_hundredth_of_perplexity_is_noticed_either_way(shift: float, holds: bool) -> None:
    reference = torch.linspace(-9.0, 0.0, 100)
    assert Accuracy(reference - shift, reference).holds is holds
    assert Accuracy(reference + shift, reference).holds is holds
