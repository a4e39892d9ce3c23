"""How far the numbers of sampling may go, in requests and in models' files."""

from typing import Final

# Devices compute in float32. Where temperatures and penalties are within these, what they make of
# logits is finite there; beyond, it may not be, or they themselves are infinite, or 0.
LARGEST: Final = 1e30
SMALLEST_DIVISOR: Final = 1e-30
