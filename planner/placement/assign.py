"""From patterns to named GPUs, and from class flows to flows between instances.

Pools of a class are alike, so patterns are dealt in order; inside a pool, tensor-parallel groups sit on its
fast-linked groups, prefill and decode taking turns so that a pair which shares KV sits close. The flows are
settled last, on the named GPUs and their own cards: most requests/s, then least network, then even load.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isclose
from typing import Any, NamedTuple

import pulp

from planner.cost.transfer import route
from planner.errors import InvariantError
from planner.placement.base import (
    Candidate,
    KvFlow,
    PlacedInstance,
    Placement,
    Pool,
    Program,
    Site,
    Unplaceable,
    site,
)
from planner.placement.check import check
from planner.placement.patterns import Block, pack
from planner.placement.program import Units
from planner.placement.solve import GOAL_NODES, Effort, Hosted, Solution, optimise, solve
from planner.specs.topology import GpuId, Topology

Stage = tuple[GpuId, ...]
_TRIES = 3
_NOTHING = 1e-7
"""Flows below this share of the largest rate are solver dust."""


def place(program: Program) -> Placement:
    """Return the checked placement of `program` on named GPUs.

    Raises Unplaceable when there is none, InvariantError when it fails its own check.
    """
    placement = _over_racks(program) or _better(program, _whole(program))
    if faults := check(program, placement):
        raise InvariantError("the placement fails its own check: " + "; ".join(faults))
    return placement


def _better(program: Program, placement: Placement) -> Placement:
    """Return the greedy placement where that is better, which it can be once single cards or buses bind.

    The program knows them only as sums over a pool; its bound holds for both.
    """
    if placement.gap <= program.gap or program.counts is not None or program.objective == "min_gpus":
        return placement
    from planner.placement.greedy import place_greedily  # it builds on this module

    try:
        other = place_greedily(program)
    except Unplaceable:
        return placement
    if other.value_rps <= placement.value_rps:
        return placement
    gap = 1 - other.value_rps / placement.bound_rps
    return replace(other, bound_rps=placement.bound_rps, gap=gap, seconds=placement.seconds + other.seconds)


def _whole(program: Program) -> Placement:
    """Return the placement of the whole program. A demand that named links cannot carry is aimed higher."""
    first = solve(program)
    placement, aim = assign(program, first), program.rate_rps or 0.0
    for _ in range(_TRIES):
        if program.objective != "min_gpus" or placement.value_rps >= _reached(program) or placement.value_rps <= 0:
            break
        aim *= 1.001 * (program.rate_rps or 0.0) / placement.value_rps
        more = solve(replace(program, rate_rps=aim))
        more = replace(more, bound_rps=first.bound_rps, bound_gpus=first.bound_gpus)
        placement = assign(program, replace(more, seconds=first.seconds + more.seconds))
    if program.objective == "min_gpus" and placement.value_rps < _reached(program):
        carried, wanted = placement.value_rps, program.rate_rps
        raise Unplaceable(f"the links carry the KV of {carried:.4g} requests/s, not of {wanted:.4g}")
    return placement


def _reached(program: Program) -> float:
    return (program.rate_rps or 0.0) * (1 - 1e-6)


def _over_racks(program: Program) -> Placement | None:
    """Return a placement solved as if no uplink bound and then dealt over the racks, if that loses nothing.

    Racks of equal nodes make many equal solutions and a slow program; an even deal
    mostly keeps KV in its rack.
    """
    real = site(program.topology)
    if not real.uplinks:
        return None
    solution = solve(replace(program, topology=Site(real.pools)))
    placement = assign(program, solution)
    met = program.objective == "max_goodput" or placement.value_rps >= _reached(program)
    return placement if met and placement.gap <= program.gap else None


def assign(program: Program, solution: Solution) -> Placement:
    """Return the placement of a solution's patterns on named GPUs, with the flows these can really carry."""
    place = site(program.topology)
    seated = _name(_seat_all(place, solution), place)
    flows, value = _settle(program, place, solution, seated)
    instances = tuple(one.instance for one in seated)
    used = {gpu for instance in instances for gpu in instance.gpus}
    return Placement(
        instances=instances,
        flows=flows,
        value_rps=value,
        bound_rps=max(solution.bound_rps, value),
        gap=_gap(solution, value, len(used)),
        seconds=solution.seconds,
        solver=solution.solver,
        idle=tuple(gpu for pool in place.pools for gpu in pool.gpus if gpu not in used),
        bound_gpus=solution.bound_gpus,
    )


