"""Rotary angles: the frequencies of each kind of rope scaling, and their table of cos and sin."""

import math

import torch
from torch import Tensor

from engine_svc.compute.model.config import RopeConfig


def cos_sin_table(
    rope: RopeConfig, head_dim: int, num_positions: int, frequency_factors: Tensor | None
) -> Tensor:
    """float32 [num_positions, head_dim]: at each position cos of its head_dim / 2 angles, then sin.

    `frequency_factors` [head_dim / 2], from GGUF files, divide the frequencies. Angles are products
    in float32, as the models were trained with.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    if frequency_factors is not None:
        frequencies = frequencies / frequency_factors
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, float32 [head_dim / 2]: theta^(-2i / head_dim), scaled by kind.

    `dynamic` (NTK) leaves them alone up to the length the model was trained for, beyond which they
    would depend on a sequence's length and so contradict keys already in the cache: the engine
    serves such a model up to that length.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _scale_llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _scale_yarn(frequencies, rope, head_dim)
    return frequencies


def _scale_llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended.

    Source: the rotary embedding of Meta's Llama 3.1 release.
    """
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(frequencies, rope.factor, kept.clamp(0, 1))


def _scale_yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """NTK-by-parts of YaRN (Peng et al., 2023, section 3.2), with the ramp over dimensions."""

    def dimension(num_turns: float) -> float:
        wavelengths = rope.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high > low else 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / width
    return _blend(frequencies, rope.factor, 1 - ramp.clamp(0, 1))


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    return frequencies / factor * (1 - kept) + frequencies * kept
