"""A placement, simulated on the links it really uses: the judge of every claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.transfer import Route, route
from planner.placement.base import PlacedInstance, Placement
from planner.search.goodput import Rate, Trial, pooled_margin, replicated, tallies
from planner.search.layouts import Kind, show_mix
from planner.simulator.cluster import KvPath, Run, System
from planner.simulator.metrics import Latencies, Load, attainment, binding_term, latencies, load_of
from planner.sources.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A placement together with the system that simulates it."""

    placement: Placement
    kinds: tuple[Kind, ...]
    """The kind of each instance, in their order."""
    system: System
    links: tuple[int, ...]
    """Topology's ids of the system's links, in their order."""
    routes: Mapping[tuple[int, int], Route]

    @property
    def layout(self) -> str:
        """`2 x prefill TP4 + 1 x decode TP8`."""
        return show_mix((kind, 1) for kind in self.kinds)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(kind.gpus for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Report:
    """One replay at one rate, in figures."""

    rate_rps: float
    attainment: tuple[float, ...]
    latencies: Latencies
    load: dict[str, Load]
    """Per phase."""
    link_utilisation: tuple[tuple[str, float], ...]
    ttft_missed: float
    tpot_missed: float
    preemptions: int
    shares: dict[tuple[int, int], float]
    """Of the requests of prefill instance p, the share that went to decode instance d."""


def place_on(problem: Problem, placement: Placement, kinds: Mapping[tuple, Kind], all_pairs: bool = True) -> Placed:
    """Return the system of a placement. Routes join every pair, or only those that the program lets KV flow between."""
    instances = placement.instances
    chosen = tuple(kinds[one.kind] for one in instances)
    flows = {(flow.prefill, flow.decode) for flow in placement.flows if flow.rate_rps > 0}
    pairs = [
        (p, d)
        for p, source in enumerate(instances)
        for d, target in enumerate(instances)
        if source.phase == "prefill" and target.phase == "decode" and (all_pairs or (source.name, target.name) in flows)
    ]
    routes = {(p, d): _route(problem, instances[p], instances[d]) for p, d in pairs}
    links = tuple(sorted({link for way in routes.values() for link, _ in way.shares}))
    system = System(
        instances=tuple(kind.instance() for kind in chosen),
        paths=tuple(_path(problem, pair, way, links) for pair, way in routes.items()),
        link_bytes_per_s=tuple(problem.topology.links[link].bytes_per_s for link in links),
        **system_settings(problem),
    )
    return Placed(placement, chosen, system, links, routes)


def system_settings(problem: Problem) -> dict:
    """Return what all systems of a problem have in common, for `System(**...)`."""
    exposed = problem.model.kv_bytes_per_token * (1 - problem.engine.layerwise_overlap)
    return {
        "kv_bytes_per_token": float(exposed),
        "first_token_at": problem.engine.first_token_at,
        "max_pulls": problem.engine.max_pulls,
    }


def _route(problem: Problem, source: PlacedInstance, target: PlacedInstance) -> Route:
    model = problem.model
    heads = 1 if model.mla is not None else model.kv_heads
    return route(problem.topology, source.stages, target.stages, layers=model.layers, kv_heads=heads)


def _path(problem: Problem, pair: tuple[int, int], way: Route, links: tuple[int, ...]) -> KvPath:
    at = {link: position for position, link in enumerate(links)}
    return KvPath(
        *pair,
        fixed_s=way.setup_s(problem.kv_bytes_per_request),
        shares=tuple((at[link], share) for link, share in way.shares),
    )


def claim(problem: Problem, trial: Trial, placed: Placed, guess_rps: float) -> Rate:
    """Return the replayed goodput with its interval over the problem's seeds, and what is missed first beyond it."""
    wanted_rps = problem.demand_rps or 0.0
    rate = replicated(trial, placed.system, guess_rps, seeds_of(problem), wanted_rps=wanted_rps)
    if rate.goodput_rps <= 0:
        return rate
    beyond = trial.with_seed(problem.seed).run(placed.system, rate.goodput_rps * 1.05)
    return replace(rate, binding=binding_term([beyond], trial.slos, trial.warmup_s)[0])


def attains_at(problem: Problem, trial: Trial, placed: Placed, rate_rps: float) -> bool:
    """Return True when the problem's seeds together attain the target at this rate."""
    return pooled_margin(tallies(trial, placed.system, rate_rps, seeds_of(problem)), problem.slos) >= 0.0


def seeds_of(problem: Problem) -> list[int]:
    """Return the seeds of the replicates."""
    return [problem.seed + k for k in range(problem.search.seeds)]


def report(problem: Problem, trial: Trial, placed: Placed, rate_rps: float) -> Report:
    """Return what happens at `rate_rps`, over all seeds."""
    trial = trial.lasting(rate_rps)
    runs = [trial.with_seed(seed).run(placed.system, rate_rps) for seed in seeds_of(problem)]
    _, late, slow = binding_term(runs, trial.slos, trial.warmup_s)
    return Report(
        rate_rps=rate_rps,
        attainment=attainment(runs, trial.slos, trial.warmup_s),
        latencies=latencies(runs, trial.warmup_s),
        load=_load(placed, runs),
        link_utilisation=_link_utilisation(problem, placed, runs),
        ttft_missed=late,
        tpot_missed=slow,
        preemptions=sum(int(run.preemptions.sum()) for run in runs),
        shares=_shares(placed, runs),
    )


def _load(placed: Placed, runs: Sequence[Run]) -> dict[str, Load]:
    """Return the load per phase."""
    by_phase: dict[str, list[int]] = {}
    for at, kind in enumerate(placed.kinds):
        by_phase.setdefault(kind.phase, []).append(at)
    return {
        phase: load_of(runs, rows, [placed.kinds[at].limits.kv_blocks for at in rows])
        for phase, rows in by_phase.items()
    }


def _link_utilisation(problem: Problem, placed: Placed, runs: Sequence[Run]) -> tuple[tuple[str, float], ...]:
    """Return the five busiest links with the share of their capacity that was used, averaged over the runs."""
    links = [problem.topology.links[id_] for id_ in placed.links]
    used = np.zeros(len(links))
    for run in runs:
        horizon_s = float(run.requests.arrival_s[-1]) if len(run.requests) else 0.0
        if horizon_s > 0:
            used += run.link_bytes / (horizon_s * np.array([link.bytes_per_s for link in links])) / len(runs)
    named = [(link.name, float(share)) for link, share in zip(links, used, strict=True)]
    return tuple(sorted(named, key=lambda item: (-item[1], item[0]))[:5])


def _shares(placed: Placed, runs: Sequence[Run]) -> dict[tuple[int, int], float]:
    """Return where each prefill instance's requests went."""
    counts = np.zeros((len(placed.kinds), len(placed.kinds)))
    for run in runs:
        moved = run.decode_at >= 0
        np.add.at(counts, (run.prefill_at[moved], run.decode_at[moved]), 1.0)
    totals = counts.sum(axis=1)
    pairs = zip(*np.nonzero(counts), strict=True)
    return {(int(p), int(d)): float(counts[p, d] / totals[p]) for p, d in pairs}