def _gap(solution: Solution, value: float, gpus: int) -> float:
    if solution.bound_gpus is not None:
        return (gpus - solution.bound_gpus) / gpus if gpus else 0.0
    return max(0.0, (solution.bound_rps - value) / solution.bound_rps) if solution.bound_rps > 0 else 0.0


class Seated(NamedTuple):
    """An instance on its GPUs, what it can do, and the pool it lies in (None when it spans several)."""

    instance: PlacedInstance
    rate_rps: float
    pool: str | None


def _seat_all(place: Site, solution: Solution) -> list[Seated]:
    """Return every instance on its GPUs, still without a name."""
    seated: list[Seated] = []
    loose: dict[int, dict[str, list[Stage]]] = defaultdict(lambda: defaultdict(list))
    dealt = (pair for hosted in solution.hosted for pair in _deal(hosted, bool(place.uplinks)))
    held = {pool.name: blocks for pool, blocks in dealt}
    for pool in place.pools:
        for block, stages in _seat(pool, held.get(pool.name, ()), solution.candidates):
            candidate = solution.candidates[block.candidate]
            if block.stages == candidate.layout.pp:
                seated.append(Seated(_instance(candidate, stages), candidate.rate_rps, pool.name))
            else:
                loose[block.candidate][pool.name] += stages
    for number, by_pool in sorted(loose.items()):
        candidate = solution.candidates[number]
        joined = _join(list(by_pool.values()), candidate.layout.pp)
        seated += [Seated(_instance(candidate, stages), candidate.rate_rps, None) for stages in joined]
    return seated


def _instance(candidate: Candidate, stages: Sequence[Stage]) -> PlacedInstance:
    return PlacedInstance("", candidate.phase, candidate.layout, candidate.gpu, tuple(stages))


def _deal(hosted: Hosted, over_racks: bool) -> Iterator[tuple[Pool, tuple[Block, ...]]]:
    """Yield pools with what they hold; with `over_racks` every rack gets its part of each pattern."""
    seen: Counter[str] = Counter()
    turns = []
    for position, pool in enumerate(hosted.pools):
        turns.append((seen[pool.rack] if over_racks else 0, position))
        seen[pool.rack] += 1
    order = [hosted.pools[position] for _, position in sorted(turns)]
    dealt = [blocks for blocks, number in sorted(hosted.patterns) for _ in range(number)]
    yield from zip(order, dealt, strict=False)


def _seat(pool: Pool, blocks: Sequence[Block], candidates: Sequence[Candidate]) -> Iterator[tuple[Block, list[Stage]]]:
    """Yield each block with the GPUs of its stages: large groups first, prefill and decode taking turns."""
    turn: Counter[tuple[Any, ...]] = Counter()
    keyed = []
    for block in sorted(blocks):
        candidate = candidates[block.candidate]
        kind = (candidate.layout.tp, candidate.phase)
        keyed.append((-candidate.layout.tp, turn[kind], candidate.phase != "prefill", block))
        turn[kind] += 1
    order = [block for *_, block in sorted(keyed)]
    tps = tuple(candidates[block.candidate].layout.tp for block in order for _ in range(block.stages))
    packed = pack(pool.sizes, tps)
    if packed is None:
        raise InvariantError(f"a pattern does not pack into {pool.name}")
    free = [iter(group) for group in pool.groups]
    stages = [tuple(next(free[g]) for g, number in enumerate(take) for _ in range(number)) for take in packed]
    for block in order:
        yield block, stages[: block.stages]
        stages = stages[block.stages :]


def _join(rest: list[list[Stage]], pp: int) -> Iterator[list[Stage]]:
    """Yield the stages of each instance that spans pools, each over as few pools as the leftovers allow."""
    while rest:
        stages: list[Stage] = []
        while len(stages) < pp:
            want = pp - len(stages)
            at = min(range(len(rest)), key=lambda i: (len(rest[i]) > want, abs(len(rest[i]) - want), i))
            stages += rest[at][:want]
            rest[at] = rest[at][want:]
            rest = [block for block in rest if block]
        yield stages


def _name(seated: list[Seated], place: Site) -> list[Seated]:
    """Return the instances in the order of their first GPUs, called prefill-0, prefill-1, decode-0, ..."""
    position = {gpu: i for i, gpu in enumerate(gpu for pool in place.pools for gpu in pool.gpus)}
    number: Counter[str] = Counter()
    named = []
    for one in sorted(seated, key=lambda one: position[one.instance.stages[0][0]]):
        phase = one.instance.phase
        named.append(one._replace(instance=replace(one.instance, name=f"{phase}-{number[phase]}")))
        number[phase] += 1
    return named


