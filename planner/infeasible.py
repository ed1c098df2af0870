"""Why there is no plan: a bound that no layout meets, or a load that is too much for the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, isfinite
from typing import NamedTuple

import numpy as np

from planner.cost.base import BatchShape
from planner.errors import InfeasibleError
from planner.options import Option, Trials
from planner.search.kinds import Kinds
from planner.search.layouts import Kind
from planner.simulator.cluster import Run
from planner.simulator.metrics import attainment
from planner.sources.problem import Problem
from planner.specs.slo import Slo
from planner.specs.units import show_seconds
from planner.specs.workload import Workload

_SAMPLE = 500
"""Requests that are looked at one by one to say what is achievable."""
_CLEARLY = 1.1
"""Beyond that a bound is out of reach however the sample was drawn."""


def check_achievable(problem: Problem, kinds: Kinds) -> None:
    """Raise InfeasibleError, before anything is simulated, when a request alone on an idle cluster is too slow."""
    if _worst(problem, kinds).factor > _CLEARLY:
        raise infeasible(problem, kinds)


def _worst(problem: Problem, kinds: Kinds) -> _Hardest:
    return max((_hardest(problem, kinds, slo) for slo in problem.slos), key=lambda hardest: hardest.factor)


def infeasible(problem: Problem, kinds: Kinds) -> InfeasibleError:
    """Return the error that says which bound no layout can meet, the best achievable value, and what would help."""
    worst = _worst(problem, kinds)
    slo, best = worst.slo, show_seconds(worst.best_s)
    of_class = f" of class {slo.name}" if slo.name else ""
    where = f"{worst.kind.layout} on {worst.kind.gpu}, one request at a time"
    if worst.factor <= 1.0:
        message = (
            f"infeasible: each bound{of_class} can be met alone, but not both by {slo.attainment:.0%} of requests "
            f"together; closest is {worst.term} at {best} ({where}) for a bound of {show_seconds(worst.bound_s)}"
        )
        way_out = "more replicas do not help; relax ttft_s, tpot_s or attainment, or use faster GPUs"
    else:
        message = (
            f"infeasible: no layout meets {worst.term} <= {show_seconds(worst.bound_s)}{of_class}; the best achievable "
            f"for {slo.attainment:.0%} of requests is {best} ({where}), {worst.factor:.3g}x the bound"
        )
        way_out = (
            f"more replicas do not help, since they do not speed up a single request; set {worst.term.lower()}_s to "
            f"more than {best}, or use faster GPUs or a layout wider than {worst.kind.layout}"
        )
    return InfeasibleError(message, binding=worst.term, best_s=worst.best_s, bound_s=worst.bound_s, way_out=way_out)


class _Hardest(NamedTuple):
    """The bound that is hardest to meet, and the least that a request alone on an idle cluster could have."""

    term: str
    best_s: float
    bound_s: float
    kind: Kind
    slo: Slo

    @property
    def factor(self) -> float:
        """By how much it misses the bound; up to 1 is a hit."""
        return self.best_s / self.bound_s


def _hardest(problem: Problem, kinds: Kinds, slo: Slo) -> _Hardest:
    """Return the harder of a class's two bounds."""
    prompts, outputs = _lengths(problem.workload)
    firsts_s = [(_first_s(kind, prompts), kind) for kind in _laws(kinds, "prefill")]
    least_s = np.min([first_s for first_s, _ in firsts_s], axis=0)
    lasts_s = [(least_s + _decode_s(kind, prompts, outputs), kind) for kind in _laws(kinds, "decode")]
    share = slo.attainment
    ttft = min(((_quantile(first_s, share), kind) for first_s, kind in firsts_s), key=lambda item: item[0])
    paces_s = ((np.nan_to_num(slo.request_tpot_s(0.0, least_s, last_s, outputs)), kind) for last_s, kind in lasts_s)
    tpot = min(((_quantile(pace_s, share), kind) for pace_s, kind in paces_s), key=lambda item: item[0])
    hardest = (_Hardest("TTFT", ttft[0], slo.ttft_s, ttft[1], slo), _Hardest("TPOT", tpot[0], slo.tpot_s, tpot[1], slo))
    return max(hardest, key=lambda one: one.factor)


