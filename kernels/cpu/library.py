"""Loads the native library, and tells ctypes what its functions take; see native/api.h."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache

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


_POOL = _PROGRAM = _PLAN = c_void_p
_COUNTS = POINTER(c_int64)
# Result, then arguments, as in api.h.
_SIGNATURES = {
    "tl_interface": (c_char_p, []),
    "tl_instruction_set": (c_char_p, []),
    "tl_best_instruction_set": (c_char_p, []),
    "tl_pool_new": (_POOL, [c_int32]),
    "tl_pool_delete": (None, [_POOL]),
    "tl_pool_num_threads": (c_int32, [_POOL]),
    "tl_packed_bytes": (c_int64, [c_int32, c_int64, c_int64]),
    "tl_pack": (
        c_int32,
        [
            *(c_int32, c_int32, _ADDRESS, c_int64, _ADDRESS),
            *(c_int64, c_int64, c_int64, c_int64, _ADDRESS),
        ],
    ),
    "tl_unpack": (None, [POINTER(Matrix), c_int64, c_int64, _ADDRESS]),
    "tl_program_new": (_PROGRAM, []),
    "tl_program_delete": (None, [_PROGRAM]),
    "tl_program_run": (None, [_PROGRAM, _POOL, _COUNTS]),
    "tl_program_num_ops": (c_int32, [_PROGRAM]),
    "tl_program_op_name": (c_char_p, [_PROGRAM, c_int32]),
    "tl_program_set_profiling": (None, [_PROGRAM, c_int32]),
    "tl_program_profile": (None, [_PROGRAM, POINTER(c_double)]),
    "tl_add_embedding": (None, [_PROGRAM, c_int32, _ADDRESS, POINTER(Matrix), Rows]),
    "tl_add_rms_norm": (
        None,
        [_PROGRAM, c_int32, _ADDRESS, c_int64, c_int64, _ADDRESS, c_float, Rows],
    ),
    "tl_add_add_rms_norm": (
        None,
        [
            *(_PROGRAM, c_int32, _ADDRESS, c_int64, _ADDRESS, c_int64, c_int64),
            *(_ADDRESS, c_float, Rows),
        ],
    ),
    "tl_add_quantise": (None, [_PROGRAM, c_int32, _ADDRESS, c_int64, c_int64, Rows]),
    "tl_add_take_rows": (None, [_PROGRAM, c_int32, _ADDRESS, Rows, c_int64, Rows]),
    "tl_add_silu_and_mul": (None, [_PROGRAM, c_int32, _ADDRESS, c_int64, c_int64, Rows]),
    "tl_add_linear": (
        None,
        [_PROGRAM, c_int32, Rows, POINTER(Matrix), c_int32, _ADDRESS, c_int64],
    ),
    "tl_add_gated_linear": (None, [_PROGRAM, c_int32, Rows, POINTER(Matrix), Rows]),
    "tl_kv_block_bytes": (c_int64, [c_int32, c_int64, c_int64, c_int64]),
    "tl_add_rope": (
        None,
        [_PROGRAM, c_int32, _ADDRESS, c_int64, c_int64, c_int64, Rotary],
    ),
    "tl_add_rope_and_cache": (
        None,
        [
            *(_PROGRAM, c_int32, _ADDRESS, c_int64, _ADDRESS, c_int64),
            *(Rotary, KvLayer, _ADDRESS),
        ],
    ),
    "tl_add_attention_plan": (
        _PLAN,
        [_PROGRAM, c_int32, _ADDRESS, _ADDRESS, _ADDRESS, c_int64, _ADDRESS, c_int64],
    ),
    "tl_add_attention": (
        None,
        [
            *(_PROGRAM, c_int32, _PLAN, _ADDRESS, c_int64, c_int64),
            *(KvLayer, c_float, c_int64, Rows),
        ],
    ),
    "tl_mask_logits": (
        None,
        [_POOL, _ADDRESS, c_int64, c_int64, c_int64, _ADDRESS, _ADDRESS],
    ),
    "tl_bias_logits": (None, [_ADDRESS, c_int64, c_int64, _ADDRESS, _ADDRESS, _ADDRESS]),
    "tl_penalize": (
        None,
        [
            *(_POOL, _ADDRESS, c_int64, c_int64, c_int64, _ADDRESS, _ADDRESS, c_int64),
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
        ],
    ),
    "tl_sample": (
        None,
        [
            *(_POOL, _ADDRESS, c_int64, c_int64, c_int64),
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
        ],
    ),
    "tl_token_logprobs": (
        None,
        [
            *(_POOL, _ADDRESS, c_int64, c_int64, c_int64, _ADDRESS, c_int64),
            *(_ADDRESS, _ADDRESS, _ADDRESS),
        ],
    ),
}


def available() -> list[str]:
    """The instruction sets that a build exists for, the best last. Empty: there is no library."""
    return [name for name in instruction_sets() if library_path(name).exists()]


def best() -> str | None:
    """The best build that this machine can run, or None."""
    built = available()
    if not built:
        return None
    # Any of them can be loaded and asked that, on any machine.
    wanted = load(built[0]).tl_best_instruction_set().decode()
    names = list(instruction_sets())
    usable = names[: names.index(wanted) + 1]
    return next((name for name in reversed(built) if name in usable), None)


@cache
def load(instruction_set: str) -> ctypes.CDLL:
    """The build for `instruction_set`; OSError where it is missing, cannot be loaded, or is old."""
    path = library_path(instruction_set)
    library = ctypes.CDLL(str(path))
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError:
        raise OSError(f"{path} is older than its sources: make native") from None
    if library.tl_interface().decode() != interface():
        raise OSError(f"{path} is older than its sources: make native")
    return library
