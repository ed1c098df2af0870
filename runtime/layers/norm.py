"""Normalisation of hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.layers.fused import rms_norm
from runtime.weights import Weights


class RmsNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float, device: torch.device):
        self.weight = weights.take(f"{name}.weight", (width,)).to(device)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm:
    """(x - mean) / deviation * weight + bias over the last dimension."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float, device: torch.device):
        self.weight = weights.take(f"{name}.weight", (width,)).to(device)
        self.bias = weights.take(f"{name}.bias", (width,)).to(device)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
