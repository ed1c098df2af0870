"""Solve the placement program: the goal first, then the ties. HiGHS, one thread, stopped by its gap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from time import process_time
from typing import Any, NamedTuple

import highspy
import pulp

from planner.placement.base import Candidate, Kind, Nic, Pool, Program, Site, Topology, Unplaceable, site
from planner.placement.patterns import Block
from planner.placement.program import Model, build

SOLVER = "HiGHS"
GOAL_NODES, TIE_NODES = 20_000, 100
_SAME = 1e-7
"""How far below its best value a goal may fall while the next one is settled, relative."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """Interchangeable pools, and what they hold: blocks of one pool, and of how many pools."""

    pools: tuple[Pool, ...]
    patterns: tuple[tuple[tuple[Block, ...], int], ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """Which patterns how many pools of each class hold; `Block.candidate` counts into `candidates`."""

    candidates: tuple[Candidate, ...]
    hosted: tuple[Hosted, ...]
    bound_rps: float
    bound_gpus: float | None
    seconds: float
    solver: str = SOLVER


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a solver run ended with: whether it found a point, the goal's value there, the proven bound."""

    found: bool
    value: float
    bound: float


class Effort(NamedTuple):
    """When to stop: at this gap, or after so many nodes; the time is only a net, as it makes runs differ."""

    gap: float
    seconds: float
    nodes: int
    step: float = 0.0
    """The least distance of two different values of the goal, if there is one."""


class _Highs(pulp.HiGHS):
    """HiGHS that starts from the values the variables hold, and whose status pulp can trust.

    pulp itself calls a run that ended at its time limit 'Optimal', and knows no node limit.
    """

    def callSolver(self, lp: pulp.LpProblem) -> None:
        values = [variable.varValue for variable in lp.variables()]
        if values and None not in values:
            start = highspy.HighsSolution()
            start.col_value = values
            lp.solverModel.setSolution(start)
        lp.solverModel.run()

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        status, info = lp.solverModel.getModelStatus(), lp.solverModel.getInfo()
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            values = lp.solverModel.getSolution().col_value
            for variable in lp.variables():
                variable.varValue = values[variable.index]
            best = status == highspy.HighsModelStatus.kOptimal
            return pulp.LpStatusOptimal, pulp.LpSolutionOptimal if best else pulp.LpSolutionIntegerFeasible
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


def optimise(lp: pulp.LpProblem, goal: Any, sense: int, effort: Effort) -> Outcome:
    """Solve for `goal`, leaving the best point found in the variables."""
    lp.sense = sense
    lp.setObjective(goal)
    gaps = {"gapRel": effort.gap, "gapAbs": effort.step * (1 - 1e-4) if effort.step else 1e-9}
    for _ in range(2):
        lp.solve(_Highs(msg=False, threads=1, timeLimit=effort.seconds, mip_max_nodes=effort.nodes, **gaps))
        if lp.solverModel.getModelStatus() != highspy.HighsModelStatus.kNotset:
            break
        # HiGHS will not run, without an exception, once it ran with another number of threads in this process
        highspy.Highs.resetGlobalScheduler(True)
    info, sign = lp.solverModel.getInfo(), -1.0 if sense == pulp.LpMaximize else 1.0
    bound = info.mip_dual_bound if lp.isMIP() else info.objective_function_value
    found = lp.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible) and _integral(lp)
    return Outcome(found, float(goal.value() or 0.0) if found else 0.0, sign * bound)


def _integral(lp: pulp.LpProblem) -> bool:
    whole = (v.varValue for v in lp.variables() if v.cat == pulp.LpInteger)
    return all(value is not None and abs(value - round(value)) < 1e-4 for value in whole)


def solve(program: Program) -> Solution:
    """Return the best patterns, their bound, and the processor time [s] of finding them.

    Raises Unplaceable when forced counts do not fit, a demand cannot be reached, or nothing fits at all.
    """
    start = process_time()
    model = build(program)
    sense = pulp.LpMaximize if program.objective == "max_goodput" else pulp.LpMinimize
    goal = model.rate if program.objective == "max_goodput" else model.gpus
    step = 0.0 if program.objective == "max_goodput" else 1.0
    first = optimise(model.lp, goal, sense, Effort(program.gap, program.time_limit_s, GOAL_NODES, step))
    nothing = program.objective == "max_goodput" and first.value <= 0
    if not first.found or nothing:
        raise Unplaceable(_why(program, model, first))
    hosted = _settle_ties(program, model, goal, first, _hosted(model))
    seconds = process_time() - start
    if program.objective == "min_gpus":
        return Solution(model.candidates, hosted, program.rate_rps or 0.0, ceil(first.bound - 1e-4), seconds)
    bound = max(first.bound, first.value) * model.scale_rps
    return Solution(model.candidates, hosted, min(bound, program.rate_rps or inf), None, seconds)


