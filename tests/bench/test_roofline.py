"""The roofline: its bytes and FLOPs against counts by hand, and the README's tables against it."""

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

from engine_svc.compute.model.config import QWEN3
from kernels.gpu.kv_cache import KvFormat
from tests.bench import roofline_measured
from tests.bench.roofline import (
    MODELS,
    Roofline,
    add_command,
    markdown,
    model_config,
    read_config,
)
from tests.bench.roofline_devices import DEVICES
from tests.bench.roofline_ops import WEIGHTS, Op, Sequences, StepOps

README = Path(__file__).resolve().parents[2] / "README.md"
LLAMA = MODELS["llama-3.1-8b"]
H200 = DEVICES["h200"]
# q, k, v, output, gate, up and down of 32 layers, the head and the embedding.
LLAMA_LINEAR = 32 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
LLAMA_PARAMETERS = LLAMA_LINEAR + 2 * 128256 * 4096


def roofline(weights: str = "bf16", **changes: object) -> Roofline:
    kept = {"config": LLAMA, "device": H200, "kv_format": KvFormat.BFLOAT16}
    return Roofline(weights=WEIGHTS[weights], **{**kept, **changes})  # type: ignore[arg-type]


def test_the_readme_s_tables_are_what_the_tool_prints() -> None:
    rooflines = [roofline(weights) for weights in ("bf16", "fp8", "4bit")]
    tables = markdown(rooflines, [1, 16, 64, 256], [512, 4096, 32768])
    readme = README.read_text(encoding="utf-8")
    assert [table for table in tables.split("\n\n") if table not in readme] == []


def test_a_model_takes_what_its_parameters_do() -> None:
    norms = 2 * 4096 * 64
    assert StepOps(LLAMA, WEIGHTS["bf16"], KvFormat.BFLOAT16).weight_bytes == (
        2 * LLAMA_PARAMETERS + norms
    )
    tied = dataclasses.replace(LLAMA, tie_word_embeddings=True)
    saved = 2 * 128256 * 4096
    assert StepOps(tied, WEIGHTS["bf16"], KvFormat.BFLOAT16).weight_bytes == (
        2 * LLAMA_PARAMETERS + norms - saved
    )
    assert StepOps(LLAMA, WEIGHTS["bf16"], KvFormat.BFLOAT16).kv_token_bytes == 128 * 1024
    assert StepOps(LLAMA, WEIGHTS["bf16"], KvFormat.FP8).kv_token_bytes == 2 * 32 * 8 * (128 + 4)


def test_a_decode_step_reads_all_weights_and_the_cache_once() -> None:
    ops = roofline().decode_ops(1, 4096)
    read = sum(op.count * op.num_bytes for op in ops)
    weights = 2 * (LLAMA_PARAMETERS - 128256 * 4096)
    cache = 4096 * 128 * 1024
    assert weights + cache < read < 1.001 * (weights + cache)
    flops = sum(op.count * op.flops for op in ops)
    assert flops == 2 * (LLAMA_PARAMETERS - 128256 * 4096) + 4 * 4096 * 4096 * 32


def test_a_prompt_s_flops_are_the_same_in_any_chunks() -> None:
    def flops(max_tokens: int) -> float:
        one = roofline(max_tokens=max_tokens)
        total, start = 0.0, 0
        while start < 1000:
            size = min(max_tokens, 1000 - start)
            step = one.ops.of(Sequences(1, size, start, num_kept=int(start + size == 1000)))
            total += sum(op.count * op.flops for op in step)
            start += size
        return total

    assert flops(1000) == flops(300) == flops(1)
    assert roofline(max_tokens=300).prefill_seconds(1000) > roofline().prefill_seconds(1000)


@pytest.mark.parametrize(("num_computed", "num_new"), [(0, 1), (0, 40), (100, 7), (10, 10)])
@pytest.mark.parametrize("window", [0, 1, 16, 200])
def test_pairs_of_queries_and_keys_are_those_of_each_query(num_computed, num_new, window) -> None:
    sequences = Sequences(3, num_new, num_computed)
    for num_queries in {0, 1, num_new}:
        last = range(num_computed + num_new - num_queries, num_computed + num_new)
        seen = [set(range(max(0, p + 1 - window) if window else 0, p + 1)) for p in last]
        pairs, keys = sequences.attended(num_queries, window)
        assert pairs == sum(map(len, seen))
        assert keys == len(set().union(*seen))


def test_an_op_takes_the_longer_of_memory_and_products() -> None:
    assert Op("a", 2, num_bytes=4.8e9, flops=1.0).seconds(H200) == pytest.approx(2e-3)
    assert Op("a", 1, num_bytes=1.0, flops=989e9).seconds(H200) == pytest.approx(1e-3)


def test_the_largest_batch_is_what_memory_holds() -> None:
    one = roofline()
    largest = one.largest_batch(4096)
    held = largest * 4096 * one.ops.kv_token_bytes + one.ops.weight_bytes
    assert 0.85 * H200.memory_bytes < held < 0.92 * H200.memory_bytes
    assert roofline(device=DEVICES["l4"], config=MODELS["llama-3.1-70b"]).largest_batch(512) == 0
    assert roofline(kv_format=KvFormat.FP8).largest_batch(4096) > 1.9 * largest


@pytest.mark.parametrize(("weights", "kv_format"), [("4bit", "int8"), ("bf16", "bfloat16")])
def test_each_op_is_measured_too(monkeypatch: pytest.MonkeyPatch, weights, kv_format) -> None:
    """In Triton's interpreter, where the figures say nothing."""
    monkeypatch.setattr(roofline_measured, "MOST_COPIES", 1)
    tiny = model_config(QWEN3, 64, 96, 2, (4, 2, 16), 96)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured = roofline_measured.measured_seconds(
        tiny, WEIGHTS[weights], KvFormat(kv_format), 2, 20, device
    )
    one = roofline(weights, config=tiny, kv_format=KvFormat(kv_format))
    assert measured.keys() == {op.name for op in one.decode_ops(2, 20)}
    assert min(measured.values()) > 0


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--weights", "bf16,nf4", "there is no 'nf4', only bf16"),
        ("--batch", "1,0", "must be a number of at least 1, not '0'"),
        ("--context", "4k", "must be a number of at least 1, not '4k'"),
        ("--max-num-batched-tokens", "0", "must be a number of at least 1"),
        ("--memory-share", "0", "must be above 0 and at most 1, not '0'"),
        ("--compute-share", "nan", "must be above 0 and at most 1, not 'nan'"),
        ("--model", "no-such.gguf", "cannot read no-such.gguf"),
        ("--device", "tpu", "invalid choice: 'tpu'"),
    ],
)
def test_what_is_no_value_of_a_flag_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, told: str
) -> None:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["roofline", flag, value])
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {flag}: " in last and told in last


@pytest.mark.slow
def test_a_file_s_own_shapes_are_read(default_model_path: Path) -> None:
    built_in, read = MODELS["smollm2-135m"], read_config(str(default_model_path))
    for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        assert getattr(read, name) == getattr(built_in, name)
