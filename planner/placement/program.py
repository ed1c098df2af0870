"""The placement program: which patterns the pools hold, as a mixed-integer program in requests per second.

Sets
    c  candidates: an instance kind and its rate         b  blocks: some pipeline stages of c in one pool
    g  classes of interchangeable pools                  p  patterns: what a pool of class g can hold
    r  racks whose uplink can bind                       s  candidates too large for any pool: they span pools
Variables
    y[g,p]  in Z+   pools of class g that hold pattern p
    m[s]    in Z+   instances that span pools
    own[g]  >= 0    requests/s prefilled and decoded in the same pool of g: their KV meets no card
    out[g]  >= 0    requests/s whose KV leaves a pool of g through its cards
    into[g] >= 0    requests/s whose KV enters a pool of g
    stay[r] >= 0    requests/s whose KV goes from pool to pool inside rack r
Objective
    max_goodput     F = sum_g own[g] + out[g]; then least sum_g out[g]; then fewest GPUs
    min_gpus        fewest GPUs with F >= demand; then least sum_g out[g]
Constraints
    (1) sum_p y[g,p] <= pools of g
    (2) the seven rows of `FLOW_ROWS`, each a[g,row] . (out, own, into) <= sum_p limit[p,row] y[g,p]
    (3) sum_g out[g] = sum_g into[g]
    (4) sum_(g in r) out[g] - stay[r] <= uplink of r;  sum_(g in r) into[g] - stay[r] <= downlink of r
    (5) sum of the stages of s in all blocks = stages of s * m[s]
    (6) instances of c = counts[c], where counts are forced
    (7) F <= cap, or F >= demand
Aggregated candidates move no KV: F = sum of rates * y, and (2) to (4) fall away.

Why (2) is exact: one pool with rates P, D, of which P1 and D1 belong to instances that lie in it whole, and
cards that carry e out and i in, can do {out <= min(e,P), into <= min(i,D), own <= min(P1,D1), out+own <= P,
own+into <= D}. Every row is an interval of (out, own, into); the sum of such sets over many pools is
described by the rows below with summed right-hand sides, whichever bound is the tighter one in each pool. So
a class needs three flow variables, not three for each pattern.

What it leaves out, so that its bound stays a bound: which card a GPU is near to, and that the blocks of a
spanning instance send in step. `assign.py` settles both on the named GPUs, and its value is the one reported.

All rows are in units of the largest candidate rate. In bytes, solvers call wrong answers optimal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NamedTuple

import pulp

from planner.errors import InvariantError
from planner.placement.base import Candidate, Kind, Pool, Program, Site, site
from planner.placement.patterns import Block, Pattern, Sizes, blocks_of, fill, useful

FLOW_ROWS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 1, 1), (1, 2, 1))


@dataclass(frozen=True, slots=True)
class PoolClass:
    """Interchangeable pools and the patterns each of them can hold."""

    pools: tuple[Pool, ...]
    rack: str
    patterns: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The program as pulp holds it. All rates are divided by `scale_rps`."""

    lp: pulp.LpProblem
    scale_rps: float
    candidates: tuple[Candidate, ...]
    classes: tuple[PoolClass, ...]
    picks: tuple[tuple[pulp.LpVariable, ...], ...]
    rate: pulp.LpAffineExpression
    network: pulp.LpAffineExpression
    gpus: pulp.LpAffineExpression


class Units(NamedTuple):
    """Turns speeds into rates of the program: requests/s, divided by `scale_rps`."""

    scale_rps: float
    kv_bytes: float

    def rate(self, bytes_per_s: float) -> float:
        """Return the scaled rate of requests whose KV fits through; inf where requests have none."""
        return bytes_per_s / self.kv_bytes / self.scale_rps if self.kv_bytes > 0 else inf


