"""The laws of one iteration, compiled. Every cost model ends up as one vector of numbers for `iteration_s`.

The simulators call this once per step, tens of millions of times per plan; therefore no objects here. A
family is a number in `p[FAMILY]` and a law below. To add one: a constant, a law, and a branch in
`iteration_s`.

The shape of an iteration is five sums over its requests (n new tokens and k cached tokens of each):
    prefills    requests that prefill                decodes   requests that decode one token each
    tokens      sum of n                             context   sum of the decoding requests' KV tokens
    attended    sum of n^2 + 2 (n + r) k   (twice the query-key pairs of causal attention; r: see `PREFIX`)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import exp, log, log2

import numpy as np

from planner.compiled import compiled, inlined

FAMILY = 0
LINEAR, ROOFLINE, HYBRID, MEASURED = 0, 1, 2, 3

# LINEAR: p[1:4] prefill a, b, c; p[4:7] decode a, b, c below the threshold; p[7:10] from it on; p[10]
# threshold. ROOFLINE: see `_roofline_s`. HYBRID: a roofline, then two grids of residuals, see `_residual`.
# MEASURED: tables of a step's parts, see `_measured_s`.
SIZE = 20
"""Numbers of a law before its grids."""
SLOWER = 17, 18
"""Of any law: by which share steps with prefill, and decode-only steps, take longer (to ask what an error would do)."""
PREFIX = 16
"""Of any law: r, how many queries of attention take as long as reading a cached token back. What a prompt finds cached
has to be read, however few tokens it adds. Whoever makes the sums adds it (`attended`): one sum serves both."""
LONG, SHORT = 14, 10
"""Nodes of a residual grid: 2^4 to 2^17 tokens, 2^0 to 2^9 requests."""
FIRST_LONG = 4
GRID = LONG * SHORT
FAMILIES = {
    LINEAR: ("linear", SIZE),
    ROOFLINE: ("roofline", SIZE),
    HYBRID: ("hybrid", SIZE + 2 * GRID),
    MEASURED: ("table", SIZE),
}
"""Name and least length of a vector, by family. More numbers may follow, up to `TABLE`; they are not read
(MEASURED: its tables, of any length)."""
SHARPNESS = 3
TABLE = SIZE + 2 * GRID
"""Where a simulator's row has its table of soft maxima (see `with_tables`)."""
_NODES = 512


@inlined
def _linear_prefill_s(p, tokens, attended):
    """a + b sum(n) + c sum(n^2 + 2nk)  [s]   (DistServe, OSDI '24, appendix A; 2nk is our cached prefix)."""
    return p[1] + p[2] * tokens + p[3] * attended


@inlined
def _linear_decode_s(p, decodes, context):
    """a + b B + c sum(k)  [s], in two regimes of the batch size B (DistServe's artifact)."""
    at = 4 if decodes < p[10] else 7
    return p[at] + p[at + 1] * decodes + p[at + 2] * context


@inlined
def _linear_s(p, tokens, attended, decodes, context):
    """A mixed step runs its prefill tokens and its decode tokens through the same matrices once.

    So it costs the prefill law with the decode tokens counted in, plus their KV reads; and never less than
    the decode step alone. Our own extension: the published fits know no mixed steps (SARATHI, arXiv
    2308.16369, sec. 4.2).
    """
    if tokens <= 0:
        return _linear_decode_s(p, decodes, context)
    if decodes <= 0:
        return _linear_prefill_s(p, tokens, attended)
    reads = p[6 if decodes < p[10] else 9] * context
    mixed = _linear_prefill_s(p, tokens + decodes, attended) + reads
    return max(mixed, _linear_decode_s(p, decodes, context))


@inlined
def _soft_max(p, x, y):
    """(x^q + y^q)^(1/q), q = p[3]: near max(x, y), smooth where both matter. Off the table where `p` has one."""
    big = max(x, y)
    small = min(x, y)
    if small <= 0.0:
        return big
    if len(p) > TABLE and 128.0 * small > big:  # below, a power such as 2.1 bends too sharply for a cubic
        return big * _tabulated(p, small / big)
    return big * (1.0 + exp(p[SHARPNESS] * (log(small) - log(big)))) ** (1.0 / p[SHARPNESS])


@inlined
def _tabulated(p, ratio):
    """(1 + ratio^q)^(1/q) for a ratio in [0, 1], by a cubic through the values and slopes of the nodes around it."""
    node = int(ratio * _NODES)
    at, t = TABLE + 2 * node, ratio * _NODES - node
    value, slope, end_slope = p[at], p[at + 1], p[at + 3]
    rise = p[at + 2] - value
    return value + t * (slope + t * (3.0 * rise - 2.0 * slope - end_slope + t * (slope + end_slope - 2.0 * rise)))


