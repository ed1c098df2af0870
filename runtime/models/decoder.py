"""What all architectures share: token ids in, a stack of layers, logits out. A rank computes its stage's part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.attention.base import Attention
from runtime.batch import Batch
from runtime.layers.attention import Pass
from runtime.layers.norm import LayerNorm, RmsNorm
from runtime.layers.parallel import Embedding, Head
from runtime.layers.rope import Rope
from runtime.model_config import ModelConfig
from runtime.shard import Shard
from runtime.tensor_shapes import POSITION_OFFSET
from runtime.weights import Weights


class Layer(Protocol):
    """One block of the stack."""

    def __call__(self, hidden: torch.Tensor, kv_layer: torch.Tensor, on: Pass) -> torch.Tensor:
        """Return the hidden states [T, width] after the block."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What tells architectures apart: names in the checkpoint, and how to build a layer and the last norm."""

    layer: Callable[[ModelConfig, Shard, Weights, int, torch.device], Layer]
    norm: type[RmsNorm] | type[LayerNorm] = RmsNorm
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    """A table of learned positions; None: rotary ones."""
    final_norm: str = "model.norm"
    head: str = "lm_head"


class Decoder:
    """One rank's part of the model: `embed`, `run` and `logits` on what its stage holds."""

    def __init__(self, parts: Parts, config: ModelConfig, shard: Shard, weights: Weights, device: torch.device):
        self.config, self.shard = config, shard
        shape = (config.vocab_size, config.hidden_size)
        tied = config.tied_embeddings
        if shard.first or (shard.last and tied):
            self._embedding = Embedding(weights, parts.embedding, shape, shard, device)
        self._positions = self._position_table(parts, weights, device)
        self._rope = Rope(config, device) if parts.positions is None else None
        self._layers = [parts.layer(config, shard, weights, index, device) for index in shard.layers]
        if shard.last:
            self._norm = parts.norm(weights, parts.final_norm, config.hidden_size, config.norm_eps, device)
            matrix = (
                self._embedding.weight
                if tied
                else weights.take(f"{parts.head}.weight", shape, shard.cut(config.vocab_size)).to(device)
            )
            self._head = Head(matrix, config.vocab_size, shard)

    def _position_table(self, parts: Parts, weights: Weights, device: torch.device) -> torch.Tensor | None:
        if parts.positions is None or not self.shard.first:
            return None
        rows = self.config.max_positions + POSITION_OFFSET
        return weights.take(f"{parts.positions}.weight", (rows, self.config.hidden_size)).to(device)

    def embed(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states [T, width] that enter the first layer."""
        hidden = self._embedding(batch.token_ids)
        if self._positions is not None:
            hidden = hidden + self._positions[batch.positions + POSITION_OFFSET]
        return hidden

    def run(
        self,
        hidden: torch.Tensor,
        kv: torch.Tensor,
        batch: Batch,
        attention: Attention,
        ran: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Return the hidden states after this stage's layers; `kv` is [layers, 2, blocks, block_tokens, heads, dim].

        `ran` is told after each layer how many have run.
        """
        empty = hidden.new_empty(0)
        cos, sin = self._rope.at(batch.positions, hidden.dtype) if self._rope else (empty, empty)
        on = Pass(batch, attention, cos, sin)
        for index, (layer, kv_layer) in enumerate(zip(self._layers, kv, strict=True)):
            hidden = layer(hidden, kv_layer, on)
            if ran is not None:
                ran(index + 1)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [L, vocabulary] of the tokens at `rows` [L]."""
        return self._head(self._norm(hidden[rows]))