def build(program: Program) -> Model:
    """Return the model of `program`, without an objective. Raises InvariantError where it makes no sense."""
    place = site(program.topology)
    limits = {candidate: place.most_rps(candidate, program.kv_bytes_per_request) for candidate in _wanted(program)}
    candidates = tuple(candidate._replace(rate_rps=rate) for candidate, rate in limits.items())
    classes = _classes(place, candidates, program.counts)
    scale = max((candidate.rate_rps for candidate in candidates), default=0.0) or 1.0
    lp = pulp.LpProblem("placement")
    picks = tuple(_picks(lp, g, each) for g, each in enumerate(classes))
    if any(candidate.phase == "aggregated" for candidate in candidates):
        rate, network = _total(classes, picks, lambda p: p.aggregated_rps / scale), pulp.LpAffineExpression()
    else:
        rate, network = _flows(lp, place, classes, picks, Units(scale, program.kv_bytes_per_request))
    _instances(lp, candidates, classes, picks, program.counts)
    if program.rate_rps is not None:
        wanted = program.rate_rps / scale
        lp += (rate <= wanted, "cap") if program.objective == "max_goodput" else (rate >= wanted, "demand")
    gpus = _total(classes, picks, lambda p: p.gpus)
    return Model(lp, scale, candidates, classes, picks, rate, network, gpus)


def _wanted(program: Program) -> tuple[Candidate, ...]:
    """Return the candidates that may be used: of a positive rate, or of a forced count."""
    given = program.candidates
    phases = {candidate.phase for candidate in given}
    if "aggregated" in phases and len(phases) > 1:
        raise InvariantError("candidates are all aggregated, or prefill and decode, not both")
    if len({candidate.kind for candidate in given}) < len(given):
        raise InvariantError("two candidates are of one kind")
    numbers = [candidate.rate_rps for candidate in given]
    numbers += [program.kv_bytes_per_request, program.rate_rps or 0.0]
    if not all(isfinite(number) and number >= 0 for number in numbers):
        raise InvariantError("candidates need finite rates and KV sizes, not below zero")
    if program.objective == "min_gpus" and program.rate_rps is None:
        raise InvariantError("min_gpus needs a rate_rps to reach")
    if program.counts is None:
        return tuple(candidate for candidate in given if candidate.rate_rps > 0)
    if unknown := sorted(str(kind) for kind in set(program.counts) - {candidate.kind for candidate in given}):
        raise InvariantError(f"counts of kinds that are no candidates: {unknown}")
    return tuple(candidate for candidate in given if program.counts.get(candidate.kind))


def _classes(place: Site, candidates: Sequence[Candidate], counts: Mapping[Kind, int] | None) -> tuple[PoolClass, ...]:
    groups = place.classes()
    blocks = blocks_of(candidates, [(pools[0].gpu, pools[0].sizes) for pools in groups])
    made, known = [], dict[Any, tuple[Pattern, ...]]()
    for pools, some in zip(groups, blocks, strict=True):
        key = (pools[0].gpu, pools[0].sizes)
        if key not in known:
            known[key] = tuple(_patterns(some, pools[0].sizes, candidates, counts))
        made.append(PoolClass(tuple(pools), place.rack(pools[0]), known[key]))
    return tuple(made)


def _patterns(
    blocks: Sequence[Block],
    sizes: Sizes,
    candidates: Sequence[Candidate],
    counts: Mapping[Kind, int] | None,
) -> list[Pattern]:
    if counts is None:
        return fill(useful(blocks, sizes, candidates), sizes, candidates)
    most = {}
    for block in blocks:
        candidate = candidates[block.candidate]
        most[block] = counts[candidate.kind] * candidate.layout.pp // block.stages
    return fill(blocks, sizes, candidates, most)


def _picks(lp: pulp.LpProblem, g: int, each: PoolClass) -> tuple[pulp.LpVariable, ...]:
    most = len(each.pools)
    picks = [lp.add_variable(f"y_{g}_{p}", 0, most, cat="Integer") for p in range(len(each.patterns))]
    if picks:
        lp += (pulp.lpSum(picks) <= most, f"pools_{g}")  # (1)
    return tuple(picks)


