"""Decode attention on CPUs: a compiled kernel that reads KV blocks where they lie.

Gathering the blocks of every sequence and calling torch costs about three times as much. Sequences that run several
tokens go to scaled_dot_product_attention, whose time is then that of its arithmetic.

A context is cut into pieces of fixed length, so that threads get equal shares, and the pieces are joined by their
largest scores and sums (flash-decoding). The cuts hang on the context alone: a sequence's result is the same to the bit
whatever runs beside it, on however many threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from runtime.attention.base import Setting
from runtime.attention.sdpa import attend
from runtime.attention.tiles import AHEAD, LANES, QUERIES, TOKENS, mix, score
from runtime.batch import Batch
from runtime.compiled import INSIDE, LOOSE, NUMBERS, compiled, exp, numbers, store, to_float, use_threads

_PIECE = 512
"""Tokens of a piece. The first ones are read without having been fetched ahead, so longer is faster; shorter ones give
threads more even shares."""

_F32 = np.float32


def reason_against(setting: Setting) -> str | None:
    """Return why the kernel cannot serve `setting`, or None when it can."""
    if setting.device.type != "cpu":
        return f"it runs on CPUs, not on {setting.device.type}"
    if setting.dtype not in NUMBERS:
        return f"it takes float32 and bfloat16, not {str(setting.dtype).removeprefix('torch.')}"
    if setting.head_dim % LANES:
        return f"it takes heads whose width is a multiple of {LANES}, not {setting.head_dim}"
    return None


def build(setting: Setting) -> PagedNumba:
    """Return the backend. Compiles its kernel, or loads it from the cache."""
    return PagedNumba(setting)


class PagedNumba:
    """See the module."""

    def __init__(self, setting: Setting):
        self._kernel = _compiled(setting.dtype)
        self._scale = _F32(setting.head_dim**-0.5)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        """Return [T, heads, head_dim]; the protocol is runtime.attention.base.Attention's."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._kernel(
            numbers(q),
            numbers(k),
            numbers(v),
            numbers(kv.flatten(0, 2)),
            batch.slots.numpy(),
            batch.block_tables.numpy(),
            batch.contexts[: batch.single],
            kv.shape[2],
            self._scale,
            use_threads(kv[0, 0].numel() * len(batch.slots)),
            numbers(out),
        )
        for sequence in range(batch.single, batch.sequences):
            attend(q, k, v, kv, batch, sequence, out)
        return out


@cache
def _compiled(dtype: torch.dtype) -> Any:
    number = NUMBERS[dtype]
    rows = types.Array(number, 3, "A")  # q, k and v may be parts of one matrix
    signature = types.void(
        *(rows, rows, rows),
        types.Array(number, 3, "C"),
        types.Array(types.int64, 1, "C"),
        types.Array(types.int32, 2, "C"),
        types.Array(types.int32, 1, "C"),
        *(types.int64, types.float32, types.int64),
        types.Array(number, 3, "C"),
    )
    return compiled(_write_and_attend, signature)


# ---- inside the kernel


@numba.njit(**INSIDE)
def _rows_of(table: Any, block_tokens: Any, first: Any, end: Any, slots: Any, rows: Any) -> Any:
    """Write where the keys of tokens first..end-1 lie to `rows`, then their values, each filled up to whole tiles.

    The last row is repeated AHEAD times more, for fetching reads on. Returns how many tokens the tiles hold.
    """
    at = first
    while at < end:
        block, place = at // block_tokens, at % block_tokens
        together = min(block_tokens - place, end - at)
        for i in range(together):
            rows[at - first + i] = table[block] * block_tokens + place + i
        at += together
    filled = (end - first + TOKENS - 1) // TOKENS * TOKENS
    rows[end - first : filled] = rows[end - first - 1]
    for i in range(filled):
        rows[filled + i] = slots + rows[i]
    rows[2 * filled : 2 * filled + AHEAD] = rows[2 * filled - 1]
    return filled


@numba.njit(**INSIDE)
def _scores(queries: Any, kv: Any, rows: Any, filled: Any, scores: Any) -> None:
    """Write q k^T to scores [heads, filled]."""
    group = queries.shape[0] // kv.shape[1]
    for i in range(0, filled, TOKENS):
        for head in range(kv.shape[1]):
            h, end = head * group, head * group + group
            while h + QUERIES <= end:
                score(queries, h, kv, rows, i, head, scores, i, QUERIES)  # type: ignore[call-arg]
                h += QUERIES
            if end - h == 3:
                score(queries, h, kv, rows, i, head, scores, i, 3)  # type: ignore[call-arg]
            elif end - h == 2:
                score(queries, h, kv, rows, i, head, scores, i, 2)  # type: ignore[call-arg]
            elif end - h == 1:
                score(queries, h, kv, rows, i, head, scores, i, 1)  # type: ignore[call-arg]


