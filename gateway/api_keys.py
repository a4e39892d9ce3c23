"""API keys: a file of hashes, read again when it changes, and the check of a request's key.

Each line is `name:sha256-hex`; more fields after another colon are for people, as are blank lines
and those that begin with `#`. Keys are random (see new_api_key.py), so a plain hash is enough:
there is no dictionary to try.
"""

import base64
import binascii
import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gateway.errors import Unauthorized
from protos.wire.errors import StartupError

logger = logging.getLogger(__name__)

_ENTRY: Final = re.compile(r"(?P<name>[^:\s]+):(?P<digest>[0-9a-fA-F]{64})(?::.*)?")

# What tells one state of a file from another: its time, size and inode.
_Stamp = tuple[int, int, int]
_NO_FILE: Final[_Stamp] = (0, 0, 0)


class ApiKeys:
    """The keys of one file. The constructor raises StartupError when it cannot be used.

    A file that becomes unusable later leaves the keys as they were, and is logged once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._stamp = _stamp(path)
            self._names = _read(path)
        except (OSError, ValueError) as error:
            raise StartupError(f"cannot use the API keys in {path}: {error}") from error

    def name_of(self, headers: Mapping[str, str]) -> str:
        """The name of the key that a request carries. Raises Unauthorized."""
        self._reload_when_changed()
        key = _carried_key(headers)
        if not key:
            raise Unauthorized(
                "No API key was given. Send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
            )
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = ""
        # Every entry is compared, so that the time tells nothing about which one matched.
        for known, name in self._names.items():
            if hmac.compare_digest(digest, known):
                found = name
        if not found:
            raise Unauthorized("The API key is not known.", code="invalid_api_key")
        return found

    def _reload_when_changed(self) -> None:
        try:
            stamp = _stamp(self._path)
        except OSError:
            stamp = _NO_FILE
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._names = _read(self._path)
        except (OSError, ValueError) as error:
            logger.error("the API keys in %s stay as they were: %s", self._path, error)
        else:
            logger.info("read %d API keys from %s", len(self._names), self._path)


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> dict[str, str]:
    """Names by the hash of their key. Raises OSError, and ValueError that names the line."""
    names = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(text)
        if entry is None:
            raise ValueError(f"line {number} is not of the form name:sha256-hex")
        names[entry["digest"].lower()] = entry["name"]
    if not names:
        raise ValueError("it holds no key")
    return names


def _carried_key(headers: Mapping[str, str]) -> str:
    """`x-api-key`, a bearer token, or the password of a browser's dialog; empty for none."""
    if key := headers.get("x-api-key", ""):
        return key
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
