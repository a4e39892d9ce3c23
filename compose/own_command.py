"""How to call this program again: what a message tells the user to type."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

_NAME: Final = "tokenline"


def own_command() -> str:
    """`tokenline` where a shell finds it, else its path: relative below the working directory."""
    program = Path(sys.argv[0])
    if program.name != _NAME or not program.is_file():
        # Not started as the command: its place beside the interpreter.
        program = Path(sys.executable).with_name(_NAME)
    program = program.absolute()
    found = shutil.which(_NAME)
    if found is not None and Path(found).resolve() == program.resolve():
        return _NAME
    relative = os.path.relpath(program)
    if relative.startswith(os.pardir):
        return shlex.quote(str(program))
    # Without a slash, a shell would look for it on the PATH.
    return shlex.quote(relative if os.sep in relative else os.path.join(os.curdir, relative))
