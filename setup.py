"""Build hook: compiles the .proto files before the Python packages are collected."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# An isolated build does not put the project's own directory on the path.
sys.path.insert(0, str(ROOT))

from protos.generate import generate  # noqa: E402


class BuildWithStubs(build_py):
    """Generates the gRPC stubs in place, then builds as usual (also for editable installs)."""

    def run(self) -> None:
        generate(ROOT)
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