def with_tables(laws: Sequence[np.ndarray]) -> np.ndarray:
    """Return one row per law for a simulator: its vector, padded, and a table that spares it three functions of libm.

    The table holds the soft maximum of 1 and a ratio, values and slopes at 513 nodes. Off by less than 1e-10 of the
    whole for sharpnesses from 2 on, which are those that a fit may find.
    """
    end = TABLE + 2 * (_NODES + 2)
    found = np.zeros((len(laws), max(end, *(len(p) for p in laws if p[FAMILY] == MEASURED), 0)))
    for row, p in zip(found, laws, strict=True):
        if p[FAMILY] == MEASURED:
            row[: len(p)] = p
        else:
            row[: min(len(p), TABLE)] = p[:TABLE]
            row[TABLE:end] = _table(2.0 if p[FAMILY] == LINEAR else float(p[SHARPNESS]))
    return found


@cache
def _table(q: float) -> np.ndarray:
    ratio = np.arange(_NODES + 2) / _NODES
    value = (1.0 + ratio**q) ** (1.0 / q)
    slope = ratio ** (q - 1.0) * value / (1.0 + ratio**q) / _NODES
    return np.column_stack([value, slope]).ravel()


@inlined
def _roofline_s(p, prefills, tokens, attended, decodes, context):
    """overhead + softmax_q(softmax_q(compute, memory) + attention, launches) + sampling + collectives  [s].

    p[1] overhead of a step with prefill    p[2] of a decode-only step        p[3] q, how sharp the knee is
    p[4] per token through the matrices     p[5] per unit of `attended`       p[6] per sequence (sampling)
    p[7] to stream the shared weights       p[8] to stream all experts        p[9] share that one token wakes
    p[10] to read one KV token              p[11] collectives of a step       p[12] collectives per token
    p[13] host work to launch a step with prefill: a floor under short prompts, hidden under long ones
    p[14] tokens from which p[4] grows, by the share p[15] at twice as many (whole-instance tables show it)

    Experts: of E with k per token, T tokens touch 1 - (1 - k/E)^T of them, so decode moves from active to
    total weights as the batch grows.
    """
    all_tokens = tokens + decodes
    experts = p[8] * (1.0 - (1.0 - p[9]) ** all_tokens) if p[8] > 0.0 else 0.0
    slower = p[15] * min(1.0, max(0.0, all_tokens / p[14] - 1.0)) if p[15] > 0.0 else 0.0
    compute = p[4] * all_tokens * (1.0 + slower)
    memory = p[7] + experts
    # attention is a kernel of its own: it waits for the matrices and does not hide under them. A prefill reads back
    # the KV it attends to as well, but tile by tile: that is inside p[5]
    busy = _soft_max(p, compute, memory) + p[5] * attended + p[10] * context
    overhead = p[2]
    if tokens > 0:
        busy = _soft_max(p, busy, p[13])
        overhead = max(p[1], p[2]) if decodes > 0 else p[1]
    return overhead + busy + p[6] * (prefills + decodes) + p[11] + p[12] * all_tokens


@inlined
def _node(value, nodes):
    """Return the grid node at or under `value` (counted in nodes) and the share of the way to the next one."""
    inside = min(max(value, 0.0), nodes - 1.0)
    node = min(int(inside), nodes - 2)
    return node, inside - node


@inlined
def _residual(p, start, tokens, requests):
    """Return the log of measured over roofline time at (tokens of each, requests): bilinear, flat outside."""
    i, x = _node(log2(max(tokens, 1.0)) - FIRST_LONG, LONG)
    j, y = _node(log2(max(requests, 1.0)), SHORT)
    at = start + i * SHORT + j
    here = p[at] * (1.0 - y) + p[at + 1] * y
    there = p[at + SHORT] * (1.0 - y) + p[at + SHORT + 1] * y
    return here * (1.0 - x) + there * x


@inlined
def _hybrid_s(p, prefills, tokens, attended, decodes, context):
    """The roofline times what measurements have shown it to be off by, near where they were made  [s].

    Both grids lie over (tokens of each request, requests): new tokens in prefill, KV tokens in decode. A mixed step is
    priced as in the linear law: the prefill with the decode tokens counted in, plus KV reads and sampling.
    """
    if tokens <= 0:
        off = _residual(p, SIZE + GRID, context / decodes, decodes)
        return exp(off) * _roofline_s(p, 0, 0, 0.0, decodes, context)
    off = _residual(p, SIZE, (tokens + decodes) / max(prefills, 1), prefills)
    batch_s = exp(off) * _roofline_s(p, prefills, tokens + decodes, attended, 0, 0)
    if decodes <= 0:
        return batch_s
    alone_s = exp(_residual(p, SIZE + GRID, context / decodes, decodes)) * _roofline_s(p, 0, 0, 0.0, decodes, context)
    return max(batch_s + p[10] * context + p[6] * decodes, alone_s)


