"""Loads the native library, and tells ctypes what its functions take; see native/api.h."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from kernels.cpu.build import instruction_sets, interface, library_path

# All pointers are passed as addresses: what they point at lies in tensors.
_ADDRESS = c_void_p


class Matrix(ctypes.Structure):
    """TlMatrix."""

    _fields_ = (
        ("format", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("data", _ADDRESS),
        ("bias", _ADDRESS),
    )


class Rows(ctypes.Structure):
    """TlRows."""

    _fields_ = (
        ("values", _ADDRESS),
        ("stride", c_int64),
        ("quantised", _ADDRESS),
        ("scales", _ADDRESS),
        ("sums", _ADDRESS),
        ("halves", c_int32),
    )


class KvLayer(ctypes.Structure):
    """TlKvLayer."""

    _fields_ = (
        ("blocks", _ADDRESS),
        ("type", c_int32),
        ("block_size", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
    )


class Rotary(ctypes.Structure):
    """TlRotary."""

    _fields_ = (
        ("cos_sin", _ADDRESS),
        ("positions", _ADDRESS),
        ("norm", _ADDRESS),
        ("eps", c_float),
    )


class _Result(NamedTuple):
    """What a function returns, and what makes of it what the caller gets, or raises."""

    kind: type[c_int32] | type[c_void_p]
    check: Callable[[Any, Any, tuple[Any, ...]], int]


_NO_MEMORY = -2


def _checked_status(status: int, function: Any, _: tuple[Any, ...]) -> int:
    if status == _NO_MEMORY:
        raise _memory_error(function)
    return status


def _checked_handle(handle: int | None, function: Any, _: tuple[Any, ...]) -> int:
    if not handle:
        raise _memory_error(function)
    return handle


def _memory_error(function: Any) -> MemoryError:
    return MemoryError(f"memory ran out in {function.__name__} of the native CPU kernels")


# Results that say whether memory ran out: a call then raises MemoryError.
_STATUS = _Result(c_int32, _checked_status)
_HANDLE = _Result(c_void_p, _checked_handle)
_POOL = _PROGRAM = _PLAN = c_void_p
_COUNTS = POINTER(c_int64)
# Result, then arguments, as in api.h.
_SIGNATURES = {
    "tl_interface": (c_char_p, []),
    "tl_instruction_set": (c_char_p, []),
    "tl_runs_here": (c_int32, [c_char_p]),
    "tl_pool_new": (_HANDLE, [c_int32]),
    "tl_pool_delete": (None, [_POOL]),
    "tl_pool_num_threads": (c_int32, [_POOL]),
    "tl_packed_bytes": (c_int64, [c_int32, c_int64, c_int64]),
    "tl_pack": (
        _STATUS,
        [
            *(c_int32, c_int32, _ADDRESS, c_int64, _ADDRESS),
            *(c_int64, c_int64, c_int64, c_int64, _ADDRESS),
        ],
    ),
    "tl_unpack": (None, [POINTER(Matrix), c_int64, c_int64, _ADDRESS]),
    "tl_program_new": (_HANDLE, []),
    "tl_program_delete": (None, [_PROGRAM]),
    "tl_program_run": (_STATUS, [_PROGRAM, _POOL, _COUNTS]),
    "tl_program_num_ops": (c_int32, [_PROGRAM]),
    "tl_program_op_name": (c_char_p, [_PROGRAM, c_int32]),
    "tl_program_set_profiling": (None, [_PROGRAM, c_int32]),
    "tl_program_profile": (None, [_PROGRAM, POINTER(c_double)]),
    "tl_add_embedding": (_STATUS, [_PROGRAM, c_int32, _ADDRESS, POINTER(Matrix), Rows]),
    "tl_add_rms_norm": (
        _STATUS,
        [_PROGRAM, c_int32, _ADDRESS, c_int64, c_int64, _ADDRESS, c_float, Rows],
    ),
    "tl_add_add_rms_norm": (
        _STATUS,
        [
            *(_PROGRAM, c_int32, _ADDRESS, c_int64, _ADDRESS, c_int64, c_int64),
            *(_ADDRESS, c_float, Rows),
        ],
    ),
    "tl_add_quantise": (_STATUS, [_PROGRAM, c_int32, _ADDRESS, c_int64, c_int64, Rows]),
    "tl_add_take_rows": (_STATUS, [_PROGRAM, c_int32, _ADDRESS, Rows, c_int64, Rows]),
    "tl_add_silu_and_mul": (_STATUS, [_PROGRAM, c_int32, _ADDRESS, c_int64, c_int64, Rows]),
    "tl_add_linear": (
        _STATUS,
        [_PROGRAM, c_int32, Rows, POINTER(Matrix), c_int32, _ADDRESS, c_int64],
    ),
    "tl_add_gated_linear": (_STATUS, [_PROGRAM, c_int32, Rows, POINTER(Matrix), Rows]),
    "tl_kv_block_bytes": (c_int64, [c_int32, c_int64, c_int64, c_int64]),
    "tl_add_rope": (
        _STATUS,
        [_PROGRAM, c_int32, _ADDRESS, c_int64, c_int64, c_int64, Rotary],
    ),
    "tl_add_rope_and_cache": (
        _STATUS,
        [
            *(_PROGRAM, c_int32, _ADDRESS, c_int64, _ADDRESS, c_int64),
            *(Rotary, KvLayer, _ADDRESS),
        ],
    ),
    "tl_add_attention_plan": (
        _HANDLE,
        [_PROGRAM, c_int32, _ADDRESS, _ADDRESS, _ADDRESS, c_int64, _ADDRESS, c_int64],
    ),
    "tl_add_attention": (
        _STATUS,
        [
            *(_PROGRAM, c_int32, _PLAN, _ADDRESS, c_int64, c_int64),
            *(KvLayer, c_float, c_int64, Rows),
        ],
    ),
    "tl_mask_logits": (
        _STATUS,
        [_POOL, _ADDRESS, c_int64, c_int64, c_int64, _ADDRESS, _ADDRESS],
    ),
    "tl_bias_logits": (None, [_ADDRESS, c_int64, c_int64, _ADDRESS, _ADDRESS, _ADDRESS]),
    "tl_penalize": (
        _STATUS,
        [
            *(_POOL, _ADDRESS, c_int64, c_int64, c_int64, _ADDRESS, _ADDRESS, c_int64),
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
        ],
    ),
    "tl_sample": (
        _STATUS,
        [
            *(_POOL, _ADDRESS, c_int64, c_int64, c_int64),
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
        ],
    ),
    "tl_token_logprobs": (
        _STATUS,
        [
            *(_POOL, _ADDRESS, c_int64, c_int64, c_int64, _ADDRESS, c_int64),
            *(_ADDRESS, _ADDRESS, _ADDRESS),
        ],
    ),
}


def available() -> list[str]:
    """The instruction sets that a build exists for, the best last. Empty: there is no library."""
    return [name for name in instruction_sets() if library_path(name).exists()]


def runnable() -> list[str]:
    """Of the available ones those that this machine can run, the best last. OSError as `load`."""
    built = available()
    # Any of them can be loaded and asked that, on any machine.
    return [name for name in built if load(built[0]).tl_runs_here(name.encode())]


@cache
def load(instruction_set: str) -> ctypes.CDLL:
    """The build for `instruction_set`; OSError where it is missing, cannot be loaded, or is old.

    Its functions raise MemoryError where memory runs out.
    """
    path = library_path(instruction_set)
    library = ctypes.CDLL(str(path))
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            if isinstance(result, _Result):
                function.restype, function.errcheck = result
            else:
                function.restype = result
    except AttributeError:
        raise OSError(f"{path} is older than its sources: make native") from None
    if library.tl_interface().decode() != interface():
        raise OSError(f"{path} is older than its sources: make native")
    return library
