"""The placement program against brute force, its check against corruption, and clusters that look simple."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import inf, isclose

import numpy as np
import pulp
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from planner.errors import InvariantError
from planner.placement.assign import assign, place
from planner.placement.base import (
    Candidate,
    KvFlow,
    Nic,
    Placement,
    Pool,
    Program,
    Site,
    Unplaceable,
    Uplink,
    site,
)
from planner.placement.check import check
from planner.placement.greedy import place_greedily
from planner.placement.patterns import Pattern, fill, pack, useful, blocks_of
from planner.placement.program import build, flow_limits
from planner.placement.solve import Effort, capacity_bound, optimise, solve
from planner.specs.base import parse, preset_names
from planner.specs.layout import Layout
from planner.specs.topology import GpuId, Topology, read_cluster

KV = 1e9
"""KV bytes per request in these tests, so that 1 GB/s carries 1 request/s."""


def pool(name: str, sizes: Sequence[int], gpu: str = "a", out: float = inf, into: float = inf, rack: str = "") -> Pool:
    """Return a pool with fast groups of `sizes` and one card of `out` and `into` requests/s."""
    ids = iter(GpuId(name, i) for i in range(sum(sizes)))
    groups = tuple(tuple(next(ids) for _ in range(size)) for size in sizes)
    card = Nic(tuple(gpu for group in groups for gpu in group), out * KV, into * KV)
    return Pool(name, gpu, groups, (card,), rack)


def cluster(text: str) -> Topology:
    return read_cluster(parse(text, "cluster.yaml"))


def kinds(gpu: str, prefill: dict[tuple[int, int], float], decode: dict[tuple[int, int], float]) -> tuple[Candidate, ...]:
    """Return candidates out of {(tp, pp): rate}."""
    made = [Candidate("prefill", Layout(*layout), gpu, rate) for layout, rate in prefill.items()]
    return (*made, *(Candidate("decode", Layout(*layout), gpu, rate) for layout, rate in decode.items()))


# --- brute force: every placement on named pools, flows by maximum flow. It shares no code with the program. ---


def contents(pool: Pool, candidates: Sequence[Candidate]) -> list[tuple[int, ...]]:
    """Return every multiset of candidates (by number) that packs into the pool."""
    ours = [c for c, each in enumerate(candidates) if each.gpu == pool.gpu]
    found: list[tuple[int, ...]] = []
    for size in range(len(pool.gpus) + 1):
        for some in combinations_with_replacement(ours, size):
            tps = [candidates[c].layout.tp for c in some for _ in range(candidates[c].layout.pp)]
            if packs([len(group) for group in pool.groups], tps):
                found.append(some)
    return found


def packs(groups: list[int], tps: list[int]) -> bool:
    """Try every group for every tensor-parallel group; those larger than all groups take what is left."""
    if sum(tps) > sum(groups):
        return False
    small = [tp for tp in tps if tp <= max(groups)]
    for where in product(range(len(groups)), repeat=len(small)):
        left = list(groups)
        for tp, g in zip(small, where, strict=True):
            left[g] -= tp
        if min(left) >= 0:
            return True
    return False


def most_flow(site: Site, held: Sequence[tuple[int, ...]], candidates: Sequence[Candidate]) -> int:
    """Return the most requests/s: prefill -> [own decode | card -> (rack) -> card -> decode], whole numbers."""
    rack = {r: i for i, r in enumerate(site.uplinks)}
    n, free = len(site.pools), 10**7
    source, sink, flat, spine = 4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3
    leaf = 4 * n + 4
    arcs: dict[tuple[int, int], int] = {}
    for u, pool in enumerate(site.pools):
        rate = {phase: 0.0 for phase in ("prefill", "decode")}
        for c in held[u]:
            rate[candidates[c].phase] += candidates[c].rate_rps
        out, into = pool.egress_bytes_per_s / KV, pool.ingress_bytes_per_s / KV
        arcs[source, u], arcs[n + u, sink] = round(rate["prefill"]), round(rate["decode"])
        arcs[u, n + u] = free
        arcs[u, 2 * n + u] = round(min(out, free))
        arcs[3 * n + u, n + u] = round(min(into, free))
        # a rack is two points, so that what comes down never goes up again
        up, down = (leaf + 2 * rack[pool.rack], leaf + 2 * rack[pool.rack] + 1) if pool.rack in rack else (spine, spine)
        arcs[2 * n + u, up] = arcs[down, 3 * n + u] = free
    for r, i in rack.items():
        arcs[leaf + 2 * i, leaf + 2 * i + 1] = free
        arcs[leaf + 2 * i, spine] = round(site.uplinks[r].egress_bytes_per_s / KV)
        arcs[spine, leaf + 2 * i + 1] = round(site.uplinks[r].ingress_bytes_per_s / KV)
    size = max(flat, leaf + 2 * len(rack)) + 1
    rows, columns = zip(*arcs, strict=True)
    graph = csr_array((np.array(list(arcs.values()), np.int32), (rows, columns)), shape=(size, size))
    return int(maximum_flow(graph, source, sink).flow_value)


def every_placement(site: Site, candidates: Sequence[Candidate]) -> Iterator[tuple[float, int, tuple[tuple[int, ...], ...]]]:
    """Yield (upper bound on the rate, GPUs, contents of each pool) of all placements."""
    gpus = [each.layout.gpus for each in candidates]
    for held in product(*(contents(pool, candidates) for pool in site.pools)):
        flat = [c for some in held for c in some]
        sums = [sum(candidates[c].rate_rps for c in flat if candidates[c].phase == p) for p in ("prefill", "decode")]
        yield min(sums), sum(gpus[c] for c in flat), held


def brute_force(site: Site, candidates: Sequence[Candidate]) -> int:
    best = 0
    for bound, _, held in sorted(every_placement(site, candidates), key=lambda each: -each[0]):
        if bound <= best:
            break
        best = max(best, most_flow(site, held, candidates))
    return best


def fewest_gpus(site: Site, candidates: Sequence[Candidate], demand: float) -> int | None:
    for bound, gpus, held in sorted(every_placement(site, candidates), key=lambda each: (each[1], -each[0])):
        if bound >= demand and most_flow(site, held, candidates) >= demand:
            return gpus
    return None


def random_case(seed: int) -> tuple[Site, tuple[Candidate, ...]]:
    """Return a small cluster and candidates with whole rates: all sizes, types and speeds, also starving ones."""
    rng = random.Random(seed)
    types = ["a", "b"] if rng.random() < 0.4 else ["a"]
    shapes = [(4,), (2, 2), (3,), (2, 1), (2,), (1, 1), (1,)]
    speed = lambda: rng.choice([0, 1, 3, 7, 15, 40, 10**6])  # noqa: E731
    racks = rng.random() < 0.3
    alike = rng.random() < 0.5  # equal pools make classes with more than one member
    shape, out, into = rng.choice(shapes), speed(), speed()
    pools = []
    for u in range(rng.choice([1, 2, 2, 3])):
        if not alike:
            shape, out, into = rng.choice(shapes[2:] if u == 2 else shapes), speed(), speed()
        rack = rng.choice(["r0", "r1"]) if racks else ""
        pools.append(pool(f"n{u}", shape, rng.choice(types), out, into, rack))
    uplinks = {r: Uplink(rng.choice([0, 2, 9]) * KV, rng.choice([0, 2, 9]) * KV) for r in ("r0", "r1") if racks}
    layouts = [(1, 1), (2, 1), (1, 2), (3, 1), (4, 1), (2, 2)]
    made = []
    for gpu in types:
        for phase in ("prefill", "decode"):
            for layout in sorted(rng.sample(layouts, rng.choice([1, 2, 2, 3]))):
                rate = rng.randint(1, 6) * layout[0] * layout[1] + rng.randint(0, 3)
                made.append(Candidate(phase, Layout(*layout), gpu, rate))
    keep = [c for c in made if any(fits_somewhere(c, each) for each in pools)]
    return Site(tuple(pools), uplinks), tuple(keep)


def fits_somewhere(candidate: Candidate, pool: Pool) -> bool:
    sizes = [len(group) for group in pool.groups]
    return candidate.gpu == pool.gpu and packs(sizes, [candidate.layout.tp] * candidate.layout.pp)


def agrees_with_brute_force(seed: int) -> float:
    """Assert that the program finds exactly the best rate of a random case; return it."""
    where, candidates = random_case(seed)
    best = brute_force(where, candidates)
    program = Program(where, candidates, KV, gap=0.0)
    if best == 0:
        with pytest.raises(Unplaceable):
            place(program)
        return 0.0
    placement = place(program)
    assert placement.value_rps == pytest.approx(best, rel=1e-6), seed
    assert placement.bound_rps == pytest.approx(best, rel=1e-6), seed
    assert capacity_bound(where, candidates, KV) >= best * (1 - 1e-6), seed
    return best


def test_the_program_equals_brute_force_on_random_small_clusters():
    found = [agrees_with_brute_force(seed) for seed in range(380)]
    assert sum(value > 0 for value in found) >= 200  # most of the cases say something


@pytest.mark.slow
def test_the_program_equals_brute_force_on_many_more_clusters():
    for seed in range(1000, 2500):
        agrees_with_brute_force(seed)
