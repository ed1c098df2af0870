"""The placement program against brute force, its check against corruption, and clusters that look simple."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import inf

import numpy as np
import pulp
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from planner.errors import InvariantError
from planner.placement.assign import place
from planner.placement.base import (
    Candidate,
    Nic,
    Placement,
    Pool,
    Program,
    Site,
    Unplaceable,
    Uplink,
)
from planner.placement.check import check
from planner.placement.greedy import place_greedily
from planner.placement.patterns import Pattern, blocks_of, fill, pack, useful
from planner.placement.program import FLOW_ROWS, build, flow_limits
from planner.placement.solve import Effort, capacity_bound, optimise
from planner.specs.base import Document, parse, preset_names
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


def kinds(
    gpu: str, prefill: dict[tuple[int, int], float], decode: dict[tuple[int, int], float]
) -> tuple[Candidate, ...]:
    """Return candidates out of {(tp, pp): rate}."""
    made = [Candidate("prefill", Layout(*layout), gpu, rate) for layout, rate in prefill.items()]
    return (*made, *(Candidate("decode", Layout(*layout), gpu, rate) for layout, rate in decode.items()))


H100 = kinds(
    "a",
    {(1, 1): 0.4, (2, 1): 0.95, (4, 1): 2.1, (8, 1): 3.9, (4, 2): 4.0},
    {(1, 1): 0.4, (2, 1): 1.0, (4, 1): 2.6, (8, 1): 6.0},
)


# --- brute force: every placement on named pools, flows by maximum flow; no code shared with the program ---


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
    """Return the most requests/s: prefill -> [own decode | card -> rack -> card -> decode], whole numbers."""
    rack = {r: i for i, r in enumerate(site.uplinks)}
    n, free = len(site.pools), 10**7
    source, sink, spine, leaf = 4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3
    arcs: dict[tuple[int, int], int] = {}
    for u, pool in enumerate(site.pools):
        rate = dict.fromkeys(("prefill", "decode"), 0.0)
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
    size = leaf + 2 * len(rack)
    rows, columns = zip(*arcs, strict=True)
    graph = csr_array((np.array(list(arcs.values()), np.int32), (rows, columns)), shape=(size, size))
    return int(maximum_flow(graph, source, sink).flow_value)


def every_placement(
    site: Site, candidates: Sequence[Candidate]
) -> Iterator[tuple[float, int, tuple[tuple[int, ...], ...]]]:
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
    """Return a small cluster and candidates with whole rates, of all sizes, types and (starving) speeds."""
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
    assert placement.bound_rps == pytest.approx(best, rel=1e-5), seed  # as exact as HiGHS states a bound
    assert capacity_bound(where, candidates, KV) >= best * (1 - 1e-6), seed
    return best


def test_the_program_equals_brute_force_on_random_small_clusters():
    found = [agrees_with_brute_force(seed) for seed in range(360)]
    assert sum(value > 0 for value in found) >= 200  # in the others no KV can flow, and both say so


@pytest.mark.slow
def test_the_program_equals_brute_force_on_many_more_clusters():
    for seed in range(1000, 2500):
        agrees_with_brute_force(seed)


def test_the_fewest_gpus_equal_brute_force():
    reached = 0
    for seed in range(80):
        where, candidates = random_case(5000 + seed)
        demand = random.Random(seed).choice([3, 5, 8, 12])
        least = fewest_gpus(where, candidates, demand)
        program = Program(where, candidates, KV, "min_gpus", float(demand), gap=0.0)
        if least is None:
            with pytest.raises(Unplaceable):
                place(program)
            continue
        placement = place(program)
        assert placement.gpus == least == placement.bound_gpus, seed
        assert placement.value_rps == pytest.approx(demand, rel=1e-6), seed
        reached += 1
    assert reached > 30


def least_network(site: Site, held: Sequence[tuple[int, ...]], candidates: Sequence[Candidate], rate: float) -> float:
    """Return the least requests/s between pools at a total of `rate`; inf when it does not fit (no racks)."""
    n = len(site.pools)
    sums = [
        [sum(candidates[c].rate_rps for c in some if candidates[c].phase == p) for some in held]
        for p in ("prefill", "decode")
    ]
    pairs = list(product(range(n), repeat=2))
    rows, limits = [], []
    for u in range(n):
        for end, pool_rate in enumerate((sums[0][u], sums[1][u])):
            card = (site.pools[u].egress_bytes_per_s, site.pools[u].ingress_bytes_per_s)[end] / KV
            rows += [
                [float(pair[end] == u) for pair in pairs],
                [float(pair[end] == u and pair[0] != pair[1]) for pair in pairs],
            ]
            limits += [pool_rate, min(card, 1e7)]
    crossing = [float(u != v) for u, v in pairs]
    found = linprog(crossing, A_ub=rows, b_ub=limits, A_eq=[[1.0] * len(pairs)], b_eq=[rate])
    return float(found.fun) if found.status == 0 else inf


def test_ties_go_to_the_least_network_traffic_and_then_to_the_fewest_gpus():
    compared = 0
    for seed in range(7000, 7060):
        where, candidates = random_case(seed)
        best = brute_force(where, candidates)
        if where.uplinks or best == 0 or len(where.pools) > 2:
            continue
        ties = [
            (round(least_network(where, held, candidates, best), 5), gpus)
            for bound, gpus, held in every_placement(where, candidates)
            if bound >= best and most_flow(where, held, candidates) == best
        ]
        placement = place(Program(where, candidates, KV, gap=0.0))
        home = {gpu: each.name for each in where.pools for gpu in each.gpus}
        at = {each.name: home[each.gpus[0]] for each in placement.instances}
        crossing = sum(flow.rate_rps for flow in placement.flows if at[flow.prefill] != at[flow.decode])
        network, gpus = min(ties)
        assert crossing == pytest.approx(network, abs=1e-4), seed
        assert placement.gpus == gpus, seed
        compared += 1
    assert compared > 15


def test_summed_flow_rows_describe_exactly_what_unequal_pools_can_do_together():
    # the greatest c . (out, own, into) over the summed rows equals the sum of each pool's own greatest
    rng = random.Random(3)
    for _ in range(150):
        limits, alone = np.zeros(7), 0.0
        goal = [rng.choice([0.0, 1.0, 1.0, 2.0, rng.random()]) for _ in range(3)]
        for _ in range(rng.randint(1, 4)):
            p, d, e, i = (rng.choice([0, 1, 2, 5, 9]) * 1.0 for _ in range(4))
            p1, d1 = p * rng.choice([1, 1, 0.5, 0]), d * rng.choice([1, 1, 0.5, 0])
            pattern = Pattern((), 1, p, d, p1, d1)
            limits += np.array(flow_limits(pattern, 1.0, e, i))
            rows = [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 1, 0], [0, 1, 1]]
            alone += -linprog([-c for c in goal], A_ub=rows, b_ub=[min(e, p), min(i, d), min(p1, d1), p, d]).fun
        together = -linprog([-c for c in goal], A_ub=FLOW_ROWS, b_ub=limits).fun
        assert together == pytest.approx(alone, abs=1e-7), goal


# --- patterns ---


def test_packing_finds_a_way_exactly_where_there_is_one():
    rng = random.Random(5)
    for _ in range(400):
        sizes = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
        tps = tuple(sorted((rng.randint(1, 6) for _ in range(rng.randint(1, 5))), reverse=True))
        packed = pack(sizes, tps)
        assert (packed is not None) == packs(list(sizes), list(tps)), (sizes, tps)
        if packed is not None:
            assert [sum(take) for take in packed] == list(tps)
            assert all(sum(column) <= size for column, size in zip(zip(*packed, strict=True), sizes, strict=True))


def test_patterns_stay_few_however_many_kinds_there_are():
    # 2 phases x 10 layouts fill 8 GPUs in 784 ways; only the split into prefill, decode and idle matters: 44
    rng = random.Random(1)
    layouts = [Layout(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8]
    made = tuple(
        Candidate(p, each, "a", each.gpus * rng.uniform(0.7, 1.3)) for p in ("prefill", "decode") for each in layouts
    )
    (blocks,) = blocks_of(made, [("a", (8,))])
    assert len(fill(useful(blocks, (8,), made), (8,), made)) == 44 == len(fill(blocks, (8,), made))


# --- the solver ---


def test_rows_are_scaled_to_requests_never_bytes():
    # 70 B model, 1.3 GB of KV, 50 GB/s cards, rates of 0.4 to 6 requests/s: no coefficient leaves 1e-4 .. 1e4
    where = Site(tuple(pool(f"n{i}", (8,), out=50.0, into=50.0) for i in range(16)))
    program = Program(where, H100, 1.3e9)
    model = build(program)
    sizes = [abs(value) for row in model.lp.constraints() for value in row.values() if value]
    sizes += [abs(row.constant) for row in model.lp.constraints() if row.constant]
    assert min(sizes) >= 1e-4 and max(sizes) <= 1e4


def test_the_same_input_gives_the_same_placement():
    pools = tuple(pool(f"n{i}", (8,), out=2.0, into=2.0, rack=f"r{i % 2}") for i in range(6))
    where = Site(pools, {"r0": Uplink(KV, KV), "r1": Uplink(KV, KV)})
    for program in (Program(where, H100, KV), Program(where, H100, KV, "min_gpus", 5.0)):
        first, second = (place(program) for _ in range(2))
        assert replace(first, seconds=0.0) == replace(second, seconds=0.0)


def test_the_solver_writes_nothing(capfd: pytest.CaptureFixture[str]):
    where = Site((pool("n0", (8,)),))
    place(Program(where, H100, KV))
    assert capfd.readouterr() == ("", "")


def test_another_thread_count_in_the_same_process_does_no_harm():
    lp = pulp.LpProblem("other")
    x = lp.add_variable("x", 0, 3.5, cat="Integer")
    lp.setObjective(-1.0 * x)
    lp.solve(pulp.HiGHS(msg=False, threads=2))
    assert place(Program(Site((pool("n0", (8,)),)), H100, KV)).value_rps > 0


def test_a_run_stopped_at_its_first_node_still_states_a_true_bound():
    where, candidates = random_case(21)
    model = build(Program(where, candidates, KV))
    stopped = optimise(model.lp, model.rate, pulp.LpMaximize, Effort(0.0, 60.0, 1))
    best = brute_force(where, candidates) / model.scale_rps
    assert stopped.bound >= best * (1 - 1e-6) and stopped.value <= best * (1 + 1e-6)


@pytest.mark.parametrize("nodes", [16, 64, 128, 256])
def test_large_clusters_solve_in_seconds_with_a_proven_gap(nodes: int):
    where = Site(tuple(pool(f"n{i}", (8,), out=20.0, into=20.0) for i in range(nodes)))
    start = time.process_time()
    placement = place(Program(where, H100, KV))
    assert time.process_time() - start < 4
    assert placement.gap <= 1e-3


def test_racks_with_thin_uplinks_still_solve_in_seconds():
    # 64 nodes in 8 racks, 60 requests/s per uplink: KV that stays in its rack does not meet it
    pools = tuple(pool(f"n{i}", (8,), out=20.0, into=20.0, rack=f"r{i % 8}") for i in range(64))
    where = Site(pools, {f"r{r}": Uplink(60 * KV, 60 * KV) for r in range(8)})
    placement = place(Program(where, H100, KV))
    assert placement.gap <= 1e-3 and placement.seconds < 4


# --- instances that span pools ---


def spanning_best(site: Site, candidates: Sequence[Candidate]) -> float:
    """Return the best rate on an ample network where kinds too large for every pool may use any free GPUs."""
    large = [c for c in candidates if not any(fits_somewhere(c, each) for each in site.pools)]
    small = [c for c in candidates if c not in large]
    best = 0.0
    for held in product(*(parts(each, small, large) for each in site.pools)):
        rate = {"prefill": 0.0, "decode": 0.0}
        stages = dict.fromkeys(large, 0)
        for some in held:
            for candidate in some:
                if candidate in stages:
                    stages[candidate] += 1
                else:
                    rate[candidate.phase] += candidate.rate_rps
        for candidate, number in stages.items():
            rate[candidate.phase] += number // candidate.layout.pp * candidate.rate_rps
        best = max(best, min(rate.values()))
    return best


def parts(pool: Pool, small: Sequence[Candidate], large: Sequence[Candidate]) -> list[tuple[Candidate, ...]]:
    """Return every multiset of whole small candidates and single stages of large ones that packs."""
    found = []
    for size in range(len(pool.gpus) + 1):
        for some in combinations_with_replacement([*small, *large], size):
            tps = [c.layout.tp for c in some for _ in range(1 if c in large else c.layout.pp)]
            if packs([len(group) for group in pool.groups], tps):
                found.append(some)
    return found


def test_instances_too_large_for_a_pool_span_several_as_brute_force_does():
    rng = random.Random(9)
    spanned = 0
    for _ in range(40):
        where = Site(tuple(pool(f"n{i}", rng.choice([(2,), (4,), (2, 2), (3,)])) for i in range(rng.choice([2, 3]))))
        large = rng.choice([Layout(2, 3), Layout(4, 2), Layout(2, 4), Layout(1, 5), Layout(3, 2)])
        made = (
            Candidate("prefill", large, "a", float(rng.randint(20, 40))),
            Candidate("prefill", Layout(2), "a", float(rng.randint(1, 8))),
            Candidate("decode", Layout(1), "a", float(rng.randint(4, 12))),
        )
        best = spanning_best(where, made)
        if best == 0:
            continue
        placement = place(Program(where, made, KV, gap=0.0))
        assert placement.value_rps <= best * (1 + 1e-6)
        assert placement.value_rps == pytest.approx(best, rel=1e-6)
        homes = [{gpu.node for gpu in each.gpus} for each in placement.instances]
        spanned += any(len(nodes) > 1 for nodes in homes)
    assert spanned > 5


# --- real topologies ---


def of(candidates: Sequence[Candidate], gpu: str, largest: int = 8) -> tuple[Candidate, ...]:
    return tuple(c._replace(gpu=gpu) for c in candidates if c.layout.tp <= largest)


@pytest.mark.parametrize("name", preset_names("clusters"))
@pytest.mark.parametrize("kv_bytes", [1e8, 2e9])
def test_every_shipped_cluster_takes_a_placement_that_passes_its_check(name: str, kv_bytes: float):
    topology = read_cluster(Document(name, "problem.yaml"))
    made = of(H100, topology.nodes[0].gpu.name)
    placement = place(Program(topology, made, kv_bytes))
    greedy = place_greedily(Program(topology, made, kv_bytes))
    assert placement.value_rps >= greedy.value_rps * (1 - 1e-3)
    assert placement.bound_rps <= capacity_bound(topology, made, kv_bytes) * (1 + 1e-3)


A40 = """
nodes:
  - name: box
    gpu: a40
    gpus: 8
    links: {kind: nvlink-pairs, bytes_per_s: 56.25GB/s}
