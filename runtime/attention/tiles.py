"""The innermost steps of the compiled kernel, vector by vector: a few queries with four tokens of one KV head.

Left to itself LLVM adds up every score across its vector on its own, keeps sums in memory for fear that arrays overlap,
and reads a key anew for each query that shares it; that took half as long again (docs/decisions/0019-cpu-speed.md).
Here sums stay in registers, four scores are added up at once, and what a later step reads is fetched between products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))

LANES = 16 if _WIDE else 8
"""Numbers in a vector. A head's width is a multiple of it."""

QUERIES = 4 if _WIDE else 2
"""Queries of the largest tile: with four sums each, four keys and one query they fill the registers."""

TOKENS = 4
"""Tokens of a tile."""

AHEAD = 16
"""Tokens between those that are read and those that are fetched from memory: blocks lie anywhere, and the processor
guesses wrong. 12 and 32 do as well, 64 is slower. Into the first-level cache, soon full, it takes twice as long."""

_WORD, _LONG = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_FUSED = ("contract",)
"""A product and a sum may become one instruction."""


@intrinsic(prefer_literal=True)
def score(
    _typing: Any, queries: Any, h: Any, kv: Any, rows: Any, at: Any, head: Any, scores: Any, i: Any, many: Any
) -> Any:
    """Write queries[h + n] . kv[rows[at + t], head] to scores[h + n, i + t], for all n < many and t < TOKENS."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries, h, kv, rows, at, head, scores, i, _ = _unpacked(context, builder, signature, arguments)
        sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(TOKENS)] for _ in range(many.literal_value)]
        for total in (total for of_query in sums for total in of_query):
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
        with _tokens(builder, kv, rows, at, head) as (x, keys):
            for n, of_query in enumerate(sums):
                query = queries.vector(_plus(builder, h, n), x)
                for key, total in zip(keys, of_query, strict=True):
                    builder.store(_fused(builder, query, key, builder.load(total)), total)
        for n, of_query in enumerate(sums):
            scores.write(_across(builder, [builder.load(total) for total in of_query]), _plus(builder, h, n), i)
        return context.get_dummy_value()

    return types.void(queries, h, kv, rows, at, head, scores, i, many), generate


@intrinsic(prefer_literal=True)
def mix(
    _typing: Any, scores: Any, h: Any, i: Any, kv: Any, rows: Any, at: Any, head: Any, mixed: Any, many: Any
) -> Any:
    """Add scores[h + n, i + t] kv[rows[at + t], head] to mixed[h + n], for all n < many and t < TOKENS."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, h, i, kv, rows, at, head, mixed, _ = _unpacked(context, builder, signature, arguments)
        weights = [
            [_everywhere(builder, scores.number(_plus(builder, h, n), _plus(builder, i, t))) for t in range(TOKENS)]
            for n in range(many.literal_value)
        ]
        with _tokens(builder, kv, rows, at, head) as (x, values):
            for n, of_query in enumerate(weights):
                total = mixed.vector(_plus(builder, h, n), x)
                for weight, value in zip(of_query, values, strict=True):
                    total = _fused(builder, weight, value, total)
                mixed.write(total, _plus(builder, h, n), x)
        return context.get_dummy_value()

    return types.void(scores, h, i, kv, rows, at, head, mixed, many), generate


