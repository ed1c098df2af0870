"""OPT: learned positions, layer norms before each block, biases everywhere (Zhang et al., 2022)."""

from __future__ import annotations

import torch

from runtime.layers.attention import Pass, SelfAttention
from runtime.layers.mlp import PlainMlp
from runtime.layers.norm import LayerNorm
from runtime.model_config import ModelConfig
from runtime.models.decoder import Parts
from runtime.shard import Shard
from runtime.weights import Weights


class OptLayer:
    """h + attention(norm(h)), then h + mlp(norm(h))."""

    def __init__(self, config: ModelConfig, shard: Shard, weights: Weights, index: int, device: torch.device):
        prefix = f"model.decoder.layers.{index}"
        width, eps = config.hidden_size, config.norm_eps
        self._before = LayerNorm(weights, f"{prefix}.self_attn_layer_norm", width, eps, device)
        self._attention = SelfAttention(config, shard, weights, f"{prefix}.self_attn", device, output="out_proj")
        self._between = LayerNorm(weights, f"{prefix}.final_layer_norm", width, eps, device)
        self._mlp = PlainMlp(config, shard, weights, prefix, device)

    def __call__(self, hidden: torch.Tensor, kv_layer: torch.Tensor, on: Pass) -> torch.Tensor:
        hidden = hidden + self._attention(self._before(hidden), kv_layer, on)
        return hidden + self._mlp(self._between(hidden))


PARTS = Parts(
    OptLayer,
    norm=LayerNorm,
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
)