"""


def test_tensor_parallel_pairs_sit_on_nvlink_bridges():
    topology = cluster(A40)
    made = kinds("a40", {(2, 1): 3.0}, {(2, 1): 2.9, (1, 1): 1.0})
    placement = place(Program(topology, made, 1e8))
    for each in placement.instances:
        for stage in each.stages:
            assert len(stage) == 1 or {gpu.index // 2 for gpu in stage} == {stage[0].index // 2}
    # two prefill and two decode pairs: 2 x 2.9 requests/s beats any mix with single-GPU decode
    assert placement.value_rps == pytest.approx(5.8)


def test_prefill_and_decode_on_single_gpus_share_a_bridge():
    topology = cluster(A40)
    placement = place(Program(topology, kinds("a40", {(1, 1): 2.0}, {(1, 1): 2.0}), 1e8))
    at = {each.name: each.gpus[0].index // 2 for each in placement.instances}
    assert placement.value_rps == pytest.approx(8.0)
    assert all(at[flow.prefill] == at[flow.decode] for flow in placement.flows)


def test_a_group_larger_than_every_bridge_may_still_use_the_whole_node():
    topology = cluster(A40)
    placement = place(Program(topology, kinds("a40", {(4, 1): 3.0}, {(4, 1): 3.0}), 1e8))
    assert {each.layout for each in placement.instances} == {Layout(4)}
    assert all(len({gpu.index // 2 for gpu in each.gpus}) == 2 for each in placement.instances)


def trays(domains: int) -> Topology:
    lines = [
        f"  - {{name: t{d}x, count: 18, gpu: gb200, gpus: 4, nvlink_domain: rack{d}, "
        "nics: {count: 4, bytes_per_s: 400Gb/s, kind: infiniband}}"
        for d in range(domains)
    ]
    return cluster("nodes:\n" + "\n".join(lines))


def test_an_nvlink_domain_takes_groups_across_trays_but_never_across_domains():
    topology = trays(2)
    made = kinds("gb200", {(8, 1): 10.0}, {(16, 1): 21.0})
    placement = place(Program(topology, made, 1e9))
    for each in placement.instances:
        assert len({gpu.node[:2] for gpu in each.gpus}) == 1
        assert len({gpu.node for gpu in each.gpus}) == each.layout.tp // 4
    # a domain of 72 GPUs holds 9 x TP8, or 9 - 2 d beside d decode groups of 16. Over both domains, 4 decode
    # and 10 prefill make min(84, 100) = 84; 5 decode leave 8 prefill, 80.
    assert placement.value_rps == pytest.approx(84.0)


UNEVEN = """
nodes:
  - name: n0
    gpu: H100
    gpus: [0, 1, 2, 3, 4, 5, 6, 7]
    links: {kind: nvswitch}
    nics: {count: 8, bytes_per_s: 400Gb/s, kind: infiniband}
  - name: n1
    gpu: H100
    gpus: [0, 1, 2, 3, 4, 5, 6, 7]
    links: {kind: nvswitch}
    nics: {count: 4, bytes_per_s: 200Gb/s, kind: infiniband}
  - name: n2   # GPU 5 drained
    gpu: H100
    gpus: [0, 1, 2, 3, 4, 6, 7]
    links: {kind: nvswitch}
    nics: {count: 8, bytes_per_s: 400Gb/s, kind: infiniband}