class _Array:
    """An array of compiled code, read and written by the vector."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any):
        view = context.make_array(kind)(context, builder, value)
        self._builder, self._data = builder, builder.bitcast(view.data, ir.IntType(8).as_pointer())
        self._strides, self.shape = (cgutils.unpack_tuple(builder, part) for part in (view.strides, view.shape))
        self._number = context.get_data_type(kind.dtype)
        self.number_bytes = kind.dtype.bitwidth // 8

    def address(self, *index: Any, kind: Any = None) -> Any:
        """Return where the number at `index` lies, as a pointer to `kind`, or to bytes."""
        offset = _LONG(0)
        for place, stride in zip(index, self._strides, strict=True):
            offset = self._builder.add(offset, self._builder.mul(place, stride))
        place = self._builder.gep(self._data, [offset])
        return place if kind is None else self._builder.bitcast(place, kind.as_pointer())

    def number(self, *index: Any) -> Any:
        return self._builder.load(self.address(*index, kind=self._number))

    def vector(self, *index: Any) -> Any:
        """Return the LANES numbers from `index` on as floats; bfloat16 is the upper half of one."""
        raw = self._builder.load(self.address(*index, kind=ir.VectorType(self._number, LANES)), align=self.number_bytes)
        if self.number_bytes == 4:
            return raw
        words = ir.VectorType(_WORD, LANES)
        bits = self._builder.shl(self._builder.zext(raw, words), ir.Constant(words, [16] * LANES))
        return self._builder.bitcast(bits, _VECTOR)

    def write(self, vector: Any, *index: Any) -> None:
        self._builder.store(vector, self.address(*index, kind=vector.type), align=self.number_bytes)

    def fetch(self, *index: Any) -> None:
        """Ask for the line at `index`: llvm.prefetch(address, read, second-level cache, data)."""
        address = self.address(*index)
        kind = ir.FunctionType(ir.VoidType(), [address.type, _WORD, _WORD, _WORD])
        prefetch = self._builder.module.declare_intrinsic("llvm.prefetch", (address.type,), kind)
        self._builder.call(prefetch, [address, _WORD(0), _WORD(2), _WORD(1)])


def _unpacked(context: Any, builder: Any, signature: Any, arguments: Any) -> Iterator[Any]:
    """Yield the arguments of an intrinsic, arrays as _Array."""
    for kind, value in zip(signature.args, arguments, strict=True):
        yield _Array(context, builder, kind, value) if isinstance(kind, types.Array) else value


@contextmanager
def _tokens(builder: Any, kv: _Array, rows: _Array, at: Any, head: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Loop over the width of a head: yield where the vectors begin, and those of rows[at:at + TOKENS]."""
    here, later = ([rows.number(_plus(builder, at, n + t)) for t in range(TOKENS)] for n in (0, AHEAD))
    with cgutils.for_range(builder, builder.sdiv(kv.shape[2], _LONG(LANES))) as loop:
        x = builder.mul(loop.index, _LONG(LANES))
        for row in later:
            kv.fetch(row, head, x)
        yield x, [kv.vector(row, head, x) for row in here]


def _plus(builder: Any, number: Any, constant: int) -> Any:
    return builder.add(number, _LONG(constant))


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c."""
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def _everywhere(builder: Any, number: Any) -> Any:
    """Return a vector of one number, many times."""
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, _WORD(0))
    return _shuffled(builder, first, first, [0] * LANES)


def _across(builder: Any, four: Sequence[Any]) -> Any:
    """Return the sums across each of four vectors as one of four numbers. Alone each would take as long as all do."""
    a, b, c, d = four
    ab, cd = _halved(builder, a, b, 1), _halved(builder, c, d, 1)
    total = _halved(builder, ab, cd, 2)
    for width in (8, 4) if LANES == 16 else (4,):
        low, high = range(width), range(width, 2 * width)
        total = builder.fadd(_shuffled(builder, total, total, low), _shuffled(builder, total, total, high))
    return total


def _halved(builder: Any, a: Any, b: Any, run: int) -> Any:
    """Return `a` and `b` in runs of `run`, in turn, after adding the third and fourth of every four to the others."""
    order = (0, LANES, 1, LANES + 1) if run == 1 else (0, 1, LANES, LANES + 1)
    low = [start + n for start in range(0, LANES, 4) for n in order]
    return builder.fadd(_shuffled(builder, a, b, low), _shuffled(builder, a, b, [n + 2 for n in low]))


def _shuffled(builder: Any, a: Any, b: Any, order: Sequence[int]) -> Any:
    """Return the numbers of `a` and `b`, counted through, in another order."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, len(order)), list(order)))
