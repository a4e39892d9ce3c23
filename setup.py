"""Build hook: generates the gRPC stubs and compiles the CPU kernels before packages are collected.

Both are made in place for an editable install. A wheel gets the stubs, and kernels for every
machine of its architecture, and is named after the platform.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# An isolated build does not put the project's own directory on the path.
sys.path.insert(0, str(ROOT))

from protos.generate import generate  # noqa: E402


class BuildWithNativeParts(build_py):
    """Generates and compiles, then builds as usual (also for editable installs)."""

    def run(self) -> None:
        generate(ROOT)
        super().run()
        # A program of its own, since importing it as a module would import all of the kernels.
        command = [sys.executable, str(ROOT / "kernels" / "cpu" / "build.py"), "--optional"]
        if self.editable_mode:
            command += ["--this-machine"]
        else:
            temporary = Path(self.get_finalized_command("build").build_temp)
            command += ["--directory", str(Path(self.build_lib, "kernels", "cpu", "lib"))]
            command += ["--objects", str(temporary / "kernels")]
        subprocess.run(command, check=True)


class PlatformDistribution(Distribution):
    """One that is not for every platform, though no module of it is compiled."""

    def has_ext_modules(self) -> bool:
        return True


class WheelOfPlatform(bdist_wheel):
    """The kernels depend on the platform, but not on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildWithNativeParts, "bdist_wheel": WheelOfPlatform},
    distclass=PlatformDistribution,
)
