"""What happens to hidden states between two matrix products: on CPUs one compiled pass each, elsewhere torch's.

A decode step of SmolLM2 makes 480 of torch's small operations, most of their time spent on the way to the arithmetic.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import types
from torch import Tensor

from runtime.compiled import INSIDE, NUMBERS, compiled, exp, numbers, store, to_float, use_threads

_F32 = np.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, x [..., width]."""
    if not _compiles(x) or weight.dtype != x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    _run("rms_norm", rows, weight, eps, out)
    return out.view(x.shape)


def silu_and_multiply(x: Tensor) -> Tensor:
    """Return silu(a) * b [T, width] for x [T, 2 * width], a the first half of each row, b the second."""
    if not _compiles(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    out = x.new_empty(len(x), x.shape[1] // 2)
    _run("silu_and_multiply", x.contiguous(), out)
    return out


def rotate(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, all heads, head_dim], the first `heads` of it turned in place by cos and sin [T, 1, head_dim / 2].

    Number i of the first half of a head is paired with i of the second (Su et al., 2021).
    """
    if _compiles(x) and x.is_contiguous() and cos.dtype == x.dtype:
        _run("rotate", x, heads, cos, sin)
        return x
    left, right = x[:, :heads].chunk(2, -1)
    x[:, :heads] = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
    return x


def _compiles(x: Tensor) -> bool:
    return x.dtype in NUMBERS and x.device.type == "cpu"


def _run(name: str, x: Tensor, *arguments: Any) -> None:
    use_threads(x.numel())
    _kernel(name, x.dtype)(numbers(x), *(numbers(it) if isinstance(it, Tensor) else it for it in arguments))


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any:
    number = NUMBERS[dtype]
    vector, matrix, cube = (types.Array(number, dimensions, "C") for dimensions in (1, 2, 3))
    match name:
        case "rms_norm":
            return compiled(_rms_norm, types.void(matrix, vector, types.float32, matrix))
        case "silu_and_multiply":
            return compiled(_silu_and_multiply, types.void(matrix, matrix))
        case _:
            return compiled(_rotate, types.void(cube, types.int64, cube, cube))


# ---- compiled


@numba.njit(**INSIDE)
def _norm_row(x: Any, weight: Any, eps: Any, out: Any, row: Any) -> None:
    total, width = _F32(0), x.shape[1]
    for i in range(width):
        total += to_float(x[row, i]) * to_float(x[row, i])
    scale = _F32(1) / np.sqrt(total / _F32(width) + eps)
    for i in range(width):
        store(out, row, i, to_float(x[row, i]) * scale * to_float(weight[i]))


def _rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    for row in numba.prange(len(x)):
        _norm_row(x, weight, eps, out, row)


@numba.njit(**INSIDE)
def _gate_row(x: Any, out: Any, row: Any) -> None:
    width = out.shape[1]
    for i in range(width):
        gate = to_float(x[row, i])
        small = exp(-abs(gate))
        share = (_F32(1) if gate >= _F32(0) else small) / (_F32(1) + small)
        store(out, row, i, gate * share * to_float(x[row, width + i]))


def _silu_and_multiply(x: Any, out: Any) -> None:
    for row in numba.prange(len(x)):
        _gate_row(x, out, row)


@numba.njit(**INSIDE)
def _turn_row(x: Any, heads: Any, cos: Any, sin: Any, row: Any) -> None:
    half = cos.shape[2]
    for head in range(heads):
        for i in range(half):
            c, s = to_float(cos[row, 0, i]), to_float(sin[row, 0, i])
            left, right = to_float(x[row, head, i]), to_float(x[row, head, half + i])
            store(x[row], head, i, left * c - right * s)
            store(x[row], head, half + i, right * c + left * s)


def _rotate(x: Any, heads: Any, cos: Any, sin: Any) -> None:
    for row in numba.prange(len(x)):
        _turn_row(x, heads, cos, sin, row)
