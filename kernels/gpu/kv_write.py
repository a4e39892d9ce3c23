"""How heads are written to the paged KV cache: as they are, or in eight bits with their scale.

fp8 is encoded by integer arithmetic, so that it is the same bits on every device, with and without
a conversion of its own: those of round-to-nearest-even, as `Tensor.to(torch.float8_e4m3fn)` gives.
"""

import triton
import triton.language as tl


@triton.jit
def write_heads(
    cache,
    scales,
    cells,
    in_heads,
    a,
    b,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Writes halves a and b, float32 [heads, BLOCK], of the heads at int64 `cells` [heads, 1].

    A cell is slot · kv_heads + head; `in_heads` [heads, 1] says which are no padding. LARGEST is
    the largest magnitude of the format: 448 for fp8, whose cache is of uint8, 127 for int8, 0 where
    there are no scales. In eight bits a head with a NaN has a scale of NaN: a fault is not to look
    like a value.
    """
    dims = tl.arange(0, BLOCK)[None, :]
    mask = in_heads & (dims < HALF)
    places = cache + cells * (2 * HALF) + dims
    if LARGEST == 0.0:
        tl.store(places, a.to(cache.dtype.element_ty), mask=mask)
        tl.store(places + HALF, b.to(cache.dtype.element_ty), mask=mask)
    else:
        # As integers magnitudes have the same order, and NaN is the largest.
        magnitudes = tl.maximum(_magnitude_bits(a), _magnitude_bits(b))
        amax = tl.max(magnitudes, axis=1)[:, None].to(tl.float32, bitcast=True)
        # What is smaller counts as zero: its scale could not be inverted.
        scale = tl.where(amax <= 1e-30, 1.0, amax / LARGEST)
        tl.store(scales + cells, scale, mask=in_heads)
        inverse = 1.0 / scale
        tl.store(places, _encoded(a * inverse, LARGEST), mask=mask)
        tl.store(places + HALF, _encoded(b * inverse, LARGEST), mask=mask)


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _encoded(x, LARGEST: tl.constexpr):
    return _e4m3(x) if LARGEST == 448.0 else _int8(x)


@triton.jit
def _int8(x):
    """The nearest integers, even ones at ties, of |x| <= 127."""
    # Adding 3 · 2²² leaves a float no bits for fractions: the integer stands in its low bits.
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def _e4m3(x):
    """The nearest e4m3 values, even ones at ties, of |x| <= 448, as bits; above 464 NaN."""
    bits = tl.minimum(_magnitude_bits(x), 0x7F000000)
    # Four exponent and three mantissa bits are a float's upper ones but for the exponent's bias,
    # 127 in place of 7. A carry from the mantissa into the exponent is as it should be.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 values are multiples of 2^-9, the last place of floats from 2^14 on.
    magnitude = bits.to(tl.float32, bitcast=True)
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(magnitude < 0.015625, subnormal, normal), 0x7F)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
