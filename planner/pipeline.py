"""The planner on one screen: a problem in, a proven plan out. Each step has its module; the order is here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.cost.measured_link import with_measured_memory
from planner.errors import InputError
from planner.infeasible import check_achievable, infeasible, overloaded
from planner.options import (
    Option,
    Trials,
    best_aggregated,
    best_disaggregated,
    capacity_bound_rps,
    check_compared,
    compared,
    trials_for,
)
from planner.search.kinds import Kinds, find_kinds
from planner.sources.problem import Problem
from planner.verdict import MODES, Mode, Verdict, judge

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything that was found out about a problem. `report.py` shows it, `emit/` turns it into files."""

    problem: Problem
    kinds: Kinds
    trials: Trials
    verdict: Verdict
    chosen: Option
    disaggregated: Option | None
    aggregated: Option | None
    compared: dict[str, Option | None]
    capacity_bounds_rps: dict[Mode, float]
    cpu_s: float

    def prefer(self, mode: Mode) -> Plan:
        """Return the plan with this way chosen, whatever the verdict. Raises InputError when it serves at no rate."""
        option = self.disaggregated if mode == "disaggregated" else self.aggregated
        if option is None or option.rate.goodput_rps <= 0:
            raise InputError(f"no {mode} plan meets the SLO at any rate; the verdict is: {self.verdict.headline}")
        return replace(self, chosen=option)

    @property
    def capacity_bound_rps(self) -> float:
        """The rate that no placement on this cluster can exceed in the chosen way [requests/s]."""
        return self.capacity_bounds_rps[self.mode]

    @property
    def mode(self) -> Mode:
        """The way that is chosen."""
        return "disaggregated" if self.chosen is self.disaggregated else "aggregated"


_NO_RATE = (
    "a closed loop (arrivals: closed) sends only as fast as it is answered, so there is no rate to plan for; plan with "
    "arrivals: poisson, then see the plan under the clients: planner simulate DEPLOYMENT --workload FILE"
)


def plan(problem: Problem, progress: Progress = lambda step: None) -> Plan:
    """Return the plan that serves the problem's workload best, proven in simulation.

    Raises InputError when the model fits nowhere, InfeasibleError when no plan meets the SLO
    (or not at the load asked for).
    """
    started_s = time.process_time()
    if problem.workload.clients is not None:
        raise InputError(problem.fault(_NO_RATE, "workload"))

    problem = replace(problem, topology=with_measured_memory(problem.topology, problem.profiles))

    # 1. profile -> cost models -> every legal instance, and why the others are not
    progress("fitting cost models")
    kinds = find_kinds(problem)
    check_compared(problem, kinds)
    check_achievable(problem, kinds)
    trials = trials_for(problem, kinds)

    # 2. joint search on a free network -> placement program -> named GPUs -> check -> replay on the real links
    disaggregated = best_disaggregated(problem, kinds, trials, progress)

    # 3. the same for the aggregated (colocated, chunked-prefill) way, and for layouts that the user wants to see
    aggregated = best_aggregated(problem, kinds, trials, progress)
    others = {one.name: compared(problem, kinds, trials, one, progress) for one in problem.compare}

    # 4. which one, by how much, and why
    able = [option for option in (disaggregated, aggregated) if option is not None and option.rate.goodput_rps > 0]
    if not able:
        raise infeasible(problem, kinds)
    if problem.demand_rps is not None and all(option.rate.goodput_rps < problem.demand_rps for option in able):
        raise overloaded(problem, trials, able, problem.demand_rps)
    progress("comparing")
    verdict = judge(problem, kinds, trials, disaggregated, aggregated)
    chosen = disaggregated if verdict.mode == "disaggregated" else aggregated
    assert chosen is not None
    return Plan(
        problem,
        kinds,
        trials,
        verdict,
        chosen,
        disaggregated,
        aggregated,
        others,
        {mode: capacity_bound_rps(problem, kinds, mode) for mode in MODES},
        time.process_time() - started_s,
    )
