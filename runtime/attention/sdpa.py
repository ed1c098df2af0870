"""The reference: torch's scaled_dot_product_attention, one sequence after the other, on any device.

The blocks of a sequence are gathered into one piece first. The query heads that share a KV head are laid out as more
queries of that head (a single query) or as a batch over the same keys, at stride 0 (several). Trap:
scaled_dot_product_attention(enable_gqa=True) does the same and is 8 times slower on CPUs in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.attention.base import Setting, write_kv
from runtime.batch import Batch


def reason_against(setting: Setting) -> str | None:
    """Return None: it fits everywhere."""
    return None


def build(setting: Setting) -> Sdpa:
    """Return the backend."""
    return Sdpa()


class Sdpa:
    """See the module."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        """Return [T, heads, head_dim]; the protocol is runtime.attention.base.Attention's."""
        write_kv(kv, k, v, batch.slots)
        out = torch.empty_like(q)
        for sequence in range(batch.sequences):
            attend(q, k, v, kv, batch, sequence, out)
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch, sequence: int, out: Tensor) -> None:
    """Write the rows of `out` that belong to one sequence, whose keys and values are in `kv` already."""
    first, end = (int(at) for at in batch.query_starts[sequence : sequence + 2])
    q, k, v = q[first:end], k[first:end], v[first:end]
    context = int(batch.contexts[sequence])
    if context > len(q):
        k, v = gathered(kv, batch.block_tables[sequence], context)
    out[first:end] = one_query(q, k, v) if len(q) == 1 else several_queries(q, k, v)


def gathered(kv: Tensor, block_table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [context, kv_heads, head_dim] of the sequence whose blocks `block_table` [>= n] lists."""
    block_tokens = kv.shape[2]
    blocks = block_table[: -(-context // block_tokens)]
    keys, values = kv.index_select(1, blocks).flatten(1, 2)
    return keys[:context], values[:context]


def one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [1, heads, head_dim]: q [1, heads, head_dim] attends to all of k and v [context, kv_heads, head_dim]."""
    kv_heads, head_dim = k.shape[1:]
    folded = q.view(1, kv_heads, -1, head_dim)
    out: Tensor = scaled_dot_product_attention(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    return out.reshape(q.shape)


def several_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [n, heads, head_dim]: q are the last n of the `context` tokens of k and v."""
    (queries, heads, head_dim), (context, kv_heads, _) = q.shape, k.shape
    shared = (kv_heads, heads // kv_heads, -1, head_dim)
    k, v = (part.transpose(0, 1)[:, None].expand(*shared) for part in (k, v))
    mask = None if context == queries else causal_mask(queries, context, q.device)
    q = q.transpose(0, 1).unflatten(0, shared[:2])
    out: Tensor = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out.flatten(0, 1).transpose(0, 1)


def causal_mask(queries: int, context: int, device: torch.device) -> Tensor:
    """Return [queries, context] bool, True where the query, one of the last, may look."""
    return torch.ones(queries, context, dtype=torch.bool, device=device).tril(context - queries)
