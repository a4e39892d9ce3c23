"""Makes an API key: `python -m gateway.new_api_key NAME` prints it, and its line for the file."""

import hashlib
import re
import secrets
import sys

_NUM_BYTES = 32


def new_key() -> str:
    return f"sk-{secrets.token_urlsafe(_NUM_BYTES)}"


def entry(name: str, key: str) -> str:
    """The line of the keys' file."""
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or re.fullmatch(r"[^:\s#]+", arguments[0]) is None:
        sys.stderr.write("usage: python -m gateway.new_api_key NAME   (no colon or space in it)\n")
        return 2
    key = new_key()
    sys.stderr.write(f"The key, which is shown this once: {key}\nIts line for --api-keys FILE:\n")
    sys.stdout.write(f"{entry(arguments[0], key)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
