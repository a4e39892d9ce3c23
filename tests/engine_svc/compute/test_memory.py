"""Free memory: the machine's, or the container's when that is less."""

from pathlib import Path

import psutil
import torch

from engine_svc.compute.memory import (
    format_bytes,
    free_memory_bytes,
    kv_cache_line,
    step_bytes,
)
from engine_svc.compute.model.config import read_hf_config
from kernels.cpu.backend import CpuKernels
from tests.fakes.tiny_models import write_tiny_llama


def test_without_a_container_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert 0 < free_memory_bytes(tmp_path / "absent") <= total
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    (tmp_path / "memory.current").write_text("1000\n", encoding="ascii")
    assert 0 < free_memory_bytes(tmp_path) <= total


def test_a_container_s_limit_counts_when_it_leaves_less(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("5000\n", encoding="ascii")
    (tmp_path / "memory.current").write_text("1000\n", encoding="ascii")
    assert free_memory_bytes(tmp_path) == 4000
    (tmp_path / "memory.current").write_text("6000\n", encoding="ascii")
    assert free_memory_bytes(tmp_path) == 0


def test_sizes_are_written_for_people() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(3 << 20) == "3 MiB"
    assert format_bytes(5 << 40) == "5120 GiB"


def test_a_step_takes_memory_by_its_tokens_and_rows(tmp_path: Path) -> None:
    config = read_hf_config(write_tiny_llama(tmp_path))
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        kernels = CpuKernels(dtype)
        # 4 x (64 + 96) + 2 x (64 + 32) values a token.
        assert step_bytes(config, kernels, 1, 0) == (640 + 192) * size
        # Logits are float32 always.
        assert step_bytes(config, kernels, 0, 3) == 8 * 3 * 258 * 4


def test_the_kv_cache_is_told_of_each_rank_where_there_are_several() -> None:
    assert kv_cache_line(128, 16, 8192, 1) == "KV cache: 128 blocks of 16 tokens, 1 MiB"
    assert kv_cache_line(128, 16, 8192, 3).endswith("16 tokens, 1 MiB in each of 3 ranks")
