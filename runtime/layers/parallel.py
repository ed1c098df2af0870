"""Matrices cut over tensor-parallel ranks: by output, by input, or over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.layers.linear import Dense
from runtime.shard import Shard
from runtime.weights import Weights


@dataclass(frozen=True, slots=True)
class Source:
    """A matrix of a checkpoint, [outputs, inputs], and the rows of it that this rank takes."""

    name: str
    outputs: int
    rows: slice


def by_output(
    weights: Weights, sources: Sequence[Source], inputs: int, device: torch.device, *, bias: bool = False
) -> Dense:
    """Return [T, inputs] -> [T, this rank's outputs]: the rows of all `sources`, below each other."""
    matrix = [weights.take(f"{it.name}.weight", (it.outputs, inputs), it.rows) for it in sources]
    added = [weights.take(f"{it.name}.bias", (it.outputs,), it.rows) for it in sources] if bias else []
    return Dense(torch.cat(matrix).to(device), torch.cat(added).to(device) if bias else None)


class ByInput:
    """[T, this rank's inputs] -> [T, outputs], summed over the ranks. The bias is added once, on rank 0."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        shape: tuple[int, int],
        columns: slice,
        shard: Shard,
        device: torch.device,
        *,
        bias: bool = False,
    ):
        matrix = weights.take(f"{name}.weight", shape, slice(None), columns).to(device)
        added = weights.take(f"{name}.bias", shape[:1]).to(device) if bias and shard.tp_rank == 0 else None
        self._dense, self._shard = Dense(matrix, added), shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._shard.sum(self._dense(x))


class Embedding:
    """Token ids [T] -> hidden states [T, width]; each rank holds some rows and the others' tokens add nothing."""

    def __init__(self, weights: Weights, name: str, shape: tuple[int, int], shard: Shard, device: torch.device):
        self._rows, self._shard = shard.cut(shape[0]), shard
        self.weight = weights.take(f"{name}.weight", shape, self._rows).to(device)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._shard.tp == 1:
            return self.weight[token_ids]
        here = (token_ids >= self._rows.start) & (token_ids < self._rows.stop)
        local = torch.where(here, token_ids - self._rows.start, 0)
        return self._shard.sum(self.weight[local] * here.unsqueeze(1))


class Head:
    """Hidden states [L, width] -> logits [L, vocabulary], on every rank of the stage."""

    def __init__(self, matrix: torch.Tensor, vocabulary: int, shard: Shard):
        self._dense, self._vocabulary, self._shard = Dense(matrix), vocabulary, shard

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._shard.gather(self._dense(hidden), self._vocabulary)
