"""Where tensors come from: one protocol for safetensors, GGUF and random weights."""

from __future__ import annotations

from typing import Protocol

import torch


class Weights(Protocol):
    """Named tensors of a whole model, of which a rank takes its part. Names are those of Hugging Face checkpoints."""

    def __contains__(self, name: str) -> bool:
        """Return True when there is a tensor of that name."""
        ...

    def take(self, name: str, shape: tuple[int, ...], *part: slice) -> torch.Tensor:
        """Return `part` (one slice per dimension, all of it by default) of tensor `name`, contiguous, on the CPU.

        Its type is that which the engine computes in. Raises InputError that names the tensor when there is none, or
        when the whole of it is not of `shape`.
        """
        ...