"""


@pytest.mark.parametrize("largest", [2, 4, 8])
def test_case_21_the_node_with_a_drained_gpu_never_hosts_eight(largest: int):
    topology = cluster(UNEVEN)
    layouts = [tp for tp in (2, 4, 8) if tp <= largest]
    # the larger the group the better per GPU, so that only the missing GPU keeps TP8 off n2
    made = tuple(Candidate("aggregated", Layout(tp), "h100-80gb", tp**1.2) for tp in layouts)
    placement = place(Program(topology, made))
    on_n2 = [each for each in placement.instances if each.gpus[0].node == "n2"]
    assert sum(each.layout.gpus for each in on_n2) == 6  # TP4 + TP2, or three TP2: one GPU stays idle
    assert all(gpu.index != 5 for each in on_n2 for gpu in each.gpus)
    assert [gpu.node for gpu in placement.idle] == ["n2"]
    assert (max(each.layout.tp for each in on_n2)) == min(largest, 4)


def test_case_21_the_kv_heavy_side_avoids_the_slow_cards():
    # one prefill TP8 of 10 requests/s and 30 GB of KV each: n1 sends 74 GB/s at most, n0 296 GB/s (at 74 %)
    topology = cluster(UNEVEN)
    made = kinds("h100-80gb", {(8, 1): 10.0}, {(4, 1): 10.0})
    counts = {("prefill", Layout(8), "h100-80gb"): 1, ("decode", Layout(4), "h100-80gb"): 1}
    placement = place(Program(topology, made, 30e9, counts=counts))
    nodes = {each.phase: each.gpus[0].node for each in placement.instances}
    assert nodes == {"prefill": "n0", "decode": "n2"}


def test_five_gpus_make_two_pairs_and_leave_the_odd_one_alone():
    topology = cluster(
        """