@numba.njit(**{**INSIDE, "fastmath": LOOSE | {"nnan"}})
def _largest(scores: Any, tokens: Any) -> Any:
    """Return the largest of the first scores; anything if one is NaN, since the sum of the weights is NaN then."""
    largest = scores[0]
    for i in range(tokens):
        largest = max(largest, scores[i])
    return largest


@numba.njit(**INSIDE)
def _weigh(scores: Any, tokens: Any, filled: Any, part: Any) -> None:
    """Turn the scores of one head into exp(score - largest); note the largest and the sum at the end of `part`."""
    largest, total = _largest(scores, tokens), _F32(0)
    for i in range(tokens):
        scores[i] = exp(scores[i] - largest)
        total += scores[i]
    scores[tokens:filled] = _F32(0)
    part[-2], part[-1] = largest, total


@numba.njit(**INSIDE)
def _mix(scores: Any, kv: Any, rows: Any, filled: Any, mixed: Any) -> None:
    """Add the values, times the scores [heads, filled], to mixed [heads, head_dim]."""
    group = mixed.shape[0] // kv.shape[1]
    for i in range(0, filled, TOKENS):
        for head in range(kv.shape[1]):
            h, end = head * group, head * group + group
            while h + QUERIES <= end:
                mix(scores, h, i, kv, rows, filled + i, head, mixed, QUERIES)  # type: ignore[call-arg]
                h += QUERIES
            if end - h == 3:
                mix(scores, h, i, kv, rows, filled + i, head, mixed, 3)  # type: ignore[call-arg]
            elif end - h == 2:
                mix(scores, h, i, kv, rows, filled + i, head, mixed, 2)  # type: ignore[call-arg]
            elif end - h == 1:
                mix(scores, h, i, kv, rows, filled + i, head, mixed, 1)  # type: ignore[call-arg]


@numba.njit(**INSIDE)
def _join(parts: Any, out: Any) -> None:
    """Write the mean of the pieces' values, parts [pieces, heads, head_dim + 2], each weighted by its sum, to `out`."""
    pieces, heads, width = parts.shape
    for h in range(heads):
        largest, total = parts[0, h, width - 2], _F32(0)
        for p in range(pieces):
            largest = max(largest, parts[p, h, width - 2])
        for p in range(pieces):
            share = exp(parts[p, h, width - 2] - largest)
            total += share * parts[p, h, width - 1]
            for x in range(width - 2):
                parts[0, h, x] = share * parts[p, h, x] + (parts[0, h, x] if p else _F32(0))
        for x in range(width - 2):
            store(out, h, x, parts[0, h, x] / total)


@numba.njit(**INSIDE)
def _copy(source: Any, target: Any) -> None:
    """Copy keys or values of one token, [kv_heads, head_dim]."""
    for h in range(source.shape[0]):
        for x in range(source.shape[1]):
            target[h, x] = source[h, x]


def _write_and_attend(
    q: Any,
    k: Any,
    v: Any,
    kv: Any,
    slots: Any,
    block_tables: Any,
    contexts: Any,
    block_tokens: Any,
    scale: Any,
    threads: Any,
    out: Any,
) -> None:
    """Write all keys and values; attend for the sequences with one token, one in each of the first rows."""
    single, (tokens, heads, head_dim), kv_slots = len(contexts), q.shape, len(kv) // 2
    pieces = np.zeros(single + 1, np.int64)
    for s in range(single):
        pieces[s + 1] = pieces[s] + (contexts[s] + _PIECE - 1) // _PIECE
    total = max(1, contexts.sum())
    parts = np.empty((pieces[single], heads, head_dim + 2), np.float32)
    for thread in numba.prange(threads):
        rows = np.empty(2 * (_PIECE + TOKENS) + AHEAD, np.int64)
        queries = np.empty((heads, head_dim), np.float32)
        scores = np.empty((heads, _PIECE + TOKENS), np.float32)
        for t in range(single + thread, tokens, threads):
            _copy(k[t], kv[slots[t]])
            _copy(v[t], kv[kv_slots + slots[t]])
        before = 0
        for s in range(single):
            for piece in range(pieces[s], pieces[s + 1]):
                first = (piece - pieces[s]) * _PIECE
                end = min(first + _PIECE, contexts[s])
                mine = (2 * before + end - first) * threads // (2 * total) == thread  # where its middle falls
                before += end - first
                if not mine:
                    continue
                if end == contexts[s]:  # nobody else reads its newest token
                    _copy(k[s], kv[slots[s]])
                    _copy(v[s], kv[kv_slots + slots[s]])
                for h in range(heads):
                    for x in range(head_dim):
                        queries[h, x] = to_float(q[s, h, x]) * scale
                        parts[piece, h, x] = _F32(0)
                filled = _rows_of(block_tables[s], block_tokens, first, end, kv_slots, rows)
                _scores(queries, kv, rows, filled, scores)
                for h in range(heads):
                    _weigh(scores[h], end - first, filled, parts[piece, h])
                _mix(scores, kv, rows, filled, parts[piece])
    for s in range(single):
        _join(parts[pieces[s] : pieces[s + 1]], out[s])
