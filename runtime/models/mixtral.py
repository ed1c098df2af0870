"""Mixtral: Llama with a mixture of experts in place of each MLP (Jiang et al., 2024)."""

from __future__ import annotations

import torch

from runtime.layers.mlp import Mixture
from runtime.model_config import ModelConfig
from runtime.models.decoder import Parts
from runtime.models.llama import LlamaLayer
from runtime.shard import Shard
from runtime.weights import Weights


class MixtralLayer(LlamaLayer):
    """A Llama layer with a mixture."""

    def _feed_forward(self, config: ModelConfig, shard: Shard, weights: Weights, prefix: str, device: torch.device):
        moe = f"{prefix}.block_sparse_moe"
        each = [f"{moe}.experts.{index}" for index in range(config.experts)]
        experts = [(f"{expert}.w1", f"{expert}.w3", f"{expert}.w2") for expert in each]
        return Mixture(config, shard, weights, f"{moe}.gate", experts, device)


PARTS = Parts(MixtralLayer)
