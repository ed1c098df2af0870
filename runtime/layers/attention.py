"""Multi-head attention of one layer on one rank: project, turn, attend through the block tables, project back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.attention.base import Attention
from runtime.batch import Batch
from runtime.layers.fused import rotate
from runtime.layers.norm import RmsNorm
from runtime.layers.parallel import ByInput, Source, by_output
from runtime.model_config import ModelConfig
from runtime.shard import Shard
from runtime.weights import Weights


@dataclass(frozen=True, slots=True)
class Pass:
    """What every layer of one forward pass needs."""

    batch: Batch
    attention: Attention
    cos: torch.Tensor
    """[T, 1, head_dim / 2], of each token's position; empty for models with learned positions."""
    sin: torch.Tensor


class SelfAttention:
    """Hidden states [T, width] -> [T, width], with grouped queries (Ainslie et al., 2023)."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        weights: Weights,
        prefix: str,
        device: torch.device,
        *,
        output: str = "o_proj",
    ):
        self._dim = config.head_dim
        queries, keys = shard.heads(config), shard.kv_heads(config)
        self._heads, self._kv_heads = queries.stop - queries.start, keys.stop - keys.start
        inner, outer = config.heads * self._dim, config.kv_heads * self._dim
        sources = [
            Source(f"{prefix}.q_proj", inner, self._rows(queries)),
            Source(f"{prefix}.k_proj", outer, self._rows(keys)),
            Source(f"{prefix}.v_proj", outer, self._rows(keys)),
        ]
        self._qkv = by_output(weights, sources, config.hidden_size, device, bias=config.attention_bias)
        self._out = ByInput(
            weights,
            f"{prefix}.{output}",
            (config.hidden_size, inner),
            self._rows(queries),
            shard,
            device,
            bias=config.output_bias,
        )
        self._norms = [
            RmsNorm(weights, f"{prefix}.{name}", self._dim, config.norm_eps, device)
            for name in ("q_norm", "k_norm")
            if config.qk_norm
        ]

    def _rows(self, heads: slice) -> slice:
        return slice(heads.start * self._dim, heads.stop * self._dim)

    def __call__(self, x: torch.Tensor, kv_layer: torch.Tensor, on: Pass) -> torch.Tensor:
        heads = self._qkv(x).view(len(x), -1, self._dim)
        for norm, part in zip(
            self._norms, (heads[:, : self._heads], heads[:, self._heads : -self._kv_heads]), strict=False
        ):
            part.copy_(norm(part))
        if on.cos.numel():
            rotate(heads, self._heads + self._kv_heads, on.cos, on.sin)
        q, k, v = heads.split([self._heads, self._kv_heads, self._kv_heads], 1)
        mixed = on.attention(q, k, v, kv_layer, on.batch)
        return self._out(mixed.reshape(len(x), -1))