def _settle(
    program: Program, place: Site, solution: Solution, seated: Sequence[Seated]
) -> tuple[tuple[KvFlow, ...], float]:
    """Return the flows between instances and the requests/s they sum to."""
    if any(one.instance.phase == "aggregated" for one in seated):
        return (), min(sum(one.rate_rps for one in seated), program.rate_rps or inf)
    carried = _carry(program, place, seated)
    paired = _pair_up(carried, place, seated)
    if isclose(carried.total_rps, total := sum(paired.values()), rel_tol=1e-5):  # wipe the solver's dust off
        paired = {key: rate * carried.total_rps / total for key, rate in paired.items()}
    flows = _within_links(program, seated, paired)
    sent: Counter[str] = Counter()
    for (prefill, _), rate in flows.items():
        sent[prefill] += rate  # type: ignore[assignment]
    listed = (KvFlow(p, d, rate, rate / sent[p]) for (p, d), rate in flows.items())
    return tuple(listed), sum(flows.values())


@dataclass(frozen=True, slots=True)
class Carried:
    """Requests/s of each instance that stay in its pool and that cross the network; what stays in a rack."""

    own: dict[str, float]
    net: dict[str, float]
    stay: dict[str, float]
    total_rps: float


def _carry(program: Program, place: Site, seated: Sequence[Seated]) -> Carried:
    """Return the best loads of the named instances: a linear program like the placement's, card by card."""
    scale = max((one.rate_rps for one in seated), default=0.0) or 1.0
    units, lp = Units(scale, program.kv_bytes_per_request), pulp.LpProblem("flows")
    own = {one.instance.name: lp.add_variable(f"own_{i}", 0) for i, one in enumerate(seated)}
    net = {one.instance.name: lp.add_variable(f"net_{i}", 0) for i, one in enumerate(seated)}
    sides = [[one for one in seated if one.instance.phase == phase] for phase in ("prefill", "decode")]
    peaks = []
    for phase, side in zip(("prefill", "decode"), sides, strict=True):
        peaks.append(lp.add_variable(f"peak_{phase}", 0, 1))
        for one in side:
            name = one.instance.name
            lp += own[name] + net[name] <= one.rate_rps / scale * peaks[-1]
            if one.pool is None:
                lp += own[name] <= 0
    for pool in place.pools:
        ours = [[own[one.instance.name] for one in side if one.pool == pool.name] for side in sides]
        if any(ours):
            lp += pulp.lpSum(ours[0]) == pulp.lpSum(ours[1])
    given, taken = (pulp.lpSum(net[one.instance.name] for one in side) for side in sides)
    lp += given == taken
    stay = _limit_network(lp, place, sides, net, units)
    total = pulp.lpSum(own[one.instance.name] for one in sides[0]) + given
    if program.rate_rps is not None:
        lp += total <= program.rate_rps / scale
    best = _optimise_in_turn(lp, [(total, 1), (given, -1), (peaks[0] + peaks[1], -1)])
    round_values = [
        (program.rate_rps or 0.0) / scale,
        *(sum(one.rate_rps for one in side) / scale for side in sides),
    ]
    best = next((value for value in round_values if isclose(value, best, rel_tol=1e-7)), best)
    exact = scale * best / total.value() if best > 0 else 0.0  # later goals may cost dust of the first
    read = lambda some: {key: exact * max(0.0, var.varValue) for key, var in some.items()}  # noqa: E731
    return Carried(read(own), read(net), read(stay), best * scale)


def _limit_network(
    lp: pulp.LpProblem, place: Site, sides: Sequence[Sequence[Seated]], net: dict[str, Any], units: Units
) -> dict[str, pulp.LpVariable]:
    """Add the limits of every card and uplink; return the variables of what stays inside each rack."""
    stay = {rack: lp.add_variable(f"stay_{r}", 0) for r, rack in enumerate(place.uplinks)}
    cards = {(pool.name, n): nic for pool in place.pools for n, nic in enumerate(pool.nics)}
    card_of = {gpu: key for key, nic in cards.items() for gpu in nic.gpus}
    rack_of = {gpu: place.rack(pool) for pool in place.pools for gpu in pool.gpus}
    for end, side in enumerate(sides):
        by_card: dict[Any, list[Any]] = defaultdict(list)
        by_rack: dict[str, list[Any]] = defaultdict(list)
        for one in side:
            flow, gpus = net[one.instance.name], one.instance.gpus
            for card, number in Counter(card_of.get(gpu) for gpu in gpus).items():
                by_card[card].append(number / len(gpus) * flow)
            for rack, number in Counter(rack_of[gpu] for gpu in gpus).items():
                by_rack[rack].append(number / len(gpus) * flow)
        speeds = {key: (nic.egress_bytes_per_s, nic.ingress_bytes_per_s)[end] for key, nic in cards.items()}
        for card, parts in by_card.items():
            if (most := units.rate(speeds.get(card, 0.0))) < inf:
                lp += pulp.lpSum(parts) <= most
        for rack, uplink in place.uplinks.items():
            lp += stay[rack] <= pulp.lpSum(by_rack[rack])
            if (most := units.rate(uplink[end])) < inf:
                lp += pulp.lpSum(by_rack[rack]) - stay[rack] <= most
    return stay


