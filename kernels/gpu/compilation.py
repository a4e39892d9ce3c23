"""Compiles one form of a kernel for a device that need not be there, and reads off what it takes.

Registers, spills and shared memory of a NVIDIA binary are what its assembler reports; those of an
AMD one stand in the metadata of its assembly.
"""

import contextlib
import hashlib
import io
import json
import re
from dataclasses import dataclass

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu.variant import Variant

_KIB = 1024
_REGISTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Device:
    """What kernels are compiled for."""

    name: str
    backend: str
    architecture: int | str
    lanes: int  # of a warp
    max_shared_bytes: int  # of one program
    types: frozenset[str] = frozenset()  # that not every device has


DEVICES = (
    Device("sm_80", "cuda", 80, 32, 163 * _KIB),
    Device("sm_90", "cuda", 90, 32, 227 * _KIB, frozenset({"fp8"})),
    Device("gfx942", "hip", "gfx942", 64, 64 * _KIB),
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiled kernel takes: of registers per lane, and bytes of shared memory per program.

    `spilled` are the bytes per lane that do not fit into registers. With `error` there is no
    kernel.
    """

    registers: int = 0
    spilled: int = 0
    shared_bytes: int = 0
    error: str = ""


def digest(variant: Variant, device: Device) -> str:
    """Changes with the kernel's source, that of what it calls, its form, Triton and the device."""
    form = {
        "triton": triton.__version__,
        "source": variant.kernel.cache_key,
        "device": [device.name, device.backend, device.architecture],
        "form": [
            sorted(variant.signature.items()),
            sorted((name, repr(value)) for name, value in variant.constexprs.items()),
            *(variant.num_warps, variant.num_stages, sorted(variant.divisible_by_16)),
        ],
    }
    return hashlib.sha256(json.dumps(form).encode()).hexdigest()


def compile_variant(variant: Variant, device: Device) -> Compiled:
    """Compiles, always anew. Not in Triton's interpreter."""
    names = variant.kernel.arg_names
    missing = [name for name in names if name not in {**variant.signature, **variant.constexprs}]
    if missing:
        return Compiled(error=f"no type is given for {', '.join(missing)}")
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = {name for name, kind in signature.items() if kind.startswith("*")}
    aligned |= set(variant.divisible_by_16)
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in aligned
    }
    source = ASTSource(variant.kernel, signature, dict(variant.constexprs), attributes)
    target = GPUTarget(device.backend, device.architecture, device.lanes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    log = io.StringIO()
    try:
        with (
            knobs.nvidia.scope(),
            knobs.compilation.scope(),
            contextlib.redirect_stdout(log),
        ):
            knobs.nvidia.dump_ptxas_log = True
            knobs.compilation.always_compile = True
            kernel = triton.compile(source, target=target, options=options)
    # Whatever the compiler raises says that this kernel does not compile, which is the result.
    except Exception as error:
        return Compiled(error=_last_words(error))
    if device.backend == "cuda":
        return read_assembler(log.getvalue(), kernel.metadata.shared)
    return read_metadata(kernel.asm["amdgcn"], kernel.metadata.shared)


def read_assembler(log: str, shared_bytes: int) -> Compiled:
    used = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if used is None or not spills:
        return Compiled(error="the assembler reports no registers")
    return Compiled(int(used[1]), max(map(int, spills)), shared_bytes)


def read_metadata(assembly: str, shared_bytes: int) -> Compiled:
    def value(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    spilled = _REGISTER_BYTES * (value("vgpr_spill_count") + value("sgpr_spill_count"))
    return Compiled(value("vgpr_count"), spilled, shared_bytes)


def _last_words(error: BaseException) -> str:
    """The last line of what went wrong first, which follows the source and a mark under it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalpha, line))]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason is given'}"
