"""The engine's settings."""

from pathlib import Path

import pytest

from engine_svc.settings import Settings
from protos.wire.errors import StartupError
from protos.wire.settings import load_settings


def load(*arguments: str, **environment: str) -> Settings:
    return load_settings(Settings, "engine_svc", ["--model", "m.gguf", *arguments], environment)


def test_flags_and_environment_are_read() -> None:
    settings = load(
        *("--kv-memory", "2GiB", "--prefix-cache", "false"), TOKENLINE_ENGINE_MAX_NUM_SEQS="8"
    )
    assert settings.model == Path("m.gguf")
    assert settings.kv_memory == 2 << 30
    assert settings.prefix_cache is False
    assert settings.max_num_seqs == 8


def test_a_step_too_small_for_the_batch_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(StartupError, match="--max-num-batched-tokens"):
        load("--max-num-batched-tokens", "16")
    assert load("--max-num-batched-tokens", "16", "--max-num-seqs", "16").max_num_seqs == 16


def test_kernels_of_the_cpu_are_refused_beside_a_gpu_that_would_not_run_them() -> None:
    with pytest.raises(StartupError, match=r"--cpu-kernels torch .* --device cuda"):
        load("--device", "cuda", "--cpu-kernels", "torch")
    assert load("--device", "cpu", "--cpu-kernels", "torch").cpu_kernels == "torch"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dtype", "float8"),
        ("--block-size", "0"),
        ("--device", "tpu"),
        ("--kv-dtype", "int4"),
        # So many that the system gives the process no more, for whatever it needs one.
        ("--num-threads", "100000"),
    ],
)
def test_values_out_of_range_are_refused(arguments: tuple[str, str]) -> None:
    with pytest.raises(StartupError, match=arguments[0]):
        load(*arguments)
