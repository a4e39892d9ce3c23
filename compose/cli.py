"""Where the `tokenline` command begins: ready for Ctrl-C before anything large is loaded."""

import compose.quiet_interrupt
from compose.commands import run


def main() -> None:
    """Runs commands.py."""
    compose.quiet_interrupt.restore()
    run()
