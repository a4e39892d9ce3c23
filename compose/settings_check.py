"""Checks the settings of every service of a line before any of them starts."""

import difflib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from compose.errors import CommandError
from compose.supervisor import ServiceSpec

_PREFIX: Final = "TOKENLINE_"
# What the programs print before the cause, in protos/wire/service.py.
_MARKER: Final = ": cannot start: "


def require_good_settings(specs: Sequence[ServiceSpec], environment: Mapping[str, str]) -> None:
    """Raises CommandError that names every fault of every service, in one line.

    `environment` is what the services would get. Each kind of service checks its own settings, in a
    process of its own: this command knows the services by their command lines only.
    """
    # Replicas have the same settings.
    by_service = {spec.service: spec for spec in reversed(specs) if spec.settings_check}
    faults = _faults_of_services(list(reversed(by_service.values())), environment)
    faults += _unknown_services(sorted(by_service), environment)
    if faults:
        raise CommandError(f"wrong settings: {'; '.join(faults)}")


def _faults_of_services(specs: Iterable[ServiceSpec], environment: Mapping[str, str]) -> list[str]:
    checks = [
        (
            spec.service,
            subprocess.Popen(
                spec.settings_check,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=dict(environment),
                text=True,
                errors="replace",
            ),
        )
        for spec in specs
    ]
    faults = []
    for service, process in checks:
        _, errors = process.communicate()
        if process.returncode:
            last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            faults.append(f"{service}: {last.partition(_MARKER)[2] or last}")
    return faults


def _unknown_services(services: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What looks like a setting, and is one of no service."""
    names = [service.removesuffix("_svc").upper() for service in services]
    known = tuple(f"{_PREFIX}{name}_" for name in names)
    faults = []
    for key in sorted(environment):
        if not key.startswith(_PREFIX) or key.startswith(known):
            continue
        service, _, setting = key.removeprefix(_PREFIX).partition("_")
        close = difflib.get_close_matches(service, names, n=1)
        hint = (
            f"did you mean {_PREFIX}{close[0]}_{setting}?"
            if close and setting
            else f"settings begin with {', '.join(known)}"
        )
        faults.append(f"unknown setting {key}, {hint}")
    return faults
