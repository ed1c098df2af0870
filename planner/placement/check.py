"""Every constraint of the placement once more, on the named GPUs and real routes, without the solver."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import ceil, inf, isclose

from planner.cost.transfer import route
from planner.placement.base import Kind, PlacedInstance, Placement, Pool, Program, site
from planner.specs.topology import GpuId, Topology

_SLACK = 1e-6


def check(program: Program, placement: Placement) -> list[str]:
    """Return one line per broken constraint; empty for a sound placement."""
    pools = {gpu: pool for pool in site(program.topology).pools for gpu in pool.gpus}
    faults = list(_gpus(placement, pools))
    if faults:  # what follows needs GPUs that exist
        return faults
    for instance in placement.instances:
        faults += _shape(instance, pools)
    faults += _kinds(program, placement)
    faults += _flows(program, placement)
    if not faults:
        faults += _links(program, placement)
        faults += _network(program, placement, pools)
    return faults + list(_objective(program, placement))


def _gpus(placement: Placement, pools: Mapping[GpuId, Pool]) -> Iterator[str]:
    """Every GPU exists, of the stated type, and is used once; the idle ones are the others."""
    used: Counter[GpuId] = Counter()
    for instance in placement.instances:
        for gpu in instance.gpus:
            used[gpu] += 1
            if gpu not in pools:
                yield f"{instance.name}: there is no GPU {gpu}"
            elif pools[gpu].gpu != instance.gpu:
                yield f"{instance.name}: {gpu} is a {pools[gpu].gpu}, not a {instance.gpu}"
    for gpu, times in used.items():
        if times > 1:
            yield f"GPU {gpu} is used {times} times"
    if sorted(placement.idle) != sorted(set(pools) - set(used)):
        yield "the idle GPUs are not those that no instance uses"
    names = Counter(instance.name for instance in placement.instances)
    yield from (f"two instances are called {name}" for name, times in names.items() if times > 1)


def _shape(instance: PlacedInstance, pools: Mapping[GpuId, Pool]) -> Iterator[str]:
    """The layout's sizes; tensor-parallel groups in one pool and, where they fit, in one fast group."""
    tp, pp = instance.layout
    if len(instance.stages) != pp or any(len(stage) != tp for stage in instance.stages):
        yield f"{instance.name}: its stages are not {instance.layout}"
        return
    for s, stage in enumerate(instance.stages):
        homes = {pools[gpu].name for gpu in stage}
        if len(homes) > 1:
            yield f"{instance.name}: the ranks of stage {s} lie in several pools: {', '.join(sorted(homes))}"
            continue
        groups = pools[stage[0]].groups
        inside = any(set(stage) <= set(group) for group in groups)
        if not inside and tp <= max(len(group) for group in groups):
            yield f"{instance.name}: stage {s} leaves its fast-linked group although TP{tp} fits in one"
    yield from _spread(instance, pools)


def _spread(instance: PlacedInstance, pools: Mapping[GpuId, Pool]) -> Iterator[str]:
    """A pipeline lies in one pool where one of its type is large enough, and enters no pool twice."""
    homes = [pools[stage[0]].name for stage in instance.stages]
    changes = 1 + sum(a != b for a, b in pairwise(homes))
    if changes > len(set(homes)):
        yield f"{instance.name}: its pipeline comes back to a pool it has left"
    room = max(_room(pool, instance.layout.tp) for pool in pools.values() if pool.gpu == instance.gpu)
    if len(set(homes)) > 1 and room >= instance.layout.pp:
        yield f"{instance.name}: it spans pools although {instance.layout} fits in one"


