"""Every form of the GPU's kernels compiles, fits, does not spill, on devices not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.gpu import ahead_of_time
from kernels.gpu.ahead_of_time import Form, all_variants, is_for, table
from kernels.gpu.compilation import DEVICES, Compiled, read_assembler, read_metadata

ROOT = Path(__file__).resolve().parents[3]
# Cold, on two cores that have other things to do too. A second run takes seconds.
TIMEOUT_SECONDS = 900
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
