"""Settings of a service: one frozen dataclass, filled from flags and the environment.

    @dataclass(frozen=True)
    class Settings:
        port: int = setting(8000, "Port to listen on.", minimum=0, maximum=65535)

is read from `--port 9000` or, for the service `gateway`, from `TOKENLINE_GATEWAY_PORT`. Flags win.
Everything that is wrong is reported at once.
"""

import dataclasses
import difflib
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from protos.wire.errors import StartupError

SettingsT = TypeVar("SettingsT")

REQUIRED: Final[Any] = dataclasses.MISSING
# How like a known name an unknown one must be for it to be suggested, from 0 to 1.
_CLOSE: Final = 0.7
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def setting(
    default: Any,
    help_text: str,
    *,
    parse: Callable[[str], Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """Declares one field of a settings class. `parse` replaces the parser of the field's type."""
    metadata = {
        "help": help_text,
        "parse": parse,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices),
    }
    return dataclasses.field(default=default, metadata=metadata)


def parse_size(text: str) -> int:
    """A number of bytes from "4096", "512MiB", "2 GB"; raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if match is None:
        raise ValueError(f"expected a size such as 512MiB or 2GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def format_size(num_bytes: int) -> str:
    """The shortest exact text that `parse_size` reads back: "512MiB", "1500"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def parse_addresses(text: str) -> tuple[str, ...]:
    """`host:port[,host:port…]` as a tuple; raises ValueError."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"expected host:port, got {address!r}")
    if not addresses:
        raise ValueError(f"expected at least one host:port, got {text!r}")
    return addresses


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"expected true or false, got {text!r}")


def _parse_path(text: str) -> Path:
    # Path("") is the working directory, which nobody means by it.
    if not text.strip():
        raise ValueError("expected a path, got nothing")
    return Path(text).expanduser()


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: _parse_float,
    str: str,
    Path: _parse_path,
    bool: _parse_bool,
    tuple[str, ...]: parse_addresses,
}


def load_settings(
    cls: type[SettingsT],
    service: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> SettingsT:
    """Fills `cls` for `service`; flags win over the environment, the environment over defaults.

    Raises StartupError that lists every unknown, missing or unreadable key. `--help` prints all
    settings and raises SystemExit(0).
    """
    prefix = environment_prefix(service)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(_help_text(service, prefix, fields))
        raise SystemExit(0)

    problems: list[str] = []
    texts = _from_environment(prefix, fields, environment, problems)
    texts.update(_from_flags(fields, arguments, problems))
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in texts:
            source, text = texts[name]
            try:
                values[name] = _parse(field, hints[name], text)
            except ValueError as error:
                problems.append(f"{source}: {error}")
        elif field.default is REQUIRED:
            problems.append(f"{_flag(name)} (or {prefix}{name.upper()}) is required")
    if problems:
        raise StartupError("; ".join(problems))
    return cls(**values)


def environment_prefix(service: str) -> str:
    """`engine_svc` → `TOKENLINE_ENGINE_`."""
    return f"TOKENLINE_{service.removesuffix('_svc').upper()}_"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _unknown(key: str, prefix: str, known: Sequence[str]) -> str:
    # Without what all names share: it would make any two of them alike.
    names = [name.removeprefix(prefix) for name in known]
    close = difflib.get_close_matches(key.removeprefix(prefix), names, n=1, cutoff=_CLOSE)
    return f"unknown setting {key}" + (f", did you mean {prefix}{close[0]}?" if close else "")


def _from_environment(
    prefix: str,
    fields: Mapping[str, Any],
    environment: Mapping[str, str],
    problems: list[str],
) -> dict[str, tuple[str, str]]:
    known = {f"{prefix}{name.upper()}": name for name in fields}
    found: dict[str, tuple[str, str]] = {}
    for key, text in environment.items():
        if not key.startswith(prefix):
            continue
        if key in known:
            found[known[key]] = (key, text)
        else:
            problems.append(_unknown(key, prefix, list(known)))
    return found


def _from_flags(
    fields: Mapping[str, Any], arguments: Sequence[str], problems: list[str]
) -> dict[str, tuple[str, str]]:
    known = {_flag(name): name for name in fields}
    found: dict[str, tuple[str, str]] = {}
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if flag not in known:
            problems.append(_unknown(flag, "--", list(known)))
            if rest and not rest[0].startswith("--"):
                rest.pop(0)
        elif equals:
            found[known[flag]] = (flag, text)
        elif rest and not rest[0].startswith("--"):
            found[known[flag]] = (flag, rest.pop(0))
        else:
            values = _values_text(fields[known[flag]]).strip(" .").replace("One of", "one of")
            problems.append(f"{flag} needs a value{values and f': {values}'}")
    return found


def _parse(field: "dataclasses.Field[Any]", hint: Any, text: str) -> Any:
    options = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    is_optional = isinstance(hint, types.UnionType) and len(options) == 1
    kind = options[0] if is_optional else hint
    parser = field.metadata["parse"] or _PARSERS[kind]
    try:
        value = parser(text)
    except ValueError as error:
        if parser in (int, _parse_float):
            raise ValueError(f"expected a number, got {text!r}") from error
        raise
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}, got {text!r}")
    minimum, maximum = field.metadata["minimum"], field.metadata["maximum"]
    if minimum is not None and value < minimum:
        raise ValueError(f"must be at least {minimum}, got {text}")
    if maximum is not None and value > maximum:
        raise ValueError(f"must be at most {maximum}, got {text}")
    return value


def _help_text(service: str, prefix: str, fields: Mapping[str, Any]) -> str:
    lines = [f"usage: python -m {service} [--setting value …]", ""]
    for name, field in fields.items():
        lines.append(f"  {_flag(name)}, {prefix}{name.upper()} ({_default_text(field)})")
        lines.append(f"      {field.metadata['help']}{_values_text(field)}")
    return "\n".join(lines) + "\n"


def _default_text(field: "dataclasses.Field[Any]") -> str:
    default: Any = field.default
    if default is REQUIRED:
        return "required"
    if default in (None, "", ()):
        return "default: none"
    if field.metadata["parse"] is parse_size:
        return f"default {format_size(default)}"
    if isinstance(default, bool):
        return f"default {str(default).lower()}"
    return f"default {','.join(default) if isinstance(default, tuple) else default}"


def _values_text(field: "dataclasses.Field[Any]") -> str:
    if field.metadata["choices"]:
        return f" One of {', '.join(field.metadata['choices'])}."
    return " true or false." if isinstance(field.default, bool) else ""
