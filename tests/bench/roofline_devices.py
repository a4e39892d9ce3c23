"""What devices can do, as their makers publish it: dense products, decimal bytes.

NVIDIA's H100 and H200 data sheets give products "with sparsity", so half of that stands here; the
A100's gives both. The L40S's and L4's are of their data sheets, likewise halved; the RTX 4090's of
the Ada architecture's white paper, with float32 accumulation. AMD's are of the MI300X data sheet.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Of one device. Weights of fewer bits are made bfloat16 on their way to the products."""

    name: str
    memory_bytes: float
    bytes_per_second: float
    flops: float  # per second, of bfloat16


DEVICES = {
    "h200": DeviceFigures("H200 SXM", 141e9, 4.8e12, 989e12),
    "h100": DeviceFigures("H100 SXM", 80e9, 3.35e12, 989e12),
    "h100-pcie": DeviceFigures("H100 PCIe", 80e9, 2.0e12, 756e12),
    "a100": DeviceFigures("A100 80 GB SXM", 80e9, 2.039e12, 312e12),
    "a100-40gb": DeviceFigures("A100 40 GB SXM", 40e9, 1.555e12, 312e12),
    "l40s": DeviceFigures("L40S", 48e9, 0.864e12, 362e12),
    "l4": DeviceFigures("L4", 24e9, 0.3e12, 121e12),
    "rtx4090": DeviceFigures("RTX 4090", 24e9, 1.008e12, 165.2e12),
    "mi300x": DeviceFigures("MI300X", 192e9, 5.3e12, 1307.4e12),
}