def _total(classes: Sequence[PoolClass], picks: Sequence[Sequence[pulp.LpVariable]], value: Any) -> Any:
    terms = []
    for each, some in zip(classes, picks, strict=True):
        terms += [value(p) * y for p, y in zip(each.patterns, some, strict=True) if value(p)]
    return pulp.lpSum(terms)


def _flows(
    lp: pulp.LpProblem,
    place: Site,
    classes: Sequence[PoolClass],
    picks: Sequence[Sequence[pulp.LpVariable]],
    units: Units,
) -> tuple[pulp.LpAffineExpression, pulp.LpAffineExpression]:
    """Add (2) to (4); return the total and the network rate."""
    names = ("out", "own", "into")
    flows = [[lp.add_variable(f"{name}_{g}", 0) for name in names] for g in range(len(classes))]
    for g, (each, some) in enumerate(zip(classes, picks, strict=True)):
        pool = each.pools[0]
        speeds = units.rate(pool.egress_bytes_per_s), units.rate(pool.ingress_bytes_per_s)
        limits = [flow_limits(pattern, units.scale_rps, *speeds) for pattern in each.patterns]
        for row, weights in enumerate(FLOW_ROWS):
            used = pulp.lpSum(w * flow for w, flow in zip(weights, flows[g], strict=True) if w)
            given = pulp.lpSum(limit[row] * y for limit, y in zip(limits, some, strict=True) if limit[row])
            lp += (used <= given, f"flow_{g}_{row}")  # (2)
    network = pulp.lpSum(out for out, _, _ in flows)
    lp += (network == pulp.lpSum(into for _, _, into in flows), "conserve")  # (3)
    for r, (rack, uplink) in enumerate(place.uplinks.items()):  # (4)
        inside = [flow for flow, each in zip(flows, classes, strict=True) if each.rack == rack]
        stay = lp.add_variable(f"stay_{r}", 0)
        for end, speed in ((0, uplink.egress_bytes_per_s), (2, uplink.ingress_bytes_per_s)):
            crossing = pulp.lpSum(flow[end] for flow in inside)
            lp += (stay <= crossing, f"stay_{r}_{end}")
            if units.rate(speed) < inf:
                lp += (crossing - stay <= units.rate(speed), f"uplink_{r}_{end}")
    return pulp.lpSum(own for _, own, _ in flows) + network, network


def flow_limits(pattern: Pattern, scale_rps: float, egress: float, ingress: float) -> tuple[float, ...]:
    """Return the right-hand side of each of `FLOW_ROWS` for one pool with this pattern."""
    prefill, decode = pattern.prefill_rps / scale_rps, pattern.decode_rps / scale_rps
    out, into = min(egress, prefill), min(ingress, decode)
    own = min(pattern.own_prefill_rps, pattern.own_decode_rps) / scale_rps
    sent, received = min(prefill, out + own), min(decode, into + own)
    either = min(sent + into, out + received)
    return (out, own, into, sent, received, either, min(sent + received, own + either))


def _instances(
    lp: pulp.LpProblem,
    candidates: Sequence[Candidate],
    classes: Sequence[PoolClass],
    picks: Sequence[Sequence[pulp.LpVariable]],
    counts: Mapping[Kind, int] | None,
) -> None:
    """Add (5) and (6). A forced kind that no pool can hold makes the program infeasible, as it must."""
    stages: list[list[Any]] = [[] for _ in candidates]
    spanning: set[int] = set()
    for each, some in zip(classes, picks, strict=True):
        for pattern, y in zip(each.patterns, some, strict=True):
            for block, number in sorted(pattern.counts.items()):
                stages[block.candidate].append(number * block.stages * y)
                if block.stages < candidates[block.candidate].layout.pp:
                    spanning.add(block.candidate)
    for c, candidate in enumerate(candidates):
        placed, pp = pulp.lpSum(stages[c]), candidate.layout.pp
        if counts is not None:
            lp += (placed == pp * counts[candidate.kind], f"count_{c}")
        elif c in spanning:
            lp += (placed == pp * lp.add_variable(f"m_{c}", 0, cat="Integer"), f"stages_{c}")
