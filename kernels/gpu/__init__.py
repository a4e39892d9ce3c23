"""Triton's kernels. A product and a sum are one rounding in all of them, whatever Triton's default
is, which changes with its version 3.10."""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
