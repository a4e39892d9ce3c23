"""The run for a GPU machine, rehearsed: all parts to their end, and what is kept of one ended."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.bench_attention import FLASH, SPLIT
from tests.gpu.bench_engine import DECODE, IDLE, PREFILL, SAMPLER
from tests.gpu.parts import PARTS
from tests.gpu.records import Goal, Kind, Record, Recorder, read_record
from tests.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]
GOALS = (DECODE, PREFILL, FLASH, SPLIT, SAMPLER, IDLE)
# Cold, on cores that have other things to do too.
TIMEOUT_SECONDS = 1200
# As on a machine that has torch, triton and little else. Without pytest the interpreter would run
# at a third of its pace.
MISSING = ("grpc", "gguf", "llguidance", "psutil", "rich", "safetensors")
ON_A_BARE_MACHINE = """
import sys
sys.modules.update(dict.fromkeys({missing}))
from importlib import import_module
from tests.gpu import part_process
from tests.gpu.parts import PARTS
sys.argv = ["part_process", "rows", "--rehearse"]
part_process.main()
for part in PARTS:
    assert getattr(import_module(part.module), part.function)
import psutil
psutil.virtual_memory.return_value.available = 1 << 32
from tests.gpu.bench_engine import bench_4_bit
from tests.gpu.machine import Machine
from tests.gpu.records import Recorder
import torch
bench_4_bit(Machine(torch.device("cpu")), Recorder("", lambda r: print(r.line()), True))
"""


def command(out: Path, *arguments: str) -> list[str]:
    run = [sys.executable, "-m", "tests.gpu.run", "--rehearse", "--out", str(out)]
    return [*run, "--max-seconds", str(TIMEOUT_SECONDS), *arguments]


def test_a_rehearsal_runs_every_part_and_nothing_fails(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        command(out), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    found = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing failed" in done.stdout
    assert {part.name for part in PARTS if part.is_rehearsed} == set(
        re.findall(r"^(.+): done after [\d.]+ s$", done.stdout, flags=re.MULTILINE)
    )
    records = found["records"]
    ended = {record["part"] for record in records if record["name"] == "done"}
    assert ended == {part.name for part in PARTS if part.is_rehearsed}
    assert {record["goal"] for record in records} - {""} == {goal.text for goal in GOALS}
    # Figures of an interpreter meet no goals, and miss none.
    assert found["goals"] == []
    assert found["costs_of_batch_invariance"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_found_before_a_run_is_ended_is_kept(
    tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "gpu.json"
    process = subprocess.Popen(
        command(out, "--only", "rows"), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (out.exists() and json.loads(out.read_text())["records"]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    # To its end only if no child still holds it open.
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert json.loads(out.read_text())["records"]
    assert "rows" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "no/such/directory/gpu.json"], "--out cannot be written"),
        (["--model", "no-such.gguf"], "--model: there is no file no-such.gguf"),
        (["--only", "nothing,"], "no part is called so"),
    ],
)
def test_what_a_run_could_not_do_is_told_before_it_begins(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    done = subprocess.run(
        [*command(tmp_path / "gpu.json"), *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]


def test_records_are_heard_even_if_they_cannot_be_written(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    report = Report(directory / "gpu.json")
    directory.rmdir()
    Recorder("part", report.add, False).measure("a", 2.0, "ms")
    assert "part: a" in report.text()
    with pytest.raises(OSError, match=r"gpu\.json"):
        report.write()


def test_what_is_not_installed_is_not_needed() -> None:
    program = ON_A_BARE_MACHINE.format(missing=MISSING)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    records = [record for line in done.stdout.splitlines() if (record := read_record(line))]
    assert [record for record in records if record.ok is False or record.kind is Kind.FAILED] == []
    notes = [record.name for record in records if record.kind is Kind.NOTE]
    assert any(note.startswith("stand-ins for ") and "gguf" in note for note in notes)
    assert any(record.name.endswith(": a step") for record in records)


def test_a_case_that_fails_is_recorded_and_the_rest_goes_on() -> None:
    records: list[Record] = []
    recorder = Recorder("part", records.append, False)
    with recorder.case("broken"):
        raise RuntimeError("no such kernel")
    with recorder.case("wrong", is_check=True):
        assert 1 == 2, "not the same"
    with recorder.case("right", is_check=True):
        pass
    assert [record.kind for record in records] == [Kind.FAILED, Kind.CHECK, Kind.CHECK]
    assert [record.ok for record in records] == [None, False, True]
    assert "no such kernel" in records[0].detail and "not the same" in records[1].detail
    assert [read_record(record.line()) for record in records] == records


def test_goals_are_met_by_all_of_their_measures_or_missed(tmp_path: Path) -> None:
    report = Report(tmp_path / "gpu.json")
    recorder = Recorder("bench bf16", report.add, False)
    enough, little = Goal("enough", at_least=0.8), Goal("little", at_most=0.03)
    recorder.measure("a: on the device", 2.0, "ms")
    for value in (0.9, 0.7):
        recorder.measure("share", value, "", enough)
    recorder.measure("idle", 0.01, "", little)
    Recorder("bench batch-invariant", report.add, False).measure("a: on the device", 3.0, "ms")
    text = report.text()
    assert "MISSED enough" in text and "MET    little" in text
    assert "1.50 times as long" in text
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["goals"] == [{"goal": "enough", "met": False}, {"goal": "little", "met": True}]
    assert not report.has_failures
