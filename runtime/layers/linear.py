"""y = x W^T + b, where W stays in the order in which the CPU's matrix kernels read it.

A decode step multiplies a few rows by every weight of the model, so it takes the time that reading the weights takes;
with weights as they lie in a checkpoint oneDNN first copies them into blocks of its own, at every call. Packed once,
SmolLM2-135M in fp32 takes 27 ms instead of 54 ms for 16 rows, and no more than before for 512 rows
(docs/decisions/0019-cpu-speed.md), so the packed copy is the only one that is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_ROWS = 16
"""oneDNN chooses its blocks for so many rows: those chosen for 16 were the fastest, or as fast, for 1 to 512."""

_FEWEST_ROWS = 4
"""One to three rows take longer than four, whose kernel reads the weights as fast as memory gives them: decode steps of
SmolLM2 in fp32 on one core took 56, 63 and 52 ms, and take 51 (docs/decisions/0019-cpu-speed.md)."""


class Dense:
    """A matrix product with a weight [out, in] and an optional bias [out]. Hold on to `weight` and it costs twice."""

    __slots__ = ("_bias", "_packed", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out] for x [T, in]."""
        if self._packed:
            return self._product(x) if len(x) >= _FEWEST_ROWS else self._of_few(x)
        return functional.linear(x, self._weight, self._bias)

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", (), "")
        return y

    def _of_few(self, x: Tensor) -> Tensor:
        """Return the product for fewer rows than the kernels like."""
        rows = len(x)
        return self._product(functional.pad(x, (0, 0, 0, _FEWEST_ROWS - rows)))[:rows]


def can_pack(weight: Tensor) -> bool:
    """Return True when this build of torch, and this processor, multiply by packed weights of this type."""
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if not torch.backends.mkldnn.is_available() or weight.numel() == 0:
        return False
    match weight.dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False
