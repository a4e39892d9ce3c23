"""Every form of the GPU's kernels compiles, fits, does not spill, on devices not here."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine_svc.messages import MAX_TOP_LOGPROBS
from kernels.gpu import ahead_of_time, logprobs
from kernels.gpu.ahead_of_time import Form, all_variants, is_for, table
from kernels.gpu.compilation import DEVICES, Compiled, read_assembler, read_metadata
from kernels.gpu.variant import ModelShapes

ROOT = Path(__file__).resolve().parents[3]
# Cold, on two cores that have other things to do too. A second run takes seconds.
TIMEOUT_SECONDS = 900
# In elements, by Triton.
LARGEST_TENSOR = 1 << 20
NEVER_SPILL = ("attention", "rms_norm", "rope_and_cache")


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, object]]:
    """In a process of its own, since in this one kernels are interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.gpu.ahead_of_time", "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.stdout.startswith("["), done.stderr
    return json.loads(done.stdout)


def test_all_that_an_engine_launches_compiles_and_fits_each_device(compiled) -> None:
    assert [one for one in compiled if one["fault"]] == []
    assert {one["device"] for one in compiled} == {device.name for device in DEVICES}


@pytest.mark.parametrize("op", NEVER_SPILL)
def test_attention_norms_and_rope_keep_all_in_registers(compiled, op) -> None:
    forms = [one for one in compiled if op in str(one["kernel"])]
    assert {one["device"] for one in forms} == {device.name for device in DEVICES}
    assert [one for one in forms if one["spilled"] or one["may_spill"]] == []


def test_every_file_that_has_variants_is_compiled() -> None:
    directory = Path(ahead_of_time.__file__).parent
    having = {path.stem for path in directory.glob("*.py") if "\ndef variants(" in path.read_text()}
    assert {module.__name__.rpartition(".")[2] for module in ahead_of_time.OPS} == having


@pytest.mark.parametrize("vocab_size", [1000, 50257, 262144])
def test_the_most_likeliest_tokens_that_can_be_asked_for_are_compiled(vocab_size) -> None:
    *_, form = logprobs.variants(ModelShapes(64, 9, 3, 64, 1536, vocab_size))
    assert form.label.startswith(f"token_logprobs: list of {MAX_TOP_LOGPROBS},")
    assert form.constexprs["RANKS"] <= LARGEST_TENSOR


def test_what_ops_launch_alike_is_compiled_once() -> None:
    variants = all_variants()
    labels = [
        (variant.label, device.name)
        for device in DEVICES
        for variant in variants
        if is_for(variant, device)
    ]
    assert len(set(labels)) == len(labels), "a label does not tell two forms apart"


LOG = """ptxas info    : Compiling entry function '_kernel' for 'sm_80'
ptxas info    : Function properties for _kernel
    24 bytes stack frame, 20 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size
"""
ASSEMBLY = """    .sgpr_spill_count: 1
    .vgpr_count:     177
    .vgpr_spill_count: 3
"""


def test_registers_and_spills_are_read_from_what_the_compilers_write() -> None:
    assert read_assembler(LOG, 512) == Compiled(168, 28, 512)
    assert read_assembler("", 512).error == "the assembler reports no registers"
    assert read_metadata(ASSEMBLY, 64) == Compiled(177, 16, 64)


def test_what_cannot_be_used_is_a_fault() -> None:
    device = next(device for device in DEVICES if device.name == "sm_80")
    variant = next(one for one in all_variants() if not one.may_spill)
    faults = {
        "": Compiled(32, 0, device.max_shared_bytes),
        "spills": Compiled(255, 4, 0),
        f"needs more than the {163 * 1024} bytes of shared memory": Compiled(32, 0, 164 * 1024),
        "no": Compiled(error="no"),
    }
    for fault, compiled in faults.items():
        form = Form(variant, device, compiled)
        assert form.fault == fault
        assert table([form]).endswith(f"{variant.label}: {fault}" if fault else variant.label)


def test_a_cache_that_cannot_be_read_is_one_that_is_not_there(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "cache.json"
    assert ahead_of_time.read_cache(cache) == {}
    known = {"a": Compiled(1, 2, 3), "b": Compiled(error="no")}
    ahead_of_time.write_cache(cache, known)
    assert ahead_of_time.read_cache(cache) == known
    for content in ("{", '{"a": {"other": 1}}', "[1]"):
        cache.write_text(content)
        assert ahead_of_time.read_cache(cache) == {}


def pairs_of_two() -> dict[str, object]:
    variant = all_variants()[0]
    return {name: (variant, DEVICES[0]) for name in ("first", "second")}


def test_what_was_compiled_before_an_interrupt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache.json"
    ahead_of_time.write_cache(cache, {"older": Compiled(9)})
    monkeypatch.setattr(ahead_of_time, "_pairs", pairs_of_two)

    def interrupted(keys: list[str], num_workers: int) -> Iterator[tuple[str, Compiled]]:
        yield keys[0], Compiled(32)
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead_of_time, "_compile_in_workers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ahead_of_time.compile_all(1, cache)
    assert ahead_of_time.read_cache(cache) == {"older": Compiled(9), "first": Compiled(32)}
    monkeypatch.setattr(
        ahead_of_time, "_compile_in_workers", lambda keys, _: ((key, Compiled(64)) for key in keys)
    )
    monkeypatch.setattr(ahead_of_time, "_WRITTEN_EVERY", 1)
    told: list[str] = []
    forms = ahead_of_time.compile_all(1, cache, report=told.append)
    assert told == ["compiled 1 of 1"]
    assert [form.compiled.registers for form in forms] == [32, 64]
    assert ahead_of_time.read_cache(cache).keys() == {"first", "second"}


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--workers", "0"], 2, "--workers: must be at least 1"),
        (["--only", "no such"], 2, "--only: no kernel's label has 'no such' in it"),
        (["--only", "silu", "--json"], 1, "cannot keep what is compiled"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line_before_anything_is_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    told: str,
) -> None:
    monkeypatch.setattr(ahead_of_time, "knobs", Mock(**{"runtime.interpret": False}))
    monkeypatch.setattr(ahead_of_time, "_pairs", pairs_of_two)
    monkeypatch.setattr(sys, "argv", ["ahead_of_time", *arguments])
    directory = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    if "cannot keep" in told:
        directory.write_text("a file")
    with pytest.raises(SystemExit) as ended:
        ahead_of_time.main()
    assert ended.value.code == code
    assert told in capsys.readouterr().err.splitlines()[-1]