nodes:
  - name: box
    gpu: rtx4090
    gpus: 5
    links: {kind: pcie, roots: [{gpus: [0]}, {gpus: [1, 2]}, {gpus: [3, 4]}]}
"""
    )
    placement = place(Program(topology, kinds("rtx4090", {(2, 1): 1.0}, {(2, 1): 1.0}), 1e8))
    assert {frozenset(gpu.index for gpu in each.gpus) for each in placement.instances} == {
        frozenset({1, 2}),
        frozenset({3, 4}),
    }
    assert [gpu.index for gpu in placement.idle] == [0]


def test_two_tensor_parallel_nodes_make_one_pipeline_and_its_kv_counts_against_the_cards():
    topology = cluster(
        "nodes: [{name: n, count: 4, gpu: H100, gpus: 8, links: {kind: nvswitch}, "
        "nics: {count: 8, bytes_per_s: 400Gb/s, kind: infiniband}}]"
    )
    made = kinds("h100-80gb", {(8, 2): 4.0}, {(8, 2): 4.0})
    placement = place(Program(topology, made, 1e9))
    assert placement.value_rps == pytest.approx(4.0)
    assert [len({gpu.node for gpu in stage}) for each in placement.instances for stage in each.stages] == [1] * 4
    # 296 GB/s per node at 74 %, half of the KV per node: two nodes send 592 GB/s, 2.96 requests/s of 200 GB
    starved = place(Program(topology, made, 200e9))
    assert starved.value_rps == pytest.approx(2.96)


def random_topology(rng: random.Random) -> Topology:
    """Return a small cluster of mixed nodes: odd sizes, bridges, PCIe roots, slow slots, cards, racks."""
    groups = []
    for k in range(rng.randint(1, 3)):
        kind = rng.choice(["nvswitch", "nvlink-pairs", "pcie"])
        size = rng.choice([2, 4, 8] if kind == "nvlink-pairs" else [1, 2, 4, 5, 7, 8])
        links = [f"kind: {kind}"]
        if size > 2 and rng.random() < 0.5:
            half = [list(range(size // 2)), list(range(size // 2, size))]
            links.append(f"roots: [{{gpus: {half[0]}}}, {{gpus: {half[1]}}}]")
        if kind == "pcie" and rng.random() < 0.3:
            links.append("ports: [{gpu: 0, bytes_per_s: 4GB/s}]")
        gpu = "l40s" if kind == "pcie" else rng.choice(["a100", "h100"])
        cards = f"count: {rng.choice([1, 2, 8])}, bytes_per_s: {rng.choice([25, 100, 400])}Gb/s, kind: infiniband"
        node = f"name: g{k}x, count: {rng.randint(1, 3)}, gpu: {gpu}, gpus: {size}, rack: {rng.choice('rs')}"
        groups.append(f"  - {{{node}, links: {{{', '.join(links)}}}, nics: {{{cards}}}}}\n")
    return cluster(f"nodes:\n{''.join(groups)}network: {{oversubscription: {rng.choice([1, 8])}}}\n")


def test_random_real_clusters_get_placements_that_pass_their_check_or_a_reason():
    placed = 0
    for seed in range(60):
        rng = random.Random(seed)
        topology = random_topology(rng)
        layouts = [Layout(*each) for each in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (4, 2), (2, 4), (3, 1))]
        made = [
            Candidate(phase, layout, gpu, rng.uniform(0.2, 2.0) * layout.gpus)
            for gpu in sorted({node.gpu.name for node in topology.nodes})
            for phase in ("prefill", "decode")
            for layout in rng.sample(layouts, rng.randint(1, 4))
        ]
        program = Program(topology, tuple(made), rng.choice([0.0, 1e7, 1e9, 2e10]))
        goal = rng.choice([{}, {"objective": "min_gpus", "rate_rps": 2.0}, {"rate_rps": 1.0}])
        program = replace(program, **goal)
        try:
            placement = place(program)  # which raises where its own check finds a fault
        except Unplaceable:
            continue
        placed += 1
        if program.rate_rps is None:
            bound = capacity_bound(topology, made, program.kv_bytes_per_request)
            assert placement.value_rps <= placement.bound_rps * (1 + 1e-5) <= bound * (1 + 2e-3)
    assert placed > 30


# --- forced counts, demands, and what cannot be ---


def test_forced_counts_are_met_exactly():
    where = Site(tuple(pool(f"n{i}", (8,), out=20.0, into=20.0) for i in range(4)))
    counts = {("prefill", Layout(2), "a"): 5, ("decode", Layout(4), "a"): 3, ("decode", Layout(1), "a"): 2}
    placement = place(Program(where, H100, KV, counts=counts))
    placed = [each.kind for each in placement.instances]
    assert {kind: placed.count(kind) for kind in placed} == counts
    assert placement.value_rps == pytest.approx(5 * 0.95)  # prefill binds: decode does 3 x 2.6 + 2 x 0.4


def test_forced_counts_that_do_not_fit_say_how_many_gpus_are_missing():
    where = Site((pool("n0", (8,)),))
    counts = {("prefill", Layout(8), "a"): 1, ("decode", Layout(1), "a"): 1}
    with pytest.raises(Unplaceable, match="take 9 a, but the cluster has 8 a"):
        place(Program(where, H100, KV, counts=counts))


def test_forced_counts_that_do_not_pack_say_so():
    where = Site((pool("n0", (4,)), pool("n1", (4,))))
    counts = {("prefill", Layout(3), "a"): 2, ("decode", Layout(2), "a"): 1}
    made = kinds("a", {(3, 1): 1.0}, {(2, 1): 1.0})
    with pytest.raises(Unplaceable, match="do not pack"):
        place(Program(where, made, KV, counts=counts))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            Program(Site((pool("n0", (4,)),)), kinds("b", {(1, 1): 1.0}, {(1, 1): 1.0}), KV),
            "no prefill instance fits",
        ),
        (
            Program(Site((pool("n0", (4,)),)), kinds("a", {(1, 1): 1.0}, {(8, 1): 1.0}), KV),
            "no decode instance fits",
        ),
        (Program(Site((pool("n0", (4,)),)), (), KV), "no prefill instance fits"),
        (
            Program(
                Site((pool("n0", (4,), out=0.0), pool("n1", (4,), out=0.0))),
                kinds("a", {(4, 1): 1.0}, {(4, 1): 1.0}),
                KV,
            ),
            "do not fit at once",
        ),
        (
            Program(Site((pool("n0", (2,)),)), kinds("a", {(1, 1): 2.0}, {(1, 1): 3.0}), KV, "min_gpus", 5.0),
            "cannot meet 5 requests/s: at most 2",
        ),
    ],
)
def test_what_cannot_be_placed_says_why(program: Program, reason: str):
    with pytest.raises(Unplaceable, match=reason):
        place(program)


@pytest.mark.parametrize(
    "change",
    [
        {"candidates": (*H100, Candidate("aggregated", Layout(1), "a", 1.0))},
        {"candidates": (*H100, H100[0])},
        {"candidates": (H100[0]._replace(rate_rps=float("nan")),)},
        {"objective": "min_gpus"},
        {"counts": {("prefill", Layout(64), "a"): 1}},
    ],
)
def test_a_program_without_sense_is_our_own_mistake(change: dict):
    with pytest.raises(InvariantError):
        place(replace(Program(Site((pool("n0", (8,)),)), H100, KV), **change))


def test_a_cap_leaves_gpus_idle():
    where = Site(tuple(pool(f"n{i}", (8,)) for i in range(2)))
    placement = place(Program(where, H100, KV, rate_rps=2.0))
    # 2 requests/s: prefill TP4 (2.1) and decode TP4 (2.6), or two prefill TP2 (1.9) do not reach it
    assert placement.value_rps == pytest.approx(2.0) and placement.gpus == 8
    assert len(placement.idle) == 8


def test_aggregated_instances_need_no_network():
    where = Site(tuple(pool(f"n{i}", (8,), out=0.0, into=0.0) for i in range(3)))
    made = (Candidate("aggregated", Layout(4), "a", 3.0), Candidate("aggregated", Layout(8), "a", 5.5))
    placement = place(Program(where, made, KV))
    assert placement.value_rps == pytest.approx(18.0) and placement.flows == ()
    few = place(Program(where, made, KV, "min_gpus", 8.0))
    assert few.gpus == 12 and few.value_rps == pytest.approx(8.0)


def test_without_kv_bytes_the_network_is_no_limit():
    where = Site((pool("n0", (4,), out=0.0, into=0.0), pool("n1", (4,), out=0.0, into=0.0)))
    assert place(Program(where, kinds("a", {(4, 1): 2.0}, {(4, 1): 2.0}), 0.0)).value_rps == pytest.approx(2.0)


def test_equal_instances_share_the_load_evenly():
    # 3 prefill of 2 and 1 decode of 4 requests/s: 4/3 each, not 2 + 2 + 0
    where = Site((pool("n0", (4,)),))
    counts = {("prefill", Layout(1), "a"): 3, ("decode", Layout(1), "a"): 1}
    placement = place(Program(where, kinds("a", {(1, 1): 2.0}, {(1, 1): 4.0}), KV, counts=counts))
    assert [flow.rate_rps for flow in placement.flows] == pytest.approx([4 / 3] * 3)


# --- the check ---


def sound() -> tuple[Program, Placement]:
    topology = cluster(
        "nodes: [{name: n, count: 2, gpu: H100, gpus: 4, links: {kind: nvswitch}, "
        "nics: {count: 1, bytes_per_s: 100Gb/s, kind: infiniband}}]"
    )
    made = kinds("h100-80gb", {(4, 1): 3.0, (2, 1): 1.2}, {(4, 1): 3.0, (2, 1): 1.2})
    program = Program(topology, made, 2e9)
    return program, place(program)


def swap(placement: Placement, at: int, **changes: object) -> Placement:
    instances = list(placement.instances)
    instances[at] = replace(instances[at], **changes)
    return replace(placement, instances=tuple(instances))


def reflow(placement: Placement, **changes: object) -> Placement:
    return replace(placement, flows=(replace(placement.flows[0], **changes), *placement.flows[1:]))


CORRUPTIONS = {
    "is used 2 times": lambda p: swap(p, 1, stages=p.instances[0].stages),
    "there is no GPU": lambda p: swap(p, 0, stages=(tuple(GpuId("n9", i) for i in range(4)),)),
    "not a a100": lambda p: swap(p, 0, gpu="a100"),
    "lie in several pools": lambda p: swap(
        swap(p, 0, stages=((*p.instances[0].gpus[:3], p.instances[1].gpus[3]),)),
        1,
        stages=((*p.instances[1].gpus[:3], p.instances[0].gpus[3]),),
    ),
    "its stages are not TP2": lambda p: swap(p, 0, layout=Layout(2)),
    "is no candidate": lambda p: swap(p, 0, layout=Layout(1, 4), stages=tuple((gpu,) for gpu in p.instances[0].gpus)),
    "two instances are called": lambda p: swap(p, 0, name=p.instances[1].name),
    "the idle GPUs are not": lambda p: replace(p, idle=(p.instances[0].gpus[0],)),
    "not from a prefill to a decode": lambda p: reflow(p, prefill=p.flows[0].decode),
    "must be positive": lambda p: reflow(p, rate_rps=0.0),
    "its share is not its part": lambda p: reflow(p, share=0.5),
    "sum to": lambda p: reflow(p, share=0.5),
    "one such instance sustains": lambda p: reflow(p, rate_rps=9.0),
    "but the flows add up to": lambda p: replace(p, value_rps=p.value_rps / 2),
    "above its bound": lambda p: replace(p, bound_rps=p.value_rps / 2),
    "is not that of": lambda p: replace(p, gap=0.25),
}


@pytest.mark.parametrize("words", CORRUPTIONS)
def test_the_check_finds_what_was_corrupted(words: str):
    program, placement = sound()
    assert check(program, placement) == []
    assert any(words in fault for fault in check(program, CORRUPTIONS[words](placement)))


def test_the_check_finds_overloaded_links_on_real_routes():
    program, placement = sound()
    # 3 requests/s of 2 GB cross 9.25 GB/s (100 Gb/s at 74 %); of 4 GB they do not
    faults = check(replace(program, kv_bytes_per_request=4e9), placement)
    assert any("link n0:nic0" in fault for fault in faults) and any("out of n0" in fault for fault in faults)


def test_the_check_finds_a_group_off_its_bridge_and_a_torn_pipeline():
    program = Program(cluster(A40), kinds("a40", {(2, 1): 3.0}, {(2, 1): 3.0}), 1e8)
    placement = place(program)
    (a, b), (c, d) = placement.instances[0].gpus, placement.instances[1].gpus
    torn = swap(swap(placement, 0, stages=((a, c),)), 1, stages=((b, d),))
    assert any("leaves its fast-linked group" in fault for fault in check(program, torn))


def test_the_check_finds_a_pipeline_that_spans_pools_without_need():
    where = Site((pool("n0", (2,)), pool("n1", (2,))))
    program = Program(where, kinds("a", {(1, 2): 3.0}, {(1, 2): 3.0}), KV)
    placement = place(program)
    (a, b), (c, d) = placement.instances[0].gpus, placement.instances[1].gpus
    torn = swap(swap(placement, 0, stages=((a,), (c,))), 1, stages=((b,), (d,)))
    assert any("spans pools although" in fault for fault in check(program, torn))


def test_the_check_finds_missed_counts_and_demands():
    where = Site((pool("n0", (8,)),))
    program = Program(where, H100, KV, "min_gpus", 1.0)
    placement = place(program)
    assert any("misses the demand" in fault for fault in check(replace(program, rate_rps=50.0), placement))
    counts = {("prefill", Layout(2), "a"): 4}
    assert any("wanted" in fault for fault in check(replace(program, counts=counts), placement))
    assert any("fewer than the bound" in fault for fault in check(program, replace(placement, bound_gpus=99)))
