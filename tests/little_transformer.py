"""A transformer of a few lines of torch, to be profiled where the engine is not the point: real kernels, real times."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from planner.specs.model import ModelSpec
from profiler.setting import Setting
from profiler.subject import Limits

LITTLE = ModelSpec(
    name="little",
    layers=4,
    hidden_size=128,
    intermediate_size=384,
    heads=4,
    kv_heads=2,
    vocab_size=512,
    max_positions=1024,
    dtype="float32",
)


@dataclass(slots=True)
class _Placed:
    hidden: torch.Tensor
    kv: list[tuple[torch.Tensor, torch.Tensor]]


class LittleTransformer:
    """A `Subject`: equal requests in one batch, KV in plain tensors."""

    kv_tokens = 16384
    process_ids = (os.getpid(),)

    def __init__(self, model: ModelSpec = LITTLE, max_requests: int = 8, max_step_tokens: int = 1024):
        torch.manual_seed(0)
        self.limits = Limits(1024, 16, model.max_positions or 1024, max_requests, max_step_tokens)
        self._model = model
        hidden, wide = model.hidden_size, model.intermediate_size or 1
        kv = model.kv_heads * (model.head_dim or 1)
        self._layers = [
            [torch.randn(rows, columns) / columns**0.5 for rows, columns in shapes]
            for shapes in [[(hidden + 2 * kv, hidden), (hidden, hidden), (wide, hidden), (hidden, wide)]] * model.layers
        ]
        self._head = torch.randn(model.vocab_size, hidden)
        self._placed: list[_Placed] = []
        self.steps = 0

    def place(self, setting: Setting) -> None:
        self._placed = []
        if setting.prefills:
            self._placed.append(self._requests(setting.prefills, setting.new_tokens, setting.cached_tokens))
        if setting.decodes:
            self._placed.append(self._requests(setting.decodes, 1, setting.context_tokens - 1))

    def _requests(self, batch: int, new: int, cached: int) -> _Placed:
        model = self._model
        shape = (batch, model.kv_heads, cached, model.head_dim or 1)
        kv = [(torch.randn(shape), torch.randn(shape)) for _ in range(model.layers)]
        return _Placed(torch.randn(batch, new, model.hidden_size), kv)

    @torch.inference_mode()
    def step(self) -> float | None:
        self.steps += 1
        for placed in self._placed:
            hidden = placed.hidden
            for weights, kv in zip(self._layers, placed.kv, strict=True):
                hidden = self._layer(hidden, weights, kv)
            (hidden[:, -1] @ self._head.T).argmax(-1).tolist()
        return None

    def _layer(
        self, x: torch.Tensor, weights: list[torch.Tensor], kv: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        model, (batch, new, hidden) = self._model, x.shape
        width = model.head_dim or 1
        q, k, v = F.linear(x, weights[0]).split([hidden, model.kv_heads * width, model.kv_heads * width], -1)
        q, k, v = (part.view(batch, new, -1, width).transpose(1, 2) for part in (q, k, v))
        k, v = torch.cat([kv[0], k], 2), torch.cat([kv[1], v], 2)
        mask = torch.ones(new, k.shape[2], dtype=torch.bool).tril(k.shape[2] - new)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, new, hidden), weights[1])
        return x + F.linear(F.silu(F.linear(F.rms_norm(x, (hidden,)), weights[2])), weights[3])

    def close(self) -> None:
        self._placed = []
