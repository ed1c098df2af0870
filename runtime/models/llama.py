"""Llama, and those built alike: Llama 2 and 3, SmolLM2, Mistral (Touvron et al., 2023)."""

from __future__ import annotations

import torch

from runtime.layers.attention import Pass, SelfAttention
from runtime.layers.mlp import GatedMlp
from runtime.layers.norm import RmsNorm
from runtime.model_config import ModelConfig
from runtime.models.decoder import Parts
from runtime.shard import Shard
from runtime.weights import Weights


class LlamaLayer:
    """h + attention(norm(h)), then h + mlp(norm(h))."""

    def __init__(self, config: ModelConfig, shard: Shard, weights: Weights, index: int, device: torch.device):
        prefix = f"model.layers.{index}"
        width, eps = config.hidden_size, config.norm_eps
        self._before = RmsNorm(weights, f"{prefix}.input_layernorm", width, eps, device)
        self._attention = SelfAttention(config, shard, weights, f"{prefix}.self_attn", device)
        self._between = RmsNorm(weights, f"{prefix}.post_attention_layernorm", width, eps, device)
        self._mlp = self._feed_forward(config, shard, weights, prefix, device)

    def _feed_forward(self, config: ModelConfig, shard: Shard, weights: Weights, prefix: str, device: torch.device):
        gate, up, down = (f"{prefix}.mlp.{name}_proj" for name in ("gate", "up", "down"))
        return GatedMlp(config, shard, weights, (gate, up, down), device)

    def __call__(self, hidden: torch.Tensor, kv_layer: torch.Tensor, on: Pass) -> torch.Tensor:
        hidden = hidden + self._attention(self._before(hidden), kv_layer, on)
        return hidden + self._mlp(self._between(hidden))


PARTS = Parts(LlamaLayer)