@inlined
def _at(p, start, count, value):
    """Return the curve p[start:start + count] of 0, 1, 2 ... at `value`; beyond its end as steep as its last half."""
    last = count - 1
    if value >= last:
        return p[start + last] + (p[start + last] - p[start + last // 2]) / (last - last // 2) * (value - last)
    below = int(value)
    return p[start + below] + (p[start + below + 1] - p[start + below]) * (value - below)


@inlined
def _between(p, start, count, value):
    """Return the interval of an axis that holds `value` (beyond its end the last) and the share of the way in it."""
    i = 0
    while i < count - 2 and p[start + i + 1] <= value:
        i += 1
    return i, (value - p[start + i]) / (p[start + i + 1] - p[start + i])


@inlined
def _attention_s(p, chunk, cached, decodes, context):
    """Return attention's time [s]: one chunk behind `cached` tokens, beside requests of `context` tokens each."""
    chunks, behind, batches, contexts = int(p[5]), int(p[6]), int(p[7]), int(p[8])
    axis = SIZE + int(p[3]) + int(p[4])
    grid = axis + chunks + behind + batches + contexts
    i, x = _between(p, axis, chunks, chunk)
    j, y = _between(p, axis + chunks, behind, cached)
    m, u = _between(p, axis + chunks + behind, batches, decodes)
    n, v = _between(p, axis + chunks + behind + batches, contexts, context)
    time_s = 0.0
    for a in range(2):
        of_chunk = x if a == 1 else 1.0 - x
        for b in range(2):
            of_prompt = of_chunk * (y if b == 1 else 1.0 - y)
            for c in range(2):
                weight = of_prompt * (u if c == 1 else 1.0 - u)
                if weight != 0.0:
                    at = grid + (((i + a) * behind + j + b) * batches + m + c) * contexts + n
                    time_s += weight * (p[at] * (1.0 - v) + p[at + 1] * v)
    return max(time_s, 0.0)


@inlined
def _measured_s(p, prefills, tokens, attended, decodes, context):
    """Measured tables of a step's parts, each interpolated straight  [s].

    p[1] time of a step with prefill that is in no table    p[2] of a decode-only step
    p[3] D, p[4] S, p[5:9] lengths of the axes; behind p[SIZE]:
    D times of all that works token by token, at 0, 1 ... D - 1 tokens of the step
    S times of what is done once per request (projection to the vocabulary, sampling), at 0 ... S - 1 requests
    four axes: tokens of a chunk, cached tokens before it, decoding requests, KV tokens of each
    attention of all layers on the grid of these four, the last one fastest

    Of several chunks the first is read beside the decoding requests and the others by themselves, each with an equal
    share of the tokens and of `attended`.
    """
    start = SIZE + int(p[3])
    rest_s = _at(p, SIZE, int(p[3]), tokens + decodes) + _at(p, start, int(p[4]), prefills + decodes)
    each = context / decodes if decodes > 0 else 0.0
    if tokens <= 0:
        return p[2] + rest_s + _attention_s(p, 0.0, 0.0, decodes, each)
    chunk = tokens / prefills
    cached = max(0.0, 0.5 * (attended / tokens - chunk))
    attention_s = _attention_s(p, chunk, cached, decodes, each)
    if prefills > 1:
        attention_s += (prefills - 1) * _attention_s(p, chunk, cached, 0.0, 0.0)
    return p[1] + rest_s + attention_s


@inlined
def _law_s(p, prefills, tokens, attended, decodes, context):
    if p[FAMILY] == LINEAR:
        return _linear_s(p, tokens, attended, decodes, context)
    if p[FAMILY] == HYBRID:
        return _hybrid_s(p, prefills, tokens, attended, decodes, context)
    if p[FAMILY] == MEASURED:
        return _measured_s(p, prefills, tokens, attended, decodes, context)
    return _roofline_s(p, prefills, tokens, attended, decodes, context)


@compiled
def iteration_s(p, prefills, tokens, attended, decodes, context):
    """Return the time [s] of one iteration of the whole model (all pipeline stages, without hand-offs)."""
    if tokens <= 0 and decodes <= 0:
        return 0.0
    return (1.0 + p[17 if tokens > 0 else 18]) * _law_s(p, prefills, tokens, attended, decodes, context)


@compiled
def iterations_s(p, shapes, out):
    """Fill `out` with the time [s] of each row of `shapes`, whose columns are the sums of `BatchShape`: for fits."""
    for i in range(shapes.shape[0]):
        attended = shapes[i, 2] + 2.0 * p[PREFIX] * shapes[i, 5]
        out[i] = iteration_s(p, shapes[i, 0], shapes[i, 1], attended, shapes[i, 3], shapes[i, 4])
