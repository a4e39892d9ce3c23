"""What is asked of `select_kernels`."""

from dataclasses import dataclass

WEIGHTS = ("auto", "int8", "bfloat16", "float32")
KV_TYPES = ("auto", "float16", "float32", "int8")
IMPLEMENTATIONS = ("auto", "torch", "portable", "avx2", "avx512", "neon")


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One of the names above each; "auto" leaves the choice to `select_kernels`.

    `weights` are what linear layers compute with. `auto` keeps 4- and 8-bit weights as a file has
    them and makes int8 of all others, where the implementation can compute with these. `kv` is
    what keys and values are held in. `implementation` is torch's own ops, or the native library by
    the instruction set it was compiled for. `num_threads` are those that a native one has.
    """

    weights: str = "auto"
    kv: str = "auto"
    implementation: str = "auto"
    num_threads: int = 1
