"""Attention on NVIDIA GPUs: torch's own FlashAttention over sequences of different lengths, reading KV blocks in place.

FlashAttention-2 (Dao, ICLR '24). Its paged kernel, as bundled with torch, wants blocks of a multiple of 256 tokens
unless the GPU has the third version; what this build of torch and this GPU take is found out by a trial. With another
block size the blocks of a step are gathered into one piece per step, which costs one more reading of its KV.

Splitting a long context over processors is off (num_splits=1): a sequence's result stays the same whatever runs beside.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.attention.base import Setting, write_kv
from runtime.batch import Batch

_TYPES = (torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256
_OLDEST_GPU = (8, 0)
"""FlashAttention-2 needs tensor cores that take bfloat16: Ampere."""


def reason_against(setting: Setting) -> str | None:
    """Return why it cannot serve `setting`, or None when it can."""
    if setting.device.type != "cuda":
        return f"it runs on CUDA devices, not on {setting.device.type}"
    if setting.dtype not in _TYPES:
        return f"it takes float16 and bfloat16, not {str(setting.dtype).removeprefix('torch.')}"
    if setting.head_dim > _WIDEST_HEAD or setting.head_dim % 8:
        return f"it takes a head_dim up to {_WIDEST_HEAD} that is a multiple of 8, not {setting.head_dim}"
    if torch.cuda.get_device_capability(setting.device) < _OLDEST_GPU:
        return f"{torch.cuda.get_device_name(setting.device)} is older than it needs"
    if _kernel() is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    return None


def build(setting: Setting) -> Varlen:
    """Return the backend; runs it once to learn whether it can read blocks of this size."""
    return Varlen(setting)


class Varlen:
    """See the module."""

    def __init__(self, setting: Setting):
        self._in_place = _reads_blocks(setting)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        """Return [T, heads, head_dim]; the protocol is runtime.attention.base.Attention's."""
        write_kv(kv, k, v, batch.slots)
        return _paged(q, kv, batch) if self._in_place else _gathered(q, kv, batch)


@cache
def _kernel() -> Any:
    """Return torch's varlen_attn, or None where this torch has none that knows grouped queries."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


def _paged(q: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    keys, values = kv
    return _attend(
        q, keys, values, batch, starts=None, seqused_k=batch.contexts_at, block_table=batch.block_tables, num_splits=1
    )


def _gathered(q: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    """Return the same from keys and values of all contexts one behind the other."""
    block_tokens = kv.shape[2]
    contexts = batch.contexts_at.long()
    starts = torch.nn.functional.pad(contexts.cumsum(0), (1, 0))
    total = int(batch.contexts.sum())
    sequence = torch.repeat_interleave(contexts, output_size=total)  # 0 for its first sequence's tokens, and so on
    place = torch.arange(total, device=q.device) - starts[sequence]
    slots = batch.block_tables[sequence, place // block_tokens].long() * block_tokens + place % block_tokens
    keys, values = kv.flatten(1, 2)[:, slots]
    return _attend(q, keys, values, batch, starts=starts.int())


def _attend(q: Tensor, keys: Tensor, values: Tensor, batch: Batch, starts: Tensor | None, **options: Any) -> Tensor:
    """Call the kernel. A window without end to the left and none to the right is causal attention."""
    out: Tensor = _kernel()(
        q,
        keys,
        values,
        batch.query_starts_at,
        starts,
        batch.most_queries,
        batch.most_context,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != keys.shape[-2],
        **options,
    )
    return out


def _reads_blocks(setting: Setting) -> bool:
    """Return True when a trial over two blocks, read in place, agrees with the same gathered."""
    if "block_table" not in inspect.signature(_kernel()).parameters:
        return False
    tokens, random = setting.block_tokens + 1, torch.Generator(setting.device).manual_seed(0)
    at: dict[str, Any] = {"dtype": setting.dtype, "device": setting.device}
    q = torch.randn(1, setting.heads, setting.head_dim, generator=random, **at)
    kv = torch.randn(2, 2, setting.block_tokens, setting.kv_heads, setting.head_dim, generator=random, **at)
    batch = _trial(tokens, setting.device)
    try:
        paged = _paged(q, kv, batch)
    except (RuntimeError, NotImplementedError, ValueError):  # how torch refuses a block size
        return False
    return torch.allclose(paged, _gathered(q, kv, batch), atol=2e-2, rtol=2e-2)


def _trial(tokens: int, device: torch.device) -> Batch:
    """Return a step of one sequence that decodes its last token, in blocks 1 and 0."""
    starts, contexts = np.array([0, 1], np.int32), np.array([tokens], np.int32)

    def at(values: list[Any], kind: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    return Batch(
        token_ids=at([0]),
        positions=at([tokens - 1]),
        slots=at([0]),
        block_tables=at([[1, 0]], torch.int32),
        sampled=at([0]),
        query_starts=starts,
        contexts=contexts,
        query_starts_at=at([0, 1], torch.int32),
        contexts_at=at([tokens], torch.int32),
        single=1,
        most_queries=1,
        most_context=tokens,
    )