def _room(pool: Pool, tp: int) -> int:
    """Return how many tensor-parallel groups a pool has room for."""
    inside = sum(len(group) // tp for group in pool.groups)
    return inside if inside else len(pool.gpus) // tp


def _kinds(program: Program, placement: Placement) -> Iterator[str]:
    """Every instance is of a candidate kind, and forced counts are met."""
    candidates = {candidate.kind for candidate in program.candidates}
    placed: Counter[Kind] = Counter(instance.kind for instance in placement.instances)
    for kind in sorted(placed):
        if kind not in candidates:
            yield f"{_show(kind)} is no candidate"
    if program.counts is not None:
        for kind in sorted({*placed, *program.counts}):
            if placed[kind] != program.counts.get(kind, 0):
                yield f"{_show(kind)}: {placed[kind]} placed, {program.counts.get(kind, 0)} wanted"


def _show(kind: Kind) -> str:
    phase, layout, gpu = kind
    return f"{phase} {layout} on {gpu}"


def _flows(program: Program, placement: Placement) -> Iterator[str]:
    """Flows run from prefill to decode, positive, within what each instance sustains; shares sum to one."""
    rates = {candidate.kind: candidate.rate_rps for candidate in program.candidates}
    by_name = {instance.name: instance for instance in placement.instances}
    load: dict[str, float] = defaultdict(float)
    shares: dict[str, float] = defaultdict(float)
    for flow in placement.flows:
        ends = (by_name.get(flow.prefill), by_name.get(flow.decode))
        if [end and end.phase for end in ends] != ["prefill", "decode"]:
            yield f"flow {flow.prefill} -> {flow.decode}: not from a prefill to a decode instance"
        if not flow.rate_rps > 0 or not 0 < flow.share <= 1 + _SLACK:
            yield f"flow {flow.prefill} -> {flow.decode}: rate and share must be positive"
        load[flow.prefill] += flow.rate_rps
        load[flow.decode] += flow.rate_rps
        shares[flow.prefill] += flow.share
    for flow in placement.flows:
        if not isclose(flow.share * load[flow.prefill], flow.rate_rps, rel_tol=1e-6):
            yield f"flow {flow.prefill} -> {flow.decode}: its share is not its part of the rate"
    for name, share in shares.items():
        if not isclose(share, 1.0, rel_tol=1e-6):
            yield f"{name}: the shares of its flows sum to {share:.6g}"
    for name, rate in load.items():
        most = rates.get(by_name[name].kind, 0.0) if name in by_name else inf
        if rate > most * (1 + _SLACK):
            yield f"{name}: {rate:.6g} requests/s, but one such instance sustains {most:.6g}"


def _links(program: Program, placement: Placement) -> Iterator[str]:
    """No link of the topology carries more than its effective speed, on the routes that KV really takes."""
    topology = program.topology
    if not isinstance(topology, Topology):
        return
    stages = {instance.name: instance.stages for instance in placement.instances}
    load: dict[int, float] = defaultdict(float)
    for flow in placement.flows if program.kv_bytes_per_request > 0 else ():
        for link, share in route(topology, stages[flow.prefill], stages[flow.decode]).shares:
            load[link] += flow.rate_rps * program.kv_bytes_per_request * share
    for link, used in sorted(load.items()):
        if used > topology.links[link].bytes_per_s * (1 + _SLACK):
            most = topology.links[link]
            yield f"link {most.name}: {used / 1e9:.4g} GB/s of KV on {most.bytes_per_s / 1e9:.4g} GB/s"


def _network(program: Program, placement: Placement, pools: Mapping[GpuId, Pool]) -> Iterator[str]:
    """No pool sends or receives more than its cards carry, no rack more than its uplink.

    On a real topology `_links` has checked the uplinks, and pipelines side by side, more exactly already.
    """
    place, exact = site(program.topology), isinstance(program.topology, Topology)
    by_name = {instance.name: instance for instance in placement.instances}
    moved: dict[tuple[str, str], float] = defaultdict(float)
    for flow in placement.flows:
        kv_bytes_per_s = flow.rate_rps * program.kv_bytes_per_request
        ends = [by_name[name].gpus for name in (flow.prefill, flow.decode)]
        homes = [Counter(pools[gpu].name for gpu in end) for end in ends]
        racks = [Counter(place.rack(pools[gpu]) for gpu in end) for end in ends]
        if homes[0].keys() == homes[1].keys() and (exact or len(homes[0]) == 1):
            continue
        for end, way in enumerate(("out of", "into")):
            for home, gpus in homes[end].items():
                moved[way, home] += kv_bytes_per_s * gpus / len(ends[end])
            for rack, gpus in () if exact else racks[end].items():
                away = 1 - racks[1 - end][rack] / len(ends[1 - end])
                moved[way, "rack " + rack] += kv_bytes_per_s * away * gpus / len(ends[end])
    most = {("out of", pool.name): pool.egress_bytes_per_s for pool in place.pools}
    most |= {("into", pool.name): pool.ingress_bytes_per_s for pool in place.pools}
    most |= {("out of", "rack " + rack): uplink[0] for rack, uplink in place.uplinks.items()}
    most |= {("into", "rack " + rack): uplink[1] for rack, uplink in place.uplinks.items()}
    dust = _SLACK * placement.value_rps * program.kv_bytes_per_request  # a solver's zero is not quite zero
    for (way, where), used in sorted(moved.items()):
        if used > (limit := most.get((way, where), inf)) * (1 + _SLACK) + dust:
            yield f"{used / 1e9:.4g} GB/s of KV {way} {where}, which carries {limit / 1e9:.4g} GB/s"


def _objective(program: Program, placement: Placement) -> Iterator[str]:
    """The value is what the instances and flows add up to, and lies within its bound and gap."""
    rates = {candidate.kind: candidate.rate_rps for candidate in program.candidates}
    if any(instance.phase == "aggregated" for instance in placement.instances):
        total = sum(rates.get(instance.kind, 0.0) for instance in placement.instances)
        value = min(total, program.rate_rps or inf)
    else:
        value = sum(flow.rate_rps for flow in placement.flows)
    if not isclose(value, placement.value_rps, rel_tol=1e-6, abs_tol=1e-12):
        yield f"value {placement.value_rps:.6g} requests/s, but the flows add up to {value:.6g}"
    if placement.value_rps > placement.bound_rps * (1 + 1e-5):
        yield f"value {placement.value_rps:.6g} requests/s above its bound {placement.bound_rps:.6g}"
    if program.rate_rps is not None and program.objective == "max_goodput" and value > program.rate_rps * (1 + 1e-5):
        yield f"value {value:.6g} requests/s above its cap {program.rate_rps:.6g}"
    yield from _few_gpus(program, placement) if program.objective == "min_gpus" else _most(placement)


def _few_gpus(program: Program, placement: Placement) -> Iterator[str]:
    demand, bound = program.rate_rps or 0.0, placement.bound_gpus or 0.0
    if placement.value_rps < demand * (1 - 1e-5):
        yield f"value {placement.value_rps:.6g} requests/s misses the demand of {demand:.6g}"
    if placement.gpus < ceil(bound - 1e-6):
        yield f"{placement.gpus} GPUs, fewer than the bound of {bound:g}"
    if placement.gpus and not isclose(placement.gap, (placement.gpus - bound) / placement.gpus, abs_tol=1e-6):
        yield f"gap {placement.gap:.6g} is not that of {placement.gpus} GPUs against {bound:g}"


def _most(placement: Placement) -> Iterator[str]:
    gap = (placement.bound_rps - placement.value_rps) / placement.bound_rps if placement.bound_rps > 0 else 0.0
    if not isclose(placement.gap, gap, abs_tol=1e-5):
        value, bound = placement.value_rps, placement.bound_rps
        yield f"gap {placement.gap:.6g} is not that of {value:.6g} against {bound:.6g}"
