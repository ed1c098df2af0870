"""A step's arrays as tensors of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.step import Step


@dataclass(frozen=True, slots=True)
class Batch:
    """What the layers of a model need of a Step: S sequences with T tokens, the `single` ones of one token first."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    slots: Tensor
    """[T] int64"""
    block_tables: Tensor
    """[S, most blocks of any] int32"""
    sampled: Tensor
    """[L] int64"""
    query_starts: NDArray[np.int32]
    """[S + 1], on the host: kernels are launched by it"""
    contexts: NDArray[np.int32]
    """[S], on the host"""
    query_starts_at: Tensor
    """[S + 1] int32: `query_starts` beside the other tensors"""
    contexts_at: Tensor
    """[S] int32"""
    single: int
    """Sequences, the first ones, that run a single token."""
    most_queries: int
    """Tokens of the sequence that runs the most."""
    most_context: int
    """Tokens of the longest context."""

    @classmethod
    def of(cls, step: Step, device: torch.device | str = "cpu") -> Batch:
        """Return `step` on `device`. On the CPU the tensors share the step's memory."""
        query_starts, contexts = step.query_starts.astype(np.int32), step.contexts.astype(np.int32)
        return cls(
            _on(step.token_ids, device),
            _on(step.positions, device),
            _on(step.slots, device),
            _on(step.block_tables, device),
            _on(step.sampled, device),
            query_starts,
            contexts,
            _on(query_starts, device),
            _on(contexts, device),
            step.single,
            int(np.diff(query_starts).max(initial=0)),
            int(contexts.max(initial=0)),
        )

    @property
    def tokens(self) -> int:
        """Return T."""
        return len(self.token_ids)

    @property
    def sequences(self) -> int:
        """Return S."""
        return len(self.contexts)


def _on(array: NDArray[np.int64] | NDArray[np.int32], device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