def _laws(kinds: Kinds, phase: str) -> list[Kind]:
    """Return a kind of every layout that can do `phase`, alone or in an aggregated instance."""
    able = [kind for kind in kinds.all_legal if kind.phase in (phase, "aggregated")]
    return list({(kind.layout, kind.gpu): kind for kind in able}.values())


def _lengths(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt and output tokens of up to 500 requests, evenly out of the table."""
    table = workload.table
    rows = np.linspace(0, len(table) - 1, min(len(table), _SAMPLE)).round().astype(int)
    return table.prompt_tokens[rows], table.output_tokens[rows]


def _first_s(kind: Kind, prompts: np.ndarray) -> np.ndarray:
    """Return the time [s] that each prompt takes alone."""
    return np.array([kind.cost.prompt_s(prompt, kind.limits.pipeline_tokens)[0] for prompt in prompts.tolist()])


def _decode_s(kind: Kind, prompts: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the time [s] of all decode steps of each request alone."""
    held = (prompts + outputs // 2).tolist()
    return (outputs - 1) * np.array([kind.cost.iteration_s(BatchShape.decode(1, context)) for context in held])


def overloaded(problem: Problem, trials: Trials, able: Sequence[Option], demand_rps: float) -> InfeasibleError:
    """Return the error that says that this cluster cannot serve the load, the most that it can, and what binds."""
    best = max(able, key=lambda option: option.rate.goodput_rps)
    rate, trial = best.rate, trials.quoting.lasting(demand_rps)
    run = trial.run(best.placed.system, demand_rps)
    shares = attainment([run], problem.slos, trial.warmup_s)
    missed = [slo.attainment - share for slo, share in zip(problem.slos, shares, strict=True)]
    slo = problem.slos[worst := missed.index(max(missed))]
    counted = (run.requests.slo_class == worst) & (run.requests.arrival_s >= trial.warmup_s)
    best_s, bound_s = _within_s(run, counted, slo, rate.binding), _bound_s(slo, rate.binding)
    within = f"within {show_seconds(best_s)}" if isfinite(best_s) else "never for some"
    message = (
        f"infeasible: no plan serves {demand_rps:.3g} requests/s on {problem.topology.name} within the SLO; the most "
        f"is {rate.goodput_rps:.3g} [{rate.low_rps:.3g}, {rate.high_rps:.3g}] ({best.placed.layout}). Beyond that "
        f"{rate.binding} binds: at {demand_rps:.3g} requests/s {slo.attainment:.0%} have it {within}, for a bound of "
        f"{show_seconds(bound_s)}"
    )
    gpus = ceil(best.gpus * demand_rps / rate.goodput_rps)
    way_out = (
        f"about {gpus} such GPUs would serve it (here are {len(problem.topology.gpus)}); or set objective: max_goodput "
        "to get the most out of these"
    )
    return InfeasibleError(message, binding=rate.binding, best_s=best_s, bound_s=bound_s, way_out=way_out)


def _within_s(run: Run, rows: np.ndarray, slo: Slo, term: str) -> float:
    """Return the TTFT or TPOT [s] that `slo.attainment` of these requests stay within; inf when they never do."""
    if term == "TTFT":
        values_s = np.nan_to_num(run.ttft_s[rows], nan=inf, posinf=inf)
    else:
        requests = run.requests
        paces_s = slo.request_tpot_s(requests.arrival_s, run.first_token_s, run.finish_s, requests.output_tokens)
        values_s = np.nan_to_num(paces_s[rows], nan=0.0, posinf=inf)
    return _quantile(values_s, slo.attainment)


def _quantile(values: np.ndarray, share: float) -> float:
    """Return the least value that `share` of them stay within (np.percentile makes nan out of inf)."""
    return float(np.sort(values)[max(ceil(share * len(values) - 1e-9), 1) - 1]) if len(values) else inf


def _bound_s(slo: Slo, term: str) -> float:
    return slo.ttft_s if term == "TTFT" else slo.tpot_s
