"""Rotary position embeddings (Su et al., 2021): each pair of numbers of a head is turned by position * frequency."""

from __future__ import annotations

import math

import torch

from runtime.model_config import ModelConfig, RopeScaling


class Rope:
    """Cosines and sines of every position, [positions, head_dim / 2], in float32."""

    def __init__(self, config: ModelConfig, device: torch.device):
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = _scaled(1.0 / config.rope_theta**exponents, config.rope_scaling)
        angles = torch.outer(torch.arange(config.max_positions).float(), frequencies)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin for tokens at `positions` [T], each [T, 1, head_dim / 2]."""
        return self.cos[positions].unsqueeze(1).to(dtype), self.sin[positions].unsqueeze(1).to(dtype)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    waves = scaling.original_positions * frequencies / (2 * math.pi)  # turns within the original positions
    share = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)  # 0: long waves, slowed down by the factor; 1: short ones, kept
    return frequencies * (share + (1 - share) / scaling.factor)
