"""The laws of one iteration, compiled. Every cost model ends up as one vector of numbers for `iteration_s`.

The simulators call this once per step, tens of millions of times per plan; therefore no objects here. A
family is a number in `p[FAMILY]` and a law below. To add one: a constant, a law, and a branch in
`iteration_s`.

The shape of an iteration is five sums over its requests (n new tokens and k cached tokens of each):
    prefills    requests that prefill                decodes   requests that decode one token each
    tokens      sum of n                             context   sum of the decoding requests' KV tokens
    attended    sum of n^2 + 2 n k   (twice the query-key pairs of causal attention)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import exp, log, log2

import numpy as np

from planner.compiled import compiled, inlined

FAMILY = 0
LINEAR, ROOFLINE, HYBRID = 0, 1, 2

# LINEAR: p[1:4] prefill a, b, c; p[4:7] decode a, b, c below the threshold; p[7:10] from it on; p[10]
# threshold. ROOFLINE: see `_roofline_s`. HYBRID: a roofline, then two grids of residuals, see `_residual`.
SIZE = 20
"""Numbers of a law before its grids."""
SLOWER = 17, 18
"""Of any law: by which share steps with prefill, and decode-only steps, take longer (to ask what an error would do)."""
LONG, SHORT = 14, 10
"""Nodes of a residual grid: 2^4 to 2^17 tokens, 2^0 to 2^9 requests."""
FIRST_LONG = 4
GRID = LONG * SHORT
FAMILIES = {LINEAR: ("linear", SIZE), ROOFLINE: ("roofline", SIZE), HYBRID: ("hybrid", SIZE + 2 * GRID)}
"""Name and least length of a vector, by family. More numbers may follow, up to `TABLE`; they are not read."""
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
    found = np.zeros((len(laws), TABLE + 2 * (_NODES + 2)))
    for row, p in zip(found, laws, strict=True):
        row[: min(len(p), TABLE)] = p[:TABLE]
        row[TABLE:] = _table(2.0 if p[FAMILY] == LINEAR else float(p[SHARPNESS]))
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
def _law_s(p, prefills, tokens, attended, decodes, context):
    if p[FAMILY] == LINEAR:
        return _linear_s(p, tokens, attended, decodes, context)
    if p[FAMILY] == HYBRID:
        return _hybrid_s(p, prefills, tokens, attended, decodes, context)
    return _roofline_s(p, prefills, tokens, attended, decodes, context)


@compiled
def iteration_s(p, prefills, tokens, attended, decodes, context):
    """Return the time [s] of one iteration of the whole model (all pipeline stages, without hand-offs)."""
    if tokens <= 0 and decodes <= 0:
        return 0.0
    return (1.0 + p[17 if tokens > 0 else 18]) * _law_s(p, prefills, tokens, attended, decodes, context)


@compiled
def iterations_s(p, shapes, out):
    """Fill `out` with the time [s] of each row of `shapes`, whose columns are the five sums: for fits."""
    for i in range(shapes.shape[0]):
        out[i] = iteration_s(p, shapes[i, 0], shapes[i, 1], shapes[i, 2], shapes[i, 3], shapes[i, 4])
