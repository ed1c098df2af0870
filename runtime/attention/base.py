"""The protocol of attention backends, and which one serves a setting.

A backend joins by one file with a function `reason(setting)` and a class, and by one line in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from planner.errors import InputError
from runtime.batch import Batch


class Attention(Protocol):
    """Causal attention of a step's tokens to their own sequences, keys and values kept in blocks."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        """Return [T, heads, head_dim]: softmax(q k^T / sqrt(head_dim)) v, after writing k and v to the batch's slots.

        q [T, heads, head_dim], k and v [T, kv_heads, head_dim], kv [2, blocks, block_tokens, kv_heads, head_dim]: keys
        and values of one layer. Head h reads KV head h // (heads // kv_heads) (GQA: Ainslie et al., EMNLP '23).
        """
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What a backend has to know of one rank before the first step."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int


BACKENDS = ("paged_numba", "varlen", "sdpa")
"""Modules of this package, the one to prefer first; the last one fits everywhere."""


def choose(setting: Setting, name: str = "auto") -> Attention:
    """Return the backend `name`, or the first one that fits. Raises InputError that says why a named one does not."""
    if name == "auto":
        name = next(each for each in BACKENDS if reason_against(setting, each) is None)
    against = reason_against(setting, name)
    if against is not None:
        raise InputError(f"attention backend {name}: {against}; use another of {', '.join(BACKENDS)}, or auto")
    build: Callable[[Setting], Attention] = import_module(f"runtime.attention.{name}").build
    return build(setting)


def reason_against(setting: Setting, name: str) -> str | None:
    """Return why backend `name` cannot serve `setting`, or None when it can."""
    if name not in BACKENDS:
        raise InputError(f"attention backend: expected auto or one of {', '.join(BACKENDS)}, got {name!r}")
    reason: Callable[[Setting], str | None] = import_module(f"runtime.attention.{name}").reason_against
    return reason(setting)


def write_kv(kv: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Put keys and values k, v [T, kv_heads, head_dim] into `slots` [T] of one layer's blocks."""
    keys, values = kv.flatten(1, 2)
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)
