"""What is asked of `select_kernels`."""

from dataclasses import dataclass

WEIGHTS = ("auto", "int8", "fp8", "bfloat16", "float32")
ACTIVATIONS = ("auto", "int8", "int16")
KV_TYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "int8")
IMPLEMENTATIONS = (
    "auto",
    "torch",
    "portable",
    "avx2",
    "avxvnni",
    "avx512",
    "amx",
    "neon",
    "triton",
)


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One of the names above each; "auto" leaves the choice to `select_kernels`.

    `weights` are what linear layers compute with. `auto` keeps 4- and 8-bit weights as a file has
    them where the implementation can compute with these; of all others the CPU's native library
    makes int8, and a GPU bfloat16. `activations` are what the native library rounds to where it
    multiplies by int8 or 4-bit weights. `kv` is what keys and values are held in. `implementation`
    is torch's own ops, the native library by the instruction set it was compiled for, or Triton's
    kernels, which on the CPU run in its interpreter. `num_threads` are those that a native one has.
    With `batch_invariant` a row's result does not depend on the rest of the batch on a GPU either,
    which costs speed; on the CPU it never does.
    """

    weights: str = "auto"
    activations: str = "auto"
    kv: str = "auto"
    implementation: str = "auto"
    num_threads: int = 1
    batch_invariant: bool = False
