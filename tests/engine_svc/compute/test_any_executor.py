"""Which executor a model is loaded by."""

from pathlib import Path

import pytest
import torch

from engine_svc.compute.any_executor import load_executor
from engine_svc.compute.device_executor import DeviceExecutor
from engine_svc.compute.executor import Executor
from engine_svc.compute.executor_config import ExecutorConfig
from protos.wire.errors import StartupError
from tests.fakes.tiny_models import write_tiny_llama

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def load(directory: Path, **overrides: object):  # type: ignore[no-untyped-def]
    settings = {"kv_memory_bytes": 1 << 20, "num_threads": 1, "cpu_kernels": "torch"} | overrides
    config = ExecutorConfig(2, 16, **settings)  # type: ignore[arg-type]
    return load_executor(directory, config, report=lambda line: None)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_kernels_of_the_cpu_run_on_the_cpu(model_path: Path, device: str) -> None:
    executor = load(model_path, device=device, dtype="float32")
    assert isinstance(executor, Executor)
    assert executor.max_steps_in_flight == 1


@no_gpu
def test_without_a_gpu_auto_is_the_cpu(model_path: Path) -> None:
    assert isinstance(load(model_path, device="auto", cpu_kernels="auto"), Executor)


@no_gpu
def test_a_gpu_that_is_not_there_is_missed_in_one_line(model_path: Path) -> None:
    with pytest.raises(StartupError, match="there is no device cuda") as caught:
        load(model_path, device="cuda")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [
        ({"dtype": "fp8"}, "--cpu-kernels torch, --dtype fp8)"),
        ({"kv_dtype": "int8"}, "--cpu-kernels torch, --kv-dtype int8)"),
        ({"cpu_kernels": "auto", "kv_dtype": "bfloat16"}, "--kv-dtype bfloat16)"),
        ({"activations": "int16"}, "--cpu-kernels torch, --activations int16)"),
        ({"max_model_len": 513}, "--max-model-len is 513"),
        ({"kv_memory_bytes": 1}, "give it more with --kv-memory"),
    ],
)
def test_what_cannot_be_had_is_told_with_the_flags_that_ask_for_it(
    model_path: Path, overrides: dict[str, object], flags: str
) -> None:
    with pytest.raises(StartupError) as caught:
        load(model_path, **overrides)
    assert flags in str(caught.value) and "\n" not in str(caught.value)


@no_gpu
def test_a_model_that_the_device_cannot_hold_is_refused_in_one_line(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_too_much(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB.\nSee also: …")

    monkeypatch.setattr(DeviceExecutor, "load", load_too_much)
    with pytest.raises(StartupError, match=r"memory on cpu .* allocate 2 TiB\.$") as caught:
        load(model_path, cpu_kernels="triton", dtype="float32")
    assert "\n" not in str(caught.value)
