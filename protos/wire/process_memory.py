"""Gives memory that this process no longer uses back to the system."""

import ctypes
import gc


def release_free_memory() -> None:
    """Returns freed pages at once, where the C library can (glibc): takes 5 to 40 ms.

    Measured: after loading a tokenizer of 262,144 tokens a process keeps 107 MB instead of 159 MB,
    after encoding a prompt of 4.2 MB 53 MB instead of 400 MB.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