def _optimise_in_turn(lp: pulp.LpProblem, goals: Sequence[tuple[Any, int]]) -> float:
    """Return the value of the first goal; the variables hold the best point by it, then by the second, ...

    A goal is an expression and +1 to make it most, -1 to make it least.
    """
    values = []
    for goal, sign in goals:
        sense = pulp.LpMaximize if sign > 0 else pulp.LpMinimize
        outcome = optimise(lp, goal, sense, Effort(0.0, 60.0, GOAL_NODES))
        if not outcome.found:
            raise InvariantError("the flows of a placement have no solution")
        values.append(outcome.value)
        lp.addConstraint(sign * goal >= sign * outcome.value - 1e-9 * max(1.0, abs(outcome.value)))
    return values[0]


def _pair_up(carried: Carried, place: Site, seated: Sequence[Seated]) -> dict[tuple[str, str], float]:
    """Return requests/s of each pair of instances: first in the pool, then in the rack, then anywhere."""
    flows: dict[tuple[str, str], float] = defaultdict(float)
    rack_of = {pool.name: place.rack(pool) for pool in place.pools}
    dust = _NOTHING * max((one.rate_rps for one in seated), default=0.0)
    own, net, stay = dict(carried.own), dict(carried.net), carried.stay
    by_pool: dict[str, list[Seated]] = defaultdict(list)
    by_rack: dict[str, list[Seated]] = defaultdict(list)
    for one in seated:
        if one.pool is not None:
            by_pool[one.pool].append(one)
            by_rack[rack_of[one.pool]].append(one)
    for ours in by_pool.values():
        _transport(ours, own, flows, dust, inf)
    for rack, most in stay.items():
        _transport(by_rack[rack], net, flows, dust, most)
    _transport(seated, net, flows, dust, inf)
    return {key: flows[key] for key in sorted(flows, key=_natural)}


def _natural(key: tuple[str, str]) -> tuple[int, int]:
    return int(key[0].rsplit("-", 1)[1]), int(key[1].rsplit("-", 1)[1])


def _transport(
    some: Sequence[Seated],
    left: dict[str, float],
    flows: dict[tuple[str, str], float],
    dust: float,
    most: float,
) -> None:
    """Move up to `most` from prefill to decode, in order, out of what is `left`: few and steady pairs."""
    takers = iter([one.instance.name for one in some if one.instance.phase == "decode"])
    taker = next(takers, None)
    for giver in (one.instance.name for one in some if one.instance.phase == "prefill"):
        while taker is not None and left[giver] > dust and most > dust:
            amount = min(left[giver], left[taker], most)
            if amount > dust:
                flows[giver, taker] += amount
            left[giver], left[taker], most = left[giver] - amount, left[taker] - amount, most - amount
            if left[taker] <= dust:
                taker = next(takers, None)


def _within_links(
    program: Program, seated: Sequence[Seated], flows: dict[tuple[str, str], float]
) -> dict[tuple[str, str], float]:
    """Return the flows cut down to what every single link on their way carries (a shared PCIe bus, say)."""
    topology, kv_bytes = program.topology, program.kv_bytes_per_request
    if not isinstance(topology, Topology) or kv_bytes <= 0:
        return flows
    by_name = {one.instance.name: one.instance.stages for one in seated}
    shares = {key: route(topology, by_name[key[0]], by_name[key[1]]).shares for key in flows}
    load: dict[int, float] = defaultdict(float)
    for key, rate in flows.items():
        for link, share in shares[key]:
            load[link] += rate * kv_bytes * share
    over = {link: max(1.0, used / topology.links[link].bytes_per_s) for link, used in load.items()}
    worst = {key: max((over[link] for link, _ in shares[key]), default=1.0) for key in flows}
    return {key: rate / worst[key] for key, rate in flows.items()}
