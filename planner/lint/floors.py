"""The least time of an operator: bytes over peak bandwidth, FLOP over peak rate. All of one rank, in seconds."""

from __future__ import annotations

from functools import cache

import numpy as np

from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec

MEMORY, COMPUTE, LINK = "memory bandwidth", "FLOP rate", "link rate"
Floors = dict[str, np.ndarray]


def attention(model: ModelSpec, gpu: Gpu, tp: int, shape: tuple[np.ndarray, ...]) -> Floors:
    """Return the floors of one layer's attention over (chunk, cached by the chunk, decodes, context of each)."""

    @cache
    def flops(new: int, cached: int) -> float:
        return model.attention_flops(new, cached) / model.layers / tp

    @cache
    def kv_bytes(tokens: int) -> float:
        return sum(model.stage_kv_bytes(Layout(tp), tokens)) / model.layers

    rows = [tuple(int(v) for v in row) for row in np.nan_to_num(np.column_stack(shape)).tolist()]
    work = [(flops(c, p) if c else 0.0) + d * flops(1, max(k - 1, 0)) for c, p, d, k in rows]
    read = [(kv_bytes(p) if c and p else 0.0) + (d * kv_bytes(k) if d and k else 0.0) for c, p, d, k in rows]
    return {MEMORY: np.array(read) / gpu.memory_bytes_per_s, COMPUTE: np.array(work) / gpu.fp16_flop_per_s}


def product(
    inputs: float | np.ndarray, outputs: float | np.ndarray, tokens: np.ndarray, gpu: Gpu, width: float | np.ndarray
) -> Floors:
    """Return the floors of tokens x inputs by inputs x outputs: weights read once, a multiply and an add each."""
    flops = np.where(np.asarray(width) < 2, gpu.fp8_flop_per_s or gpu.fp16_flop_per_s, gpu.fp16_flop_per_s)
    read = np.broadcast_to(np.asarray(inputs * outputs * width / gpu.memory_bytes_per_s, dtype=float), tokens.shape)
    return {MEMORY: read.copy(), COMPUTE: 2.0 * tokens * inputs * outputs / flops}


def merge(rows: int, parts: list[tuple[np.ndarray, Floors]]) -> Floors:
    """Return floors over all rows out of floors over some rows each (index arrays)."""
    merged: Floors = {}
    for index, floors in parts:
        for limit, values in floors.items():
            merged.setdefault(limit, np.full(rows, np.nan))[index] = values
    return merged