def _settle_ties(
    program: Program, model: Model, goal: Any, first: Outcome, hosted: tuple[Hosted, ...]
) -> tuple[Hosted, ...]:
    """Return the pools' patterns after the goal is held and the network, then the GPUs, are made least."""
    ties = [model.network] if len(model.network) else []
    ties += [model.gpus] if program.objective == "max_goodput" and program.counts is None else []
    held, value = goal, first.value
    for tie in ties:
        slack = _SAME * max(1.0, abs(value))
        model.lp.addConstraint(held >= value - slack if held is model.rate else held <= value + slack)
        effort = Effort(program.gap, program.time_limit_s, TIE_NODES, 1.0 if tie is model.gpus else 0.0)
        outcome = optimise(model.lp, tie, pulp.LpMinimize, effort)
        if not outcome.found:
            break
        hosted, held, value = _hosted(model), tie, outcome.value
    return hosted


def _hosted(model: Model) -> tuple[Hosted, ...]:
    """Return what the variables say that the pools hold."""
    made = []
    for each, picks in zip(model.classes, model.picks, strict=True):
        used = ((p.blocks, round(y.varValue or 0)) for p, y in zip(each.patterns, picks, strict=True))
        made.append(Hosted(each.pools, tuple((blocks, number) for blocks, number in used if number)))
    return tuple(made)


def _why(program: Program, model: Model, first: Outcome) -> str:
    """Return why nothing was found, as a user can act on it."""
    if model.lp.sol_status != pulp.LpSolutionInfeasible and not first.found:
        return f"no placement found within {program.time_limit_s:g} s"
    have = Counter(pool.gpu for pool in site(program.topology).pools for _ in pool.gpus)
    if program.counts is not None and not first.found:
        return _why_counts(program.counts, have)
    hosts = {block.candidate for each in model.classes for p in each.patterns for block in p.blocks}
    phases = {model.candidates[c].phase for c in hosts}
    aggregated = any(candidate.phase == "aggregated" for candidate in program.candidates)
    for phase in ("aggregated",) if aggregated else ("prefill", "decode"):
        if phase not in phases:
            return f"no {phase} instance fits on this cluster ({_show(have)})"
    if program.objective == "max_goodput":
        return "a prefill and a decode instance do not fit at once where KV can get from one to the other"
    most = solve(replace(program, objective="max_goodput", rate_rps=None)).bound_rps
    return f"{_show(have)} cannot meet {program.rate_rps:.4g} requests/s: at most {most:.4g}"


def _why_counts(counts: Mapping[Kind, int], have: Counter[str]) -> str:
    need: Counter[str] = Counter()
    for (_, layout, gpu), number in counts.items():
        need[gpu] += layout.gpus * number
    kinds = sorted(counts.items())
    wanted = ", ".join(f"{number} x {phase} {layout}" for (phase, layout, _), number in kinds)
    if any(need[gpu] > have[gpu] for gpu in need):
        return f"{wanted} take {_show(need)}, but the cluster has {_show(have)}"
    return f"{wanted} do not pack into the nodes and fast-linked groups of {_show(have)}"


def _show(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {gpu}" for gpu, number in sorted(gpus.items())) or "no GPUs"


def capacity_bound(topology: Topology | Site, candidates: Sequence[Candidate], kv_bytes_per_request: float) -> float:
    """Return a rate [requests/s] that no placement of any numbers of these candidates can exceed.

    Give it saturation rates: what one instance does when it never waits. The network counts only where every
    instance lies in one pool; of those that span pools, some KV may stay inside by luck.
    """
    program = Program(topology, tuple(candidates), kv_bytes_per_request)
    model = build(program)
    blocks = {block for each in model.classes for pattern in each.patterns for block in pattern.blocks}
    if any(model.candidates[c].layout.pp > stages for c, stages in blocks):
        model = build(replace(program, topology=_wired(site(topology)), kv_bytes_per_request=0.0))
    if not any(model.picks):
        return 0.0
    outcome = optimise(model.lp, model.rate, pulp.LpMaximize, Effort(1e-3, 10.0, GOAL_NODES))
    return max(outcome.bound, 0.0) * model.scale_rps


def _wired(place: Site) -> Site:
    """Return the same pools on a network without limits."""
    return Site(tuple(pool._replace(nics=(Nic(pool.gpus, inf, inf),), rack="") for pool in place.pools))
