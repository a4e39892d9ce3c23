"""Makes the engine importable where only torch, triton and numpy are installed.

The engine's compute half imports packages that read model files, follow grammars and speak gRPC,
none of which random weights need. Those that are missing get a stand-in: what is made of one cannot
be used, but imports. The error types of protos/ need generated stubs, so these have one, too.
"""

import importlib
import sys
from types import ModuleType
from unittest.mock import MagicMock

# With the modules that are imported from inside them.
PACKAGES = {
    "gguf": ("gguf.quants",),
    "llguidance": ("llguidance.gbnf_to_lark",),
    "psutil": (),
    "pytest": (),
    "rich": ("rich.console", "rich.table"),
    "safetensors": ("safetensors.torch", "safetensors.numpy"),
}
ERRORS = "protos.wire.errors"
_ERROR_NAMES = ("StartupError", "InvalidRequest", "Unavailable", "InternalError")


def make_importable() -> list[str]:
    """Puts stand-ins in the place of what cannot be imported, and returns the names of those."""
    missing = [name for name in PACKAGES if not _can_import(name)]
    for name in missing:
        for module in (name, *PACKAGES[name]):
            sys.modules[module] = MagicMock(name=module)
    if not _can_import(ERRORS):
        missing.append(ERRORS)
        sys.modules[ERRORS] = _errors()
    return missing


def is_here(name: str) -> bool:
    """Whether a package is itself, and no stand-in."""
    return not isinstance(sys.modules.get(name), MagicMock)


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    # Stubs that were generated for another protobuf raise an error of its own.
    except Exception:
        return False
    return True


def _errors() -> ModuleType:
    module = ModuleType(ERRORS)
    for name in _ERROR_NAMES:
        setattr(module, name, type(name, (Exception,), {}))
    return module
