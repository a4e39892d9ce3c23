"""Groups of 32 codes and their scales, out of the words that they are packed in (packed_weight.py),
in the registers of a program."""

import triton
import triton.language as tl


@triton.jit
def half_float(words):
    """The float16 in the low halves of words, as float32."""
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def group_scale(words, padded_outputs, group, FORMAT: tl.constexpr):
    """Scale and minimum, float32, of a step's group `group`.

    words: where the step's first scales of these outputs are.
    """
    if FORMAT == "q4_minimum":
        pair = tl.load(words + group * padded_outputs)
        scale = half_float(pair)
        minimum = half_float(pair >> 16)
    else:
        pair = tl.load(words + group // 2 * padded_outputs) >> (16 * (group % 2))
        if FORMAT == "q4_wide":
            of_step = tl.load(words + 4 * padded_outputs)
            scale = half_float(of_step) * (pair & 0xFF).to(tl.float32)
            minimum = half_float(of_step >> 16) * -(pair >> 8 & 0xFF).to(tl.float32)
        else:
            scale = half_float(pair)
            minimum = -8.0 * scale
    return scale, minimum


@triton.jit
def four_bit_numbers(words, group: tl.constexpr):
    """Codes of a group as the bfloat16 numbers 128 + q [outputs, 32]; words [outputs, 16]."""
    pairs = ((words >> 4 * (group % 4)) & 0x000F000F) | 0x43004300
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), (words.shape[0], 32))


@triton.jit
def eight_bit_numbers(words, group: tl.constexpr, FORMAT: tl.constexpr):
    """Codes of a group as float32 numbers [outputs, 32]; words [outputs, 32]."""
    if FORMAT == "int8":
        # 2²³ + 128 + q, since codes are stored with 128 added.
        shifted = ((words >> 8 * group) & 0xFF) | 0x4B000000
        numbers = shifted.to(tl.float32, bitcast=True) - 8388736.0
    else:
        codes = (words >> 8 * group).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        numbers = codes.to(tl.float16).to(tl.float32)
    return numbers
