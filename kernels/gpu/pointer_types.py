"""How Triton writes the type of a tensor that a kernel is given."""

import torch

_ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def pointer_type(dtype: torch.dtype) -> str:
    """Of a tensor of `dtype`: "*bf16"."""
    return f"*{_ELEMENTS[dtype]}"
