"""The process of one part, or in a rehearsal of all: `python -m tests.gpu.part_process NAME …`.

Each record goes out at once, as a line. Packages that are not here get stand-ins first.
"""

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu.bare_machine import make_importable
from tests.gpu.parts import part_named
from tests.gpu.records import DONE, Recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    missing = make_importable()
    machine = _machine(arguments.rehearse, arguments.model)
    for name in arguments.names:
        part = part_named(name)
        recorder = Recorder(part.name, lambda record: print(record.line(), flush=True), machine[1])
        recorder.note(_described(machine[0]))
        if missing:
            recorder.note(f"stand-ins for {', '.join(missing)}")
        with recorder.case(name):
            getattr(import_module(part.module), part.function)(machine[0], recorder)
        recorder.note(DONE)


def _machine(is_rehearsal: bool, model: Path | None) -> tuple[Any, bool]:
    """The machine, and whether what it measures is of no meaning."""
    if is_rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"
        _hurry()
    torch, module = import_module("torch"), import_module("tests.gpu.machine")
    if not is_rehearsal and not torch.cuda.is_available():
        sys.exit("there is no GPU: --rehearse runs all of it on the CPU")
    torch.manual_seed(0)
    if is_rehearsal:
        torch.set_num_threads(1)
    device = torch.device("cpu") if is_rehearsal else torch.device("cuda", 0)
    return module.Machine(device, model), is_rehearsal


def _described(machine: Any) -> str:
    torch, triton = import_module("torch"), import_module("triton")
    name = torch.cuda.get_device_name() if machine.is_gpu else "the CPU, interpreted"
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def _hurry() -> None:
    pytest, quick = import_module("pytest"), import_module("tests.fakes.quick_interpreter")
    quick.hurry(pytest.MonkeyPatch())


if __name__ == "__main__":
    main()
