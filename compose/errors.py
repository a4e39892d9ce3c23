"""The error that ends a command: one sentence that says why, and what to do next."""


class CommandError(Exception):
    """A command cannot do what was asked. The message is for people and fits on one line."""
