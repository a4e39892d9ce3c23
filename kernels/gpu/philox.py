"""The sampler's noise on the GPU: Philox's bits, and the Gumbel numbers of kernels/noise.py.

Noise costs two logarithms in float64, which only the few tokens that may win are worth: for all
others an upper bound is enough, made of a token's bits by a few float32 operations.
"""

import math

import triton
import triton.language as tl

# The bits of √½ as a float64: m lies in [√½, √2) below.
_SQRT_HALF = tl.constexpr(0x3FE6A09E667F3BCD)
# Of ln 2; the upper part has trailing zeros, so that its product with an exponent is exact.
_LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e42fefa3800p-1"))
_LN2_LOW = tl.constexpr(float.fromhex("0x1.ef35793c76730p-45"))
# -ln(n / 2^24) is at most the bits of the float n, read as an integer, times this, plus that.
_STRAIGHT_LOG_SCALE = tl.constexpr(-math.log(2) / 2**23)
_STRAIGHT_LOG_OF_ZERO = tl.constexpr((127 + 24) * math.log(2))


@triton.jit
def natural_log(x):
    """ln x of positive, normal float64, to 4e-16 of it, by single IEEE operations.

    x = 2^k · m with m next to 1, and ln m = 2 artanh(s) = 2 (s + s³/3 + s⁵/5 + …) with
    s = (m - 1) / (m + 1), |s| < 0.172; as the CPU's native sampler has it.
    """
    bits = x.to(tl.int64, bitcast=True)
    k = (bits - _SQRT_HALF) >> 52
    m = (bits - (k << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * (1.0 / 23.0) + 1.0 / 21.0
    for odd in tl.static_range(19, 2, -2):
        series = series * z + 1.0 / odd
    ln_m = 2.0 * s + 2.0 * s * (z * series)
    turns = k.to(tl.float64)
    return turns * _LN2_HIGH + (turns * _LN2_LOW + ln_m)


@triton.jit
def gumbel(bits):
    """-ln(-ln(1 - v)) with v = (bits + ½) / 2³², float32 of uint32.

    The same float32 as kernels/noise.py gives unless the exact value lies within 1e-8 of the middle
    of two. v and 1 - v are exact: they have 33 bits.
    """
    v = (bits.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return (-natural_log(-natural_log(1.0 - v))).to(tl.float32)


@triton.jit
def noise_bound(bits):
    """At least gumbel(bits), but for rounding, and little more where that is large; float32.

    Noise is at most -ln v, since -ln(1 - v) >= v; and a float's bits, read as an integer, are its
    logarithm with straight lines between the powers of two, which lie below the curve.
    """
    # A float holds the 24 upper bits exactly, and v is no less.
    upper = (bits >> 8).to(tl.int32).to(tl.float32)
    logarithm = upper.to(tl.int32, bitcast=True).to(tl.float32)
    return logarithm * _STRAIGHT_LOG_SCALE + _STRAIGHT_LOG_OF_ZERO


@triton.jit
def bits_from(first_token_id, seed, position, SIZE: tl.constexpr):
    """The bits of the tokens from first_token_id on, a multiple of 4; uint32 [SIZE].

    Those of token t are word t mod 4 of Philox4x32-10 with counter (t div 4, position, 0, 0) and
    key (low, high half of the seed) (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011).
    """
    groups = first_token_id // 4 + tl.arange(0, SIZE // 4)
    word0, word1, word2, word3 = tl.philox(seed, groups, position.to(tl.uint32), 0, 0)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    return tl.reshape(words, [SIZE])


@triton.jit
def bits_of(token_ids, seed, position):
    """The bits of any tokens, int32 -> uint32."""
    word0, word1, word2, word3 = tl.philox(seed, token_ids >> 2, position.to(tl.uint32), 0, 0)
    word = token_ids & 3
    return tl.where(word < 2, tl.where(word == 0, word0, word1), tl.where(word == 2, word2, word3))
