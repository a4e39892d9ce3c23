"""The engine on torch's own ops, which is left where there is no native library."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine_svc.compute.executor import Executor
from engine_svc.compute.model.weights import open_source
from engine_svc.planning.step import SampledToken, SamplingParameters
from kernels import KernelConfig
from kernels.cpu.library import runnable
from protos.wire.errors import StartupError
from tests.fakes.decoding import ExecutorRows, SequenceLogits, load_tiny_executor
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_llama, write_tiny_qwen3

GREEDY = SamplingParameters(max_tokens=20, temperature=0.0, logprobs=True, top_logprobs=3)
SEEDED = dataclasses.replace(GREEDY, temperature=1.0, seed=5, repetition_penalty=1.2)
TORCH = {"cpu_kernels": "torch"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE - 2, (length,), generator=generator).tolist()


def run(executor: Executor, rows: list[int]) -> dict[int, list[SampledToken]]:
    requests = {row: (prompt_of(5 + 9 * row, row), SEEDED if row % 2 else GREEDY) for row in rows}
    return ExecutorRows(executor).run(requests, 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_the_same_to_the_last_bit_alone_and_among_others(
    model_path: Path, dtype: str
) -> None:
    executor = load_tiny_executor(model_path, dtype=dtype, **TORCH)
    together = run(executor, list(range(7)))
    for row in together:
        assert run(executor, [row])[row] == together[row]


@pytest.mark.skipif(not runnable(), reason="there is no library")
@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_qwen3])
def test_native_float32_kernels_agree_with_it(tmp_path: Path, write) -> None:
    source = open_source(write(tmp_path, attention_bias=True))
    token_ids = prompt_of(90)
    for chunks in ([90], [16, 1, 33, 40]):
        expected, actual = (
            SequenceLogits(source, KernelConfig("float32", implementation=name)).after_chunks(
                token_ids, chunks
            )
            for name in ("torch", "auto")
        )
        assert float((actual - expected).abs().max()) < 1e-4


def test_what_it_cannot_do_is_refused_in_one_line(model_path: Path) -> None:
    with pytest.raises(StartupError, match="torch's own kernels do not compute with int8 weights"):
        load_tiny_executor(model_path, dtype="int8", **TORCH)
    with pytest.raises(
        StartupError, match="torch's own kernels hold KV in the type of the weights"
    ):
        load_tiny_executor(model_path, kv_dtype="int8", **TORCH)
