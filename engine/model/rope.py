"""Rotary position embedding (https://arxiv.org/abs/2104.09864) in Hugging Face's half layout.

Angles are computed in fp32, as the checkpoints' own training code does: at long positions an
exact angle would differ from the one that the model learned.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.config import ModelConfig


class RopeAngles(NamedTuple):
    """cos and signed sin of one step's positions: [T, 1, head_dim] each, fp32."""

    cos: Tensor
    sin: Tensor  # negated in the first half


class Rope:
    """cos and sin of every position of the context, computed once: [context, head_dim] fp32.

    `sin` is negated in the first half.
    """

    def __init__(self, config: ModelConfig, divisors: Tensor | None = None) -> None:
        """`divisors`: [head_dim / 2] fp32, of the frequencies, where the checkpoint lists them."""
        positions = torch.arange(config.context_length, dtype=torch.float32)
        frequencies = inverse_frequencies(config)
        if divisors is not None:
            frequencies = frequencies / divisors
        angles = torch.outer(positions, frequencies)  # [context, head_dim / 2]
        amplitude = config.rope_scaling.amplitude
        cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
        self.cos = torch.cat((cos, cos), dim=-1)
        self.sin = torch.cat((-sin, sin), dim=-1)

    def at(self, positions: Tensor) -> RopeAngles:
        """`positions`: [T] int64."""
        return RopeAngles(
            self.cos.index_select(0, positions).unsqueeze(1),
            self.sin.index_select(0, positions).unsqueeze(1),
        )


def rotate(x: Tensor, angles: RopeAngles) -> Tensor:
    """Rotates every head of x: [T, heads, head_dim]; a new contiguous tensor."""
    return torch.roll(x, x.shape[-1] // 2, dims=-1).mul_(angles.sin).add_(x * angles.cos)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[head_dim / 2] fp32 radians per position, after the checkpoint's rope scaling."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequency = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "llama3":
        # long wavelengths are stretched by the factor, short ones kept, those between blended
        wavelength = 2 * math.pi / frequency
        turns = scaling.original_context / wavelength
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
        return kept * frequency + (1.0 - kept) * frequency / scaling.factor
    if scaling.kind == "yarn":
        stretched = _yarn_ramp(config)
        return (1.0 - stretched) * frequency + stretched * frequency / scaling.factor
    return frequency


def _yarn_ramp(config: ModelConfig) -> Tensor:
    """How much of each frequency is stretched, 0 to 1: [head_dim / 2] fp32.

    Frequencies that turn more than `beta_fast` times over the original context are kept, those
    that turn less than `beta_slow` times stretched (https://arxiv.org/abs/2309.00071).
    """
    scaling, half = config.rope_scaling, config.head_dim // 2

    def index_of(turns: float) -> float:
        span = math.log(scaling.original_context / (turns * 2 * math.pi))
        return half * span / math.log(config.rope_theta)

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.whole_corrections:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low or 0.001  # as the reference does where both are one
    return ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
