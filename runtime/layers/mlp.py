"""Feed-forward blocks: gated, plain, and mixtures of gated experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.layers.fused import silu_and_multiply
from runtime.layers.linear import Dense
from runtime.layers.parallel import ByInput, Source, by_output
from runtime.model_config import ModelConfig
from runtime.shard import Shard
from runtime.weights import Weights


class GatedMlp:
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020); `names` are those of gate, up and down."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        weights: Weights,
        names: tuple[str, str, str],
        device: torch.device,
    ):
        width, mine = config.intermediate_size, shard.cut(config.intermediate_size)
        sources = [Source(name, width, mine) for name in names[:2]]
        self._up = by_output(weights, sources, config.hidden_size, device, bias=config.mlp_bias)
        shape = (config.hidden_size, width)
        self._down = ByInput(weights, names[2], shape, mine, shard, device, bias=config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(silu_and_multiply(self._up(x)))


class PlainMlp:
    """fc2(relu(fc1(x))), both with biases (OPT)."""

    def __init__(self, config: ModelConfig, shard: Shard, weights: Weights, prefix: str, device: torch.device):
        width, mine = config.intermediate_size, shard.cut(config.intermediate_size)
        self._up = by_output(
            weights, [Source(f"{prefix}.fc1", width, mine)], config.hidden_size, device, bias=config.mlp_bias
        )
        shape = (config.hidden_size, width)
        self._down = ByInput(weights, f"{prefix}.fc2", shape, mine, shard, device, bias=config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(F.relu(self._up(x)))


class Mixture:
    """The sum of the likeliest experts of each token, weighted by the router (Mixtral, Jiang et al. 2024, section 2.1).

    Every rank holds a part of every expert, and the parts are summed once for all of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        weights: Weights,
        router: str,
        experts: list[tuple[str, str, str]],
        device: torch.device,
    ):
        self._router = Dense(weights.take(f"{router}.weight", (config.experts, config.hidden_size)).to(device))
        alone = Shard(shard.layers, shard.all_layers, shard.tp, shard.tp_rank)  # without a group: nothing is summed yet
        self._experts = [GatedMlp(config, alone, weights, names, device) for names in experts]
        self._chosen, self._normalised, self._shard = config.experts_per_token, config.norm_expert_weights, shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = F.softmax(self._router(x), -1, dtype=torch.float32)
        shares, chosen = scores.topk(self._chosen, -1)
        if self._normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        mixed = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            tokens, place = (chosen == index).nonzero(as_tuple=True)
            part = self._experts[index](x[tokens]) * shares[tokens, place, None]
            mixed.index_add_(0, tokens, part.to(x.dtype))
        return self._shard.sum(mixed)
