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
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from runtime.attention.base import Setting
from runtime.attention.sdpa import attend
from runtime.batch import Batch
from runtime.compiled import INSIDE, NUMBERS, compiled, exp, numbers, store, to_float, use_threads

_PIECE = 512
"""Tokens of a piece. The first ones are read without having been fetched ahead, so longer is faster; shorter ones give
threads more even shares."""

_LINE_BYTES = 64

_AHEAD = 32
"""Tokens between the one that is read and the one that is fetched from memory: blocks lie anywhere, and the processor
guesses wrong. Not fetching takes twice as long; fetching into the first-level cache, which is soon full, 1.5 times."""

_F32 = np.float32


def reason_against(setting: Setting) -> str | None:
    """Return why the kernel cannot serve `setting`, or None when it can."""
    if setting.device.type != "cpu":
        return f"it runs on CPUs, not on {setting.device.type}"
    if setting.dtype not in NUMBERS:
        return f"it takes float32 and bfloat16, not {str(setting.dtype).removeprefix('torch.')}"
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
            numbers(kv.view(2, -1, *kv.shape[3:])),
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
        types.Array(number, 4, "C"),
        types.Array(types.int64, 1, "C"),
        types.Array(types.int32, 2, "C"),
        types.Array(types.int32, 1, "C"),
        *(types.int64, types.float32, types.int64),
        types.Array(number, 3, "C"),
    )
    return compiled(_write_and_attend, signature)


# ---- inside the kernel


@intrinsic
def _fetch(_context: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line `offset` bytes into `array`: llvm.prefetch(address, read, second-level cache, data)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [arguments[1]])
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (address.type,), kind)
        builder.call(prefetch, [address, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@numba.njit(**INSIDE)
def _rows_of(table: Any, block_tokens: Any, first: Any, end: Any, rows: Any) -> Any:
    """Write where tokens first..end-1 lie to `rows`, filled up to a multiple of 4; return how many that makes."""
    at = first
    while at < end:
        block, place = at // block_tokens, at % block_tokens
        together = min(block_tokens - place, end - at)
        for i in range(together):
            rows[at - first + i] = table[block] * block_tokens + place + i
        at += together
    filled = (end - first + 3) // 4 * 4
    for i in range(end - first, filled):
        rows[i] = rows[end - first - 1]
    return filled


@numba.njit(**INSIDE)
def _fetch_rows(kv: Any, part: Any, rows: Any, at: Any, filled: Any) -> None:
    """Ask for the 4 rows that come _AHEAD tokens after `at`; after the last keys (part 0) come the first values."""
    start = at + _AHEAD
    if start >= filled:
        part, start = part + 1, start - filled
    if part > 1 or start >= filled:
        return
    for i in range(start, start + 4):
        for line in range(0, kv.strides[1], _LINE_BYTES):
            _fetch(kv, part * kv.strides[0] + rows[i] * kv.strides[1] + line)  # type: ignore[call-arg]


@numba.njit(**INSIDE)
def _scores(queries: Any, kv: Any, rows: Any, filled: Any, scores: Any) -> None:
    """Write q k^T to scores [heads, filled]. Four tokens at a time, so that a query is read once for four keys."""
    kv_heads, head_dim = kv.shape[2], kv.shape[3]
    group = queries.shape[0] // kv_heads
    for i in range(0, filled, 4):
        _fetch_rows(kv, 0, rows, i, filled)
        a, b, c, d = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        for head in range(kv_heads):
            for h in range(head * group, head * group + group):
                e, f, g, j = _F32(0), _F32(0), _F32(0), _F32(0)
                for x in range(head_dim):
                    q = queries[h, x]
                    e += q * to_float(kv[0, a, head, x])
                    f += q * to_float(kv[0, b, head, x])
                    g += q * to_float(kv[0, c, head, x])
                    j += q * to_float(kv[0, d, head, x])
                scores[h, i], scores[h, i + 1], scores[h, i + 2], scores[h, i + 3] = e, f, g, j


@numba.njit(**INSIDE)
def _weigh(scores: Any, tokens: Any, filled: Any, part: Any) -> None:
    """Turn the scores of one head into exp(score - largest); note the largest and the sum at the end of `part`."""
    largest, total = scores[0], _F32(0)
    for i in range(tokens):
        largest = max(largest, scores[i])
    for i in range(tokens):
        scores[i] = exp(scores[i] - largest)
        total += scores[i]
    for i in range(tokens, filled):
        scores[i] = _F32(0)
    part[-2], part[-1] = largest, total


@numba.njit(**INSIDE)
def _mix(scores: Any, kv: Any, rows: Any, filled: Any, mixed: Any) -> None:
    """Add the values, times the scores [heads, filled], to mixed [heads, head_dim]."""
    kv_heads, head_dim = kv.shape[2], kv.shape[3]
    group = mixed.shape[0] // kv_heads
    for i in range(0, filled, 4):
        _fetch_rows(kv, 1, rows, i, filled)
        a, b, c, d = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        for head in range(kv_heads):
            for h in range(head * group, head * group + group):
                e, f, g, j = scores[h, i], scores[h, i + 1], scores[h, i + 2], scores[h, i + 3]
                for x in range(head_dim):
                    mixed[h, x] += (
                        e * to_float(kv[1, a, head, x])
                        + f * to_float(kv[1, b, head, x])
                        + g * to_float(kv[1, c, head, x])
                        + j * to_float(kv[1, d, head, x])
                    )


@numba.njit(**INSIDE)
def _join(parts: Any, out: Any) -> None:
    """Write the mean of the pieces' values, parts [pieces, heads, head_dim + 2], each weighted by its sum, to `out`."""
    pieces, heads, width = parts.shape
    for h in range(heads):
        largest, total = parts[0, h, width - 2], _F32(0)
        for p in range(pieces):
            largest = max(largest, parts[p, h, width - 2])
        for p in range(pieces):
            parts[p, h, width - 2] = exp(parts[p, h, width - 2] - largest)
            total += parts[p, h, width - 2] * parts[p, h, width - 1]
        for x in range(width - 2):
            value = _F32(0)
            for p in range(pieces):
                value += parts[p, h, width - 2] * parts[p, h, x]
            store(out, h, x, value / total)


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
    single, (tokens, heads, head_dim) = len(contexts), q.shape
    pieces = np.zeros(single + 1, np.int64)
    for s in range(single):
        pieces[s + 1] = pieces[s] + (contexts[s] + _PIECE - 1) // _PIECE
    total = max(1, contexts.sum())
    parts = np.empty((pieces[single], heads, head_dim + 2), np.float32)
    for thread in numba.prange(threads):
        rows = np.empty(_PIECE + 4, np.int64)
        queries = np.empty((heads, head_dim), np.float32)
        scores = np.empty((heads, _PIECE + 4), np.float32)
        for t in range(single + thread, tokens, threads):
            _copy(k[t], kv[0, slots[t]])
            _copy(v[t], kv[1, slots[t]])
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
                    _copy(k[s], kv[0, slots[s]])
                    _copy(v[s], kv[1, slots[s]])
                for h in range(heads):
                    for x in range(head_dim):
                        queries[h, x] = to_float(q[s, h, x]) * scale
                        parts[piece, h, x] = _F32(0)
                filled = _rows_of(block_tables[s], block_tokens, first, end, rows)
                _scores(queries, kv, rows, filled, scores)
                for h in range(heads):
                    _weigh(scores[h], end - first, filled, parts[piece, h])
                _mix(scores, kv, rows, filled, parts[piece])
    for s in range(single):
        _join(parts[pieces[s] : pieces[s + 1]], out[s])
