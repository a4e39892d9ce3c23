"""Everything that can be asked of the GPU path, in under 8 minutes on one GPU:

    python3 -m tests.gpu.run --out gpu.json [--model SmolLM2.gguf]

needs torch and triton, and of this project its files alone. Kernels are held against the reference,
then the engine, with a model of Llama-3.1-8B's shapes and random weights; then both are measured.
Each part is a process with a time limit: what one finds is written to --out as it comes, whatever
becomes of it. `--rehearse` runs it all with tiny shapes on the CPU, in Triton's interpreter. The
exit code is 1 where a check or a part failed; goals that are missed are listed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.parts import PARTS, Part
from tests.gpu.records import Kind, Record, last_words, read_record
from tests.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]
# Parts that are told to end have so long.
_GRACE_SECONDS = 3.0


@dataclass(slots=True)
class Running:
    """A process of some parts, and where it writes what is no record."""

    name: str
    process: subprocess.Popen[str]
    errors: Path
    deadline: float
    reader: threading.Thread | None = field(default=None)


class Run:
    """The waves one after the other, within `max_seconds` in all."""

    def __init__(self, arguments: argparse.Namespace, report: Report, scratch: Path) -> None:
        self._arguments = arguments
        self._report = report
        self._scratch = scratch
        self._deadline = time.monotonic() + arguments.max_seconds
        self._running: list[Running] = []

    def run(self, parts: Sequence[Part]) -> None:
        if self._arguments.rehearse:
            # In one process: on a CPU, most of what a part takes is the import of torch.
            names = [part.name for part in parts if part.is_rehearsed]
            self._wait([self._start("rehearsal", names, self._arguments.max_seconds)])
            return
        for wave in sorted({part.wave for part in parts}):
            started = [
                self._start(part.name, [part.name], part.max_seconds)
                for part in parts
                if part.wave == wave
            ]
            self._wait(started)

    def stop(self) -> None:
        """Ends what still runs."""
        for running in self._running:
            _end(running.process)

    def _start(self, name: str, names: Sequence[str], max_seconds: float) -> Running:
        command = [sys.executable, "-m", "tests.gpu.part_process", *names]
        if self._arguments.rehearse:
            command.append("--rehearse")
        if self._arguments.model is not None:
            command += ["--model", str(self._arguments.model.resolve())]
        errors = self._scratch / f"{name}.log"
        with errors.open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(self._arguments.rehearse),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        deadline = min(time.monotonic() + max_seconds, self._deadline)
        running = Running(name, process, errors, deadline)
        running.reader = threading.Thread(target=self._read, args=(running,), daemon=True)
        running.reader.start()
        self._running.append(running)
        return running

    def _read(self, running: Running) -> None:
        assert running.process.stdout is not None
        for line in running.process.stdout:
            record = read_record(line)
            if record is not None:
                self._report.add(record)

    def _wait(self, started: Sequence[Running]) -> None:
        for running in started:
            try:
                code = running.process.wait(max(0.0, running.deadline - time.monotonic()))
                fault = f"ended with code {code}" if code else ""
            except subprocess.TimeoutExpired:
                fault = "ran out of its time"
            _end(running.process)
            assert running.reader is not None
            running.reader.join(_GRACE_SECONDS)
            self._running.remove(running)
            if fault:
                detail = f"{fault}\n{last_words(running.errors.read_text(errors='replace'))}"
                self._report.add(Record(running.name, Kind.FAILED, fault, detail=detail))


def _environment(is_rehearsal: bool) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["OMP_NUM_THREADS"] = "1" if is_rehearsal else "4"
    if is_rehearsal:
        environment["TRITON_INTERPRET"] = "1"
    return environment


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON of all")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file to serve as well")
    parser.add_argument("--only", default="", help="parts with one of these, parted by commas")
    parser.add_argument("--max-seconds", type=float, default=465, help="of all parts together")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    arguments = parser.parse_args()
    words = [word for word in arguments.only.split(",") if word] or [""]
    parts = [part for part in PARTS if any(word in part.name for word in words)]
    if not parts:
        parser.error(f"no part is called so: {', '.join(part.name for part in PARTS)}")
    if arguments.model is not None and not arguments.model.is_file():
        parser.error(f"--model: there is no file {arguments.model}")
    report = Report(arguments.out)
    try:
        report.write()
    except OSError as error:
        parser.error(f"--out cannot be written: {error}")
    with tempfile.TemporaryDirectory(prefix="tokenline-gpu-") as scratch:
        run = Run(arguments, report, Path(scratch))
        # Whoever ends this ends the parts; what they found is written already.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        try:
            run.run(parts)
        finally:
            run.stop()
            print(report.text(), flush=True)
            report.write()
    return 1 if report.has_failures else 0


if __name__ == "__main__":
    sys.exit(main())
