"""Compiles every .proto file under protos/ to Python modules with type stubs, beside their source.

Runs at install (setup.py), and by hand after an edit: `python -m protos.generate`.
"""

import importlib.resources
import sys
from pathlib import Path

from grpc_tools import protoc


def generate(root: Path) -> list[Path]:
    """Compiles `root`/protos/**/*.proto in place and returns the sources that were compiled.

    Raises RuntimeError when protoc refuses a file; its own message is on stderr.
    """
    sources = sorted((root / "protos").rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{root}",
        f"-I{well_known}",
        f"--python_out={root}",
        f"--grpc_python_out={root}",
        f"--mypy_out={root}",
        f"--mypy_grpc_out={root}",
        *(str(source.relative_to(root)) for source in sources),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; its message is above")
    return sources


if __name__ == "__main__":
    for path in generate(Path(__file__).resolve().parent.parent):
        sys.stdout.write(f"compiled {path}\n")
